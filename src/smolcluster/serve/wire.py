"""What front and stages say to each other, as typed values; `comm/elastic` carries it.

    stage                                       front
      ASK                                ->
                                         <-       PLAN      the model's shape and where its weights are: `Model`
      JOIN   memory, speed, address      ->                 `Offer`
                                         <-       LAYERS    hold these: `Assignment`
      HELD   room for so many tokens,    ->
             or what is missing
                                         <-       STATE     the weights, for one that has no files
                                         <-       ROWS      a batch: tokens, and the way it goes: `Batch`
      ROWS -> the next stage ... the last one
      CHOSEN                             ->                 a `Token` for each sequence
      FAILED                             ->
                                         <-       FORGET    sequences that are over

Nothing that comes in is believed: `read` gives a value or raises ValueError, which ends the link it came over. A batch is
taken only from who knows the secret of the front, which those alone are told that hold layers: whoever else is linked to a
stage could otherwise write into the caches of sequences that are not his.

Activations travel in a codec. What one number loses:

    fp32   nothing
    bf16   2^-8 of itself                       fp16   2^-11 of itself, from 6e-5 to 65504; below, 3e-8
    int8   1/254 of the largest of its token

A batch whose activations do not fit fp16 goes as bf16: a model may have a few very large ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from smolcluster.comm.codecs import CodecError, make_codec
from smolcluster.comm.elastic.messages import Head
from smolcluster.models.parts import type_name
from smolcluster.models.protocols import DecoderConfig
from smolcluster.models.registry import architecture_of, from_plain, to_plain
from smolcluster.serve.ask import Sampling, Token
from smolcluster.serve.part import Row

CODECS = ("fp32", "bf16", "fp16", "int8")
TYPES = {type_name(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
MOST_TOKENS = 1 << 16  # of a batch
MOST_NAME = 200
FP16_LARGEST = 65504.0

T = TypeVar("T")


# Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is served, and how a machine that has the files opens them."""

    name: str
    config: DecoderConfig
    fingerprint: str
    reference: Mapping[str, str]
    codec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a machine has for the layers of this model."""

    name: str
    host: str  # several stages may be on one
    address: str  # where other stages find it
    device: str
    cores: int  # that it computes with at once
    host_cores: int
    memory_bytes: int
    layer_s: float  # a token through one layer
    weight_bytes: int = 4  # of one number, as it holds them
    shared_bytes: int = 0  # built into its host, or its GPU: what all processes there have together; 0: nobody knows


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    first_layer: int
    num_layers: int
    first: bool
    last: bool
    secret: str = field(repr=False)  # of the front: what its batches carry
    name: str  # what this machine is called there: two may have come with the same
    next: tuple[tuple[str, str], ...] = ()  # instance and address of those that may come next: they are dialled early

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of several sequences on their way through the same machines."""

    rows: tuple[Row, ...]
    secret: str = field(default="", repr=False)
    route: tuple[tuple[str, str], ...] = ()  # instance and address of each stage still to come
    samplings: Mapping[int, Opening] = field(default_factory=dict)  # of sequences whose first answer this is
    spent: tuple[Spent, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How the tokens of a sequence are chosen, and what came before: the prompt, then what was generated. Tokens only where
    the choice depends on them: a long prompt is long here, too."""

    sampling: Sampling
    position: int  # of the next one
    tokens: tuple[int, ...] = ()
    prompt: int = 0  # so many of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Where a batch spent its time."""

    name: str
    waited_s: float
    computed_s: float


# To meta and back


def model_meta(model: Model) -> dict[str, Any]:
    config = model.config
    return {
        **_plain(model),
        "architecture": architecture_of(config).name,
        "config": to_plain(config),
        "reference": dict(model.reference),
    }


def read_model(meta: Mapping[str, Any]) -> Model:
    shape = from_plain(_text(meta, "architecture"), _mapping(meta, "config"))
    codec = _text(meta, "codec")
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec[:20]!r}")
    reference = {str(key): str(value) for key, value in _mapping(meta, "reference").items()}
    return Model(
        name=_text(meta, "name"),
        config=shape,
        fingerprint=_text(meta, "fingerprint"),
        reference=reference,
        codec=codec,
    )


