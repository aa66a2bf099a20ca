"""The messages between front and stages, as typed values. `comm/elastic` transports them.

    stage                                       front
      ASK                                ->
                                         <-       PLAN      the model's shape and the path of its weights: `ServedModel`
      JOIN   memory, speed, address      ->                 `StageOffer`
                                         <-       LAYERS    to load: `Assignment`
      HELD   loaded, with room for n     ->
             tokens; or weights needed
                                         <-       STATE     the weights, for a stage without files
                                         <-       ROWS      a batch: tokens, and its route: `StageBatch`
      ROWS -> the next stage ... the last one
      CHOSEN                             ->                 a `Token` for each sequence
      FAILED                             ->
                                         <-       FORGET    finished sequences

Input is not trusted: the `read_` functions return a value or raise ValueError, which closes the link. A stage accepts a batch
only with the front's secret, which the front sends to stages that hold layers; otherwise any peer could write into the caches.

Activations are sent in a codec. Error of one number:

    fp32   none
    bf16   2^-8 relative                        fp16   2^-11 relative from 6e-5 to 65504; below, 3e-8
    int8   1/254 of the largest number of its token

Activations that exceed fp16 are sent as bf16: some models have a few very large ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from torch import Tensor

from smolcluster.comm.codecs import CodecError, make_codec
from smolcluster.comm.elastic.transport.messages import Head
from smolcluster.compute.precision import DTYPES
from smolcluster.models.parts import type_name
from smolcluster.models.protocols import DecoderConfig
from smolcluster.models.registry import architecture_of, from_plain, to_plain
from smolcluster.serve.engine.stage_model import Row
from smolcluster.serve.engine.types import Amount, Flag, Name, Natural, Positive, Real, SamplingParams, Token

CODECS = ("fp32", "bf16", "fp16", "int8")
TYPES = {type_name(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
MAX_TOKENS = 1 << 16  # of a batch
FP16_LARGEST = 65504.0

T = TypeVar("T")
Hop = tuple[Name, Name]  # instance and address of a stage
Key = Annotated[int, Field(ge=0)]  # a sequence; not strict, since JSON keys are strings


# Values


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model, and how a machine that has its files finds them."""

    name: str
    config: DecoderConfig
    fingerprint: str
    reference: Mapping[str, str]
    codec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOffer:
    """The resources of a machine for this model."""

    name: Name
    host: Name  # may be shared by several stages
    address: Name  # that other stages dial
    device: Name
    cores: Positive  # used
    host_cores: Positive
    memory_bytes: Natural
    layer_s: Amount  # time of one token through one layer
    weight_bytes: Positive = 4  # per number
    shared_bytes: Natural = 0  # total memory of its host or GPU, shared by all processes; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    first_layer: Natural
    num_layers: Positive
    first: Flag
    last: Flag
    secret: Name = field(repr=False)  # of the front: authenticates batches
    name: Name  # unique name given by the front
    next: tuple[Hop, ...] = ()  # stages to dial

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)


class SamplingState(NamedTuple):
    """How to sample a sequence. `tokens` (prompt, then generated) only if the result depends on them."""

    sampling: SamplingParams
    position: Natural  # of the next token
    tokens: tuple[Natural, ...] = ()
    prompt: Natural = 0  # how many of `tokens` are the prompt


