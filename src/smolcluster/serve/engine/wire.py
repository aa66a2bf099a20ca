"""The messages between front and stages, as typed values; `comm/elastic` carries them.

    stage                                       front
      ASK                                ->
                                         <-       PLAN      the model's shape and where its weights are: `ServedModel`
      JOIN   memory, speed, address      ->                 `StageOffer`
                                         <-       LAYERS    hold these: `Assignment`
      HELD   room for so many tokens,    ->
             or what is missing
                                         <-       STATE     the weights, for one that has no files
                                         <-       ROWS      a batch: tokens, and the way it goes: `StageBatch`
      ROWS -> the next stage ... the last one
      CHOSEN                             ->                 a `Token` for each sequence
      FAILED                             ->
                                         <-       FORGET    sequences that are over

Nothing that comes in is trusted: `read` gives a value or raises ValueError, which ends the link it came over. A batch is taken
only from a peer that knows the secret of the front, which the front sends to those that hold layers: any other peer of a stage
could write into the caches of sequences of others.

Activations travel in a codec. What one number loses:

    fp32   nothing
    bf16   2^-8 of itself                       fp16   2^-11 of itself, from 6e-5 to 65504; below, 3e-8
    int8   1/254 of the largest of its token

A batch whose activations do not fit fp16 goes as bf16: a model may have a few very large ones.
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
from smolcluster.serve.engine.types import Amount, Flag, Name, Positive, Real, SamplingParams, Token, Whole

CODECS = ("fp32", "bf16", "fp16", "int8")
TYPES = {type_name(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
MOST_TOKENS = 1 << 16  # of a batch
FP16_LARGEST = 65504.0

T = TypeVar("T")
Hop = tuple[Name, Name]  # instance and address of a stage
Key = Annotated[int, Field(ge=0)]  # a sequence; JSON makes texts of keys


# Values


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is served, and how a machine that has the files opens them."""

    name: str
    config: DecoderConfig
    fingerprint: str
    reference: Mapping[str, str]
    codec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOffer:
    """What a machine has for the layers of this model."""

    name: Name
    host: Name  # several stages may be on one
    address: Name  # where other stages find it
    device: Name
    cores: Positive  # that it computes with at once
    host_cores: Positive
    memory_bytes: Whole
    layer_s: Amount  # a token through one layer
    weight_bytes: Positive = 4  # of one number, as it holds them
    shared_bytes: Whole = 0  # built into its host, or its GPU: what all processes there have together; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    first_layer: Whole
    num_layers: Positive
    first: Flag
    last: Flag
    secret: Name = field(repr=False)  # of the front: what its batches carry
    name: Name  # what this machine is called there: two may have come with the same
    next: tuple[Hop, ...] = ()  # those that may come next: they are dialled early

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)


class SamplingState(NamedTuple):
    """How the tokens of a sequence are chosen, and what came before: the prompt, then what was generated. Tokens only where
    the choice depends on them: a long prompt is long here, too."""

    sampling: SamplingParams
    position: Whole  # of the next one
    tokens: tuple[Whole, ...] = ()
    prompt: Whole = 0  # so many of them