def offer_meta(offer: Offer) -> dict[str, Any]:
    return _plain(offer)


def read_offer(meta: Mapping[str, Any]) -> Offer:
    return Offer(
        name=_text(meta, "name"),
        host=_text(meta, "host"),
        address=_text(meta, "address"),
        device=_text(meta, "device"),
        cores=_whole(meta, "cores", least=1),
        host_cores=_whole(meta, "host_cores", least=1),
        memory_bytes=_whole(meta, "memory_bytes"),
        layer_s=_number(meta, "layer_s"),
        weight_bytes=_whole(meta, "weight_bytes", least=1),
        shared_bytes=_whole(meta, "shared_bytes"),
    )


def assignment_meta(assignment: Assignment) -> dict[str, Any]:
    return {**_plain(assignment), "next": [list(hop) for hop in assignment.next]}


def read_assignment(meta: Mapping[str, Any], *, num_layers: int) -> Assignment:
    start, count = _whole(meta, "first_layer"), _whole(meta, "num_layers", least=1)
    if start + count > num_layers:
        raise ValueError(f"layers {start} to {start + count - 1} of a model that has {num_layers}")
    return Assignment(
        first_layer=start,
        num_layers=count,
        first=_flag(meta, "first"),
        last=_flag(meta, "last"),
        secret=_text(meta, "secret"),
        name=_text(meta, "name"),
        next=_hops(meta, "next"),
    )


def batch_meta(batch: Batch) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "rows": [[row.sequence, row.start, row.count, int(row.answer)] for row in batch.rows],
        "secret": batch.secret,
        "route": [list(hop) for hop in batch.route],
    }
    if batch.samplings:
        meta["samplings"] = [
            [sequence, _plain(opening.sampling), opening.position, list(opening.tokens), opening.prompt]
            for sequence, opening in batch.samplings.items()
        ]
    if batch.spent:
        meta["spent"] = [[spent.name, spent.waited_s, spent.computed_s] for spent in batch.spent]
    return meta


def read_batch(meta: Mapping[str, Any]) -> Batch:
    rows = tuple(
        Row(sequence=_count(row, 0), start=_count(row, 1), count=_count(row, 2, least=1), answer=bool(_count(row, 3)))
        for row in _lists(meta, "rows", width=4)
    )
    batch = Batch(
        rows=rows,
        secret=_text(meta, "secret"),
        route=_hops(meta, "route"),
        samplings=dict(_openings(meta)),
        spent=tuple(_spent(meta.get("spent", []))),
    )
    if not rows or len({row.sequence for row in rows}) != len(rows) or batch.num_tokens > MOST_TOKENS:
        raise ValueError(f"a batch has rows of different sequences, and at most {MOST_TOKENS} tokens")
    return batch


def _openings(meta: Mapping[str, Any]) -> list[tuple[int, Opening]]:
    found = []
    for entry in _lists(meta, "samplings", width=5) if "samplings" in meta else ():
        sampling, tokens = entry[1], entry[3]
        if not isinstance(sampling, dict) or not isinstance(tokens, list):
            raise ValueError("a sampling is a table, and the tokens before it a list")
        opening = Opening(
            sampling=read_sampling(sampling),
            position=_count(entry, 2),
            tokens=tuple(_count(tokens, i) for i in range(len(tokens))),
            prompt=_count(entry, 4),
        )
        found.append((_count(entry, 0), opening))
    return found


def read_sampling(meta: Mapping[str, Any]) -> Sampling:
    return Sampling(
        temperature=_number(meta, "temperature"),
        top_k=None if meta.get("top_k") is None else _whole(meta, "top_k", least=1),
        top_p=_number(meta, "top_p"),
        repetition_penalty=_number(meta, "repetition_penalty"),
        presence_penalty=_number(meta, "presence_penalty", least=-math.inf),
        frequency_penalty=_number(meta, "frequency_penalty", least=-math.inf),
        seed=_whole(meta, "seed", least=-(2**63)),
        logprobs=None if meta.get("logprobs") is None else _whole(meta, "logprobs"),
    )