class HopTiming(NamedTuple):
    """The time of a batch on one stage."""

    name: Name
    waited_s: Real
    computed_s: Real


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBatch:
    """Rows of sequences with the same route."""

    rows: tuple[Row, ...]
    secret: Name = field(default="", repr=False)
    route: tuple[Hop, ...] = ()  # the stages still to come
    samplings: Mapping[Key, SamplingState] = field(default_factory=dict)  # of sequences that get their first token here
    spent: tuple[HopTiming, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


# Conversion to and from message meta


class _ModelMeta(BaseModel):
    name: Name
    architecture: Name
    config: dict[str, Any]
    fingerprint: Name
    reference: dict[str, str]
    codec: Name


class _ChosenMeta(BaseModel):
    rows: list[tuple[Natural, Natural, Real | None, tuple[tuple[Natural, Real], ...]]]
    spent: list[HopTiming] = []


class _Room(BaseModel):
    room: Natural


class _Need(BaseModel):
    need: Name


class _Forgotten(BaseModel):
    sequences: list[Natural]


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _read(kind: type[T], meta: Mapping[str, Any]) -> T:
    """Return a value of this class, or raise ValueError with the first invalid field."""
    try:
        found: T = _adapter(cast(Any, kind)).validate_python(meta)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    place, least = ".".join(map(str, first["loc"])), first.get("ctx", {}).get("ge")
    if first["type"] == "int_type" or isinstance(least, int):
        raise ValueError(f"{place[:80]} is not a whole number" + ("" if least is None else f", at least {least}"))
    raise ValueError(f"{place[:80]}: {first['msg']}")


def model_meta(model: ServedModel) -> dict[str, Any]:
    architecture = architecture_of(model.config).name
    return {**asdict(model), "architecture": architecture, "config": to_plain(model.config)}


def read_model(meta: Mapping[str, Any]) -> ServedModel:
    read = _read(_ModelMeta, meta)
    config = from_plain(read.architecture, read.config)
    if read.codec not in CODECS:
        raise ValueError(f"unknown codec {read.codec[:20]!r}")
    return ServedModel(
        name=read.name, config=config, fingerprint=read.fingerprint, reference=read.reference, codec=read.codec
    )


def meta_of(value: StageOffer | Assignment | StageBatch) -> dict[str, Any]:
    """Return a value as meta; named tuples become lists."""
    meta: dict[str, Any] = _adapter(cast(Any, type(value))).dump_python(value, mode="json", exclude_defaults=True)
    return meta


def read_offer(meta: Mapping[str, Any]) -> StageOffer:
    return _read(StageOffer, meta)


def read_assignment(meta: Mapping[str, Any], *, num_layers: int) -> Assignment:
    assignment = _read(Assignment, meta)
    layers = assignment.layers
    if layers.stop > num_layers:
        raise ValueError(f"layers {layers.start} to {layers.stop - 1} of a model that has {num_layers}")
    return assignment


def read_batch(meta: Mapping[str, Any]) -> StageBatch:
    batch = _read(StageBatch, meta)
    sequences = {row.sequence for row in batch.rows}
    if not sequences or len(sequences) != len(batch.rows) or batch.num_tokens > MAX_TOKENS:
        raise ValueError(f"a batch has rows of different sequences, and at most {MAX_TOKENS} tokens")
    return batch


def chosen_meta(chosen: Mapping[int, Token], spent: Sequence[HopTiming]) -> dict[str, Any]:
    rows = [[sequence, token.token, token.logprob, token.top] for sequence, token in chosen.items()]
    return {"rows": rows, "spent": spent}


def read_chosen(meta: Mapping[str, Any]) -> tuple[dict[int, Token], list[HopTiming]]:
    read = _read(_ChosenMeta, meta)
    chosen = {s: Token(token=token, logprob=logprob, top=top) for s, token, logprob, top in read.rows}
    return chosen, read.spent


def read_room(meta: Mapping[str, Any]) -> int:
    """Read the room of HELD, in tokens."""
    return _read(_Room, meta).room


def read_type(meta: Mapping[str, Any]) -> torch.dtype:
    """Read the dtype of the weights that HELD requests."""
    name = _read(_Need, meta).need
    if name not in TYPES:
        raise ValueError(f"unknown dtype of weights {name[:20]!r}")
    return TYPES[name]


def read_sequences(meta: Mapping[str, Any]) -> list[int]:
    return _read(_Forgotten, meta).sequences


# Activations


def encode(x_ND: Tensor, codec: str) -> tuple[Tensor, str]:
    """Return the payload of activations and its codec: bf16 instead of fp16 if a number does not fit."""
    x_ND = x_ND.detach().to("cpu", torch.float32)
    if codec == "fp16":
        numbers = x_ND.numpy()  # faster than torch for few numbers
        if numbers.min() >= -FP16_LARGEST and numbers.max() <= FP16_LARGEST:
            return torch.from_numpy(numbers.astype(np.float16)), codec
        codec = "bf16"
    if codec == "int8":
        if not bool(x_ND.isfinite().all()):
            raise CodecError("activations are not finite")
        out = torch.empty(_int8(x_ND.shape[1]).nbytes(x_ND.shape), dtype=torch.uint8)
        _int8(x_ND.shape[1]).encode(x_ND.contiguous(), out, key=0)
        return out, codec
    return x_ND.to(DTYPES[codec]).contiguous(), codec


def decode(payload: Tensor, codec: str, *, num_tokens: int, width: int) -> Tensor:
    """Return activations in fp32, N x D. Raises ValueError for an invalid payload."""
    if codec == "int8":
        out = torch.empty(num_tokens, width)
        try:
            _int8(width).decode(payload, out)
        except CodecError as error:
            raise ValueError(str(error)) from error
        return out
    return payload.to(torch.float32)


def landing(head: Head, *, num_tokens: int, width: int | None) -> Tensor | None:
    """Return a tensor for the payload: tokens (`width` None) or activations; None if the head does not match the batch."""
    shape: tuple[int, ...]
    if width is None:
        wanted, shape = torch.int64, (num_tokens,)
    elif head.codec == "int8":
        wanted, shape = torch.uint8, (_int8(width).nbytes((num_tokens, width)),)
    elif head.codec in DTYPES:
        wanted, shape = DTYPES[head.codec], (num_tokens, width)
    else:
        return None
    if (head.dtype, head.shape) != (type_name(wanted), shape):
        return None
    return torch.empty(shape, dtype=wanted)


def _int8(width: int) -> Any:
    """Return the codec with one scale for each token."""
    return make_codec("int8", block=width)