class HopTiming(NamedTuple):
    """Where a batch spent its time."""

    name: Name
    waited_s: Real
    computed_s: Real


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBatch:
    """Rows of several sequences on their way through the same machines."""

    rows: tuple[Row, ...]
    secret: Name = field(default="", repr=False)
    route: tuple[Hop, ...] = ()  # the stages still to come
    samplings: Mapping[Key, SamplingState] = field(default_factory=dict)  # of sequences whose first answer this is
    spent: tuple[HopTiming, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


# To meta and back


class _ModelMeta(BaseModel):
    name: Name
    architecture: Name
    config: dict[str, Any]
    fingerprint: Name
    reference: dict[str, str]
    codec: Name


class _ChosenMeta(BaseModel):
    rows: list[tuple[Whole, Whole, Real | None, tuple[tuple[Whole, Real], ...]]]
    spent: list[HopTiming] = []


class _Room(BaseModel):
    room: Whole


class _Need(BaseModel):
    need: Name


class _Forgotten(BaseModel):
    sequences: list[Whole]


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _read(kind: type[T], meta: Mapping[str, Any]) -> T:
    """Return a value of this class, or raise a ValueError that names the first field that does not fit."""
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
    told = _read(_ModelMeta, meta)
    config = from_plain(told.architecture, told.config)
    if told.codec not in CODECS:
        raise ValueError(f"unknown codec {told.codec[:20]!r}")
    return ServedModel(
        name=told.name, config=config, fingerprint=told.fingerprint, reference=told.reference, codec=told.codec
    )


def meta_of(value: StageOffer | Assignment | StageBatch) -> dict[str, Any]:
    """Return a value as it travels; named tuples travel as lists, without the names of their fields."""
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
    if not sequences or len(sequences) != len(batch.rows) or batch.num_tokens > MOST_TOKENS:
        raise ValueError(f"a batch has rows of different sequences, and at most {MOST_TOKENS} tokens")
    return batch


def chosen_meta(chosen: Mapping[int, Token], spent: Sequence[HopTiming]) -> dict[str, Any]:
    rows = [[sequence, token.token, token.logprob, token.top] for sequence, token in chosen.items()]
    return {"rows": rows, "spent": spent}


def read_chosen(meta: Mapping[str, Any]) -> tuple[dict[int, Token], list[HopTiming]]:
    told = _read(_ChosenMeta, meta)
    chosen = {s: Token(token=token, logprob=logprob, top=top) for s, token, logprob, top in told.rows}
    return chosen, told.spent


def read_room(meta: Mapping[str, Any]) -> int:
    """Tokens that a machine has room for, of HELD."""
    return _read(_Room, meta).room


def read_type(meta: Mapping[str, Any]) -> torch.dtype:
    """Of the weights that a machine needs, of HELD."""
    name = _read(_Need, meta).need
    if name not in TYPES:
        raise ValueError(f"weights of the type {name[:20]!r}")
    return TYPES[name]


def read_sequences(meta: Mapping[str, Any]) -> list[int]:
    return _read(_Forgotten, meta).sequences


# Activations


def encode(x_ND: Tensor, codec: str) -> tuple[Tensor, str]:
    """The payload for activations, and the codec that it is in: fp16 gives way to bf16 where a number does not fit."""
    x_ND = x_ND.detach().to("cpu", torch.float32)
    if codec == "fp16":
        numbers = x_ND.numpy()  # for so few of them it starts sooner than torch does
        # A NaN is neither larger nor smaller than anything.
        if numbers.min() >= -FP16_LARGEST and numbers.max() <= FP16_LARGEST:
            return torch.from_numpy(numbers.astype(np.float16)), codec
        codec = "bf16"
    if codec == "int8":
        if not bool(x_ND.isfinite().all()):
            raise CodecError("activations that are no numbers")
        out = torch.empty(_int8(x_ND.shape[1]).nbytes(x_ND.shape), dtype=torch.uint8)
        _int8(x_ND.shape[1]).encode(x_ND.contiguous(), out, key=0)
        return out, codec
    return x_ND.to(DTYPES[codec]).contiguous(), codec


def decode(payload: Tensor, codec: str, *, num_tokens: int, width: int) -> Tensor:
    """Activations in fp32, N x D. Raises ValueError for what cannot be."""
    if codec == "int8":
        out = torch.empty(num_tokens, width)
        try:
            _int8(width).decode(payload, out)
        except CodecError as error:
            raise ValueError(str(error)) from error
        return out
    return payload.to(torch.float32)


def landing(head: Head, *, num_tokens: int, width: int | None) -> Tensor | None:
    """Where a payload goes: tokens (`width` None) or activations. None for one that this batch cannot have."""
    shape: tuple[int, ...]
    if width is None:
        wanted, shape = torch.int64, (num_tokens,)
    elif head.codec == "int8":
        wanted, shape = torch.uint8, (_int8(width).nbytes((num_tokens, width)),)
    elif head.codec in DTYPES:
        wanted, shape = DTYPES[head.codec], (num_tokens, width)
    else:
        return None
    if (head.dtype, head.shape) != (str(wanted).removeprefix("torch."), shape):
        return None
    return torch.empty(shape, dtype=wanted)


def _int8(width: int) -> Any:
    """One scale for each token: what one of them holds does not touch the others."""
    return make_codec("int8", block=width)