def chosen_meta(chosen: Mapping[int, Token], spent: Sequence[Spent]) -> dict[str, Any]:
    rows = [[s, t.token, t.logprob, [list(pair) for pair in t.top]] for s, t in chosen.items()]
    return {"rows": rows, "spent": [[one.name, one.waited_s, one.computed_s] for one in spent]}


def read_chosen(meta: Mapping[str, Any]) -> tuple[dict[int, Token], list[Spent]]:
    chosen = {}
    for row in _lists(meta, "rows", width=4):
        likeliest = _lists({"top": row[3]}, "top", width=2)
        top = tuple((_count(pair, 0), _real(pair, 1)) for pair in likeliest)
        logprob = None if row[2] is None else _real(row, 2)
        chosen[_count(row, 0)] = Token(token=_count(row, 1), logprob=logprob, top=top)
    return chosen, list(_spent(meta.get("spent", [])))


def read_room(meta: Mapping[str, Any]) -> int:
    """Tokens that a machine has room for, of HELD."""
    return _whole(meta, "room")


def read_type(meta: Mapping[str, Any]) -> torch.dtype:
    """Of the weights that a machine needs, of HELD."""
    name = _text(meta, "need")
    if name not in TYPES:
        raise ValueError(f"weights of the type {name[:20]!r}")
    return TYPES[name]


def read_sequences(meta: Mapping[str, Any]) -> list[int]:
    numbers = meta.get("sequences")
    if not isinstance(numbers, list):
        raise ValueError("sequences is not a list")
    return [_count(numbers, place) for place in range(len(numbers))]


def _spent(entries: Any) -> list[Spent]:
    return [
        Spent(name=str(entry[0])[:MOST_NAME], waited_s=_real(entry, 1), computed_s=_real(entry, 2))
        for entry in _lists({"spent": entries}, "spent", width=3)
    ]


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
    return x_ND.to(_DTYPES[codec]).contiguous(), codec


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
    elif head.codec in _DTYPES:
        wanted, shape = _DTYPES[head.codec], (num_tokens, width)
    else:
        return None
    if (head.dtype, head.shape) != (str(wanted).removeprefix("torch."), shape):
        return None
    return torch.empty(shape, dtype=wanted)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _int8(width: int) -> Any:
    """One scale for each token: what one of them holds does not touch the others."""
    return make_codec("int8", block=width)


# Reading


def _plain(value: Any) -> dict[str, Any]:
    return asdict(value)


def _mapping(meta: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = meta.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key} is not a table")
    return value


def _text(meta: Mapping[str, Any], key: str) -> str:
    value = meta.get(key)
    if not isinstance(value, str) or len(value) > MOST_NAME:
        raise ValueError(f"{key} is not a short text")
    return value


def _whole(meta: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    value = meta.get(key)
    if type(value) is not int or value < least:
        raise ValueError(f"{key} is not a whole number, at least {least}")
    return value


def _number(meta: Mapping[str, Any], key: str, *, least: float = 0.0) -> float:
    value = meta.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise ValueError(f"{key} is not a number, at least {least:g}")
    return float(value)


def _flag(meta: Mapping[str, Any], key: str) -> bool:
    value = meta.get(key)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is not true or false")
    return value


def _lists(meta: Mapping[str, Any], key: str, *, width: int) -> list[list[Any]]:
    value = meta.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, list) and len(entry) == width for entry in value):
        raise ValueError(f"{key} is not a list of {width} things each")
    return value


def _count(entry: Sequence[Any], place: int, *, least: int = 0) -> int:
    value = entry[place]
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r:.40} is not a whole number, at least {least}")
    return value


def _real(entry: Sequence[Any], place: int) -> float:
    value = entry[place]
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        raise ValueError(f"{value!r:.40} is not a number")
    return float(value)


def _hops(meta: Mapping[str, Any], key: str) -> tuple[tuple[str, str], ...]:
    hops = _lists(meta, key, width=2)
    if not all(isinstance(word, str) and len(word) <= MOST_NAME for hop in hops for word in hop):
        raise ValueError(f"{key} does not name machines and their addresses")
    return tuple((hop[0], hop[1]) for hop in hops)
