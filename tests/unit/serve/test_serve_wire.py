"""What front and stages say to each other: there and back unchanged, and nothing that is not that is believed."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.serving import RandomSource, llama, qwen3

from smolcluster.comm.addresses import split_address
from smolcluster.comm.elastic.collectives.state_transfer import state_messages
from smolcluster.comm.elastic.transport.messages import Head, Kind, Message
from smolcluster.compute.memory import machine_bytes, physical_memory_bytes
from smolcluster.serve.engine import wire
from smolcluster.serve.engine.front import Front
from smolcluster.serve.engine.layout import LayoutOptions
from smolcluster.serve.engine.next_stages import DIAL_S
from smolcluster.serve.engine.stage import StageWorker
from smolcluster.serve.engine.stage_model import Row
from smolcluster.serve.engine.types import SamplingParams, Token
from smolcluster.serve.engine.wire import Assignment, HopTiming, SamplingState, ServedModel, StageBatch, StageOffer

MODEL = ServedModel(
    name="m", config=llama(), fingerprint="f", reference={"kind": "gguf", "path": "x.gguf"}, codec="fp16"
)
OFFER = StageOffer(
    name="pi5",
    host="pi5",
    address="10.0.0.2:1",
    device="cpu",
    cores=4,
    host_cores=4,
    memory_bytes=1 << 33,
    layer_s=0.01,
    shared_bytes=1 << 34,
)
ASSIGNMENT = Assignment(
    first_layer=2, num_layers=3, first=False, last=False, secret="s", name="pi-2", next=(("ab", "10.0.0.3:2"),)
)
BATCH = StageBatch(
    rows=(Row(sequence=7, start=0, count=3, logits=True), Row(sequence=9, start=12, count=1, logits=True)),
    secret="s",
    route=(("ab", "10.0.0.3:2"), ("cd", "[::1]:3")),
    samplings={
        7: SamplingState(
            sampling=SamplingParams(temperature=0.5, top_k=4, seed=-3, logprobs=2),
            position=3,
            tokens=(1, 2, 3),
            prompt=2,
        )
    },
    spent=(HopTiming(name="mini1", waited_s=0.25, computed_s=0.5),),
)
CHOSEN = {7: Token(token=5, logprob=-0.5, top=((5, -0.5), (6, -2.0))), 9: Token(token=0)}


def travelled(meta: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(meta))
    return told


def test_messages_survive_a_round_trip() -> None:
    for model in (MODEL, dataclasses.replace(MODEL, config=qwen3())):
        assert wire.read_model(travelled(wire.model_meta(model))) == model
    assert wire.read_offer(travelled(wire.meta_of(OFFER))) == OFFER
    assert wire.read_assignment(travelled(wire.meta_of(ASSIGNMENT)), num_layers=6) == ASSIGNMENT
    assert wire.read_batch(travelled(wire.meta_of(BATCH))) == BATCH
    assert wire.read_chosen(travelled(wire.chosen_meta(CHOSEN, BATCH.spent))) == (CHOSEN, list(BATCH.spent))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
READERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": (wire.read_model, wire.model_meta(MODEL)),
    "offer": (wire.read_offer, wire.meta_of(OFFER)),
    "assignment": (lambda meta: wire.read_assignment(meta, num_layers=6), wire.meta_of(ASSIGNMENT)),
    "batch": (wire.read_batch, wire.meta_of(BATCH)),
    "chosen": (wire.read_chosen, wire.chosen_meta(CHOSEN, BATCH.spent)),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in inside for place in places(inner, (*path, key)))]


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
def test_mutated_messages_are_refused_or_valid(kind: str, data: st.DataObject) -> None:
    """One place of a right message replaced by anything: a ValueError, or something that can be written again."""
    read, right = READERS[kind]
    meta = travelled(right)
    path = data.draw(st.sampled_from([place for place in places(meta) if place]))
    inside: Any = meta
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = data.draw(JSON)
    try:
        read(meta)
    except ValueError:
        pass


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"secret": ""}, "rows"),
        ({"rows": [[1, 0, 1, 1]]}, "boolean"),
        ({"rows": [], "secret": "", "route": []}, "rows of different sequences"),
        ({"rows": [[1, 0, 1, True], [1, 5, 1, True]], "secret": "", "route": []}, "rows of different sequences"),
        ({"rows": [[1, 0, 1 << 20, True]], "secret": "", "route": []}, "at most 65536 tokens"),
        ({"rows": [[1, -1, 1, True]], "secret": "", "route": []}, "whole number"),
        ({"rows": [[1, 0, 0, True]], "secret": "", "route": []}, "whole number"),
        ({"rows": [[True, 0, 1, True]], "secret": "", "route": []}, "whole number"),
    ],
)
def test_invalid_batches(meta: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wire.read_batch(meta)


@pytest.mark.parametrize("value", [2.0, True, "2", None, [], {}, -1, 1 << 40])
@pytest.mark.parametrize("name", ["vocab_size", "num_layers", "num_kv_heads", "ff_dim", "max_seq_len"])
def test_invalid_models(name: str, value: Any) -> None:
    """A shape is made of whole numbers, or nothing is laid out by it."""
    meta = travelled(wire.model_meta(MODEL))
    meta["config"][name] = value
    with pytest.raises(ValueError, match=name):
        wire.read_model(meta)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architecture": "mamba"}, "the architecture 'mamba' is not known here; known: gpt, qwen3"),
        ({"architecture": "qwen3"}, "not the shape of a qwen3: activation, bias, head_dim"),
        ({"architecture": 3}, "architecture"),
        ({"config": {}}, "not the shape of a gpt: "),
    ],
)
def test_invalid_architectures(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        wire.read_model(travelled(wire.model_meta(MODEL)) | change)


# Activations

BOUNDS = {"fp32": (0.0, 0.0), "bf16": (2.0**-8, 0.0), "fp16": (2.0**-11, 3e-8)}


@pytest.mark.parametrize("codec", wire.CODECS)
def test_activation_codecs_keep_their_error_bound(codec: str) -> None:
    x = (
        torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-6, 1.0, 30.0, 1e3, 0.0])[:, None]
    )
    payload, used = wire.encode(x, codec)
    assert used == codec
    back = wire.decode(payload, used, num_tokens=5, width=64)
    if codec == "int8":
        largest = x.abs().amax(dim=1, keepdim=True)
        assert bool(((back - x).abs() <= largest / 254 * 1.0001).all())
        assert payload.numel() == 5 * (64 + 4)
    else:
        share, least = BOUNDS[codec]
        assert bool(((back - x).abs() <= share * x.abs() + least).all())


def test_activations_beyond_fp16_are_sent_as_bf16() -> None:
    x = torch.tensor([[1.0, 70_000.0]])
    payload, used = wire.encode(x, "fp16")
    assert used == "bf16"
    assert torch.allclose(wire.decode(payload, used, num_tokens=1, width=2), x, rtol=2**-8)
    assert wire.encode(torch.tensor([[1.0, 65_504.0]]), "fp16")[1] == "fp16"


def head(dtype: str, shape: tuple[int, ...], codec: str = "fp16") -> Head:
    return Head(kind=Kind.ROWS, step=1, channel=0, epoch=0, codec=codec, dtype=dtype, shape=shape, nbytes=0, meta={})


def test_a_payload_has_the_size_of_its_rows() -> None:
    assert wire.landing(head("int64", (4,)), num_tokens=4, width=None) is not None
    assert wire.landing(head("float16", (4, 8)), num_tokens=4, width=8) is not None
    assert wire.landing(head("uint8", (4 * 12,), "int8"), num_tokens=4, width=8) is not None
    for wrong in (
        head("int64", (5,)),
        head("float16", (4, 9)),
        head("float32", (4, 8)),
        head("float16", (32,)),
        head("float16", (4, 8), "topk"),
        head("uint8", (1 << 40,), "int8"),
    ):
        assert wire.landing(wrong, num_tokens=4, width=None if wrong.dtype == "int64" else 8) is None


# Whole processes, told anything by somebody who has the token


class Link:
    def __init__(self, role: str) -> None:
        self.peer = SimpleNamespace(role=role, instance="ab", host="x", name="x")
        self.closed: list[str] = []
        self.sent: list[Message] = []
        self.open = True

    def close(self, reason: str) -> None:
        self.closed.append(reason)

    def send(self, message: Message, **_: Any) -> None:
        self.sent.append(message)


class Transport:
    """Nobody is at the other end."""

    me = SimpleNamespace(instance="me")

    def listen(self, host: str, port: int, handler: Any) -> str:
        return f"{host}:1"

    def dial(self, address: str, handler: Any) -> Any:
        split_address(address)
        return SimpleNamespace(close=lambda: None)

    def call_later(self, delay_s: float, callback: Any) -> None:
        return None


def anything(rng: random.Random, right: dict[str, Any]) -> dict[str, Any]:
    meta = travelled(right)
    for _ in range(rng.randint(0, 2)):
        path = rng.choice([place for place in places(meta) if place] or [("x",)])
        inside: Any = meta
        for key in path[:-1]:
            inside = inside[key]
        if isinstance(inside, dict | list):
            inside[path[-1]] = rng.choice([None, -1, 1 << 62, "", "x" * 500, [], {}, True, 1.5, [[1]], {"rows": 3}])
    return meta


METAS = [right for _, right in READERS.values()] + [{}, {"sequences": [1, 2]}, {"need": "float32"}, {"why": "x"}]


@pytest.mark.parametrize("seed", range(40))
def test_a_front_and_a_stage_survive_any_messages(seed: int) -> None:
    """A link may be closed for it; nothing is raised into the transport, and nothing is left half-done."""
    rng = random.Random(seed)
    front = Front(Transport(), RandomSource(llama(layers=2)), options=LayoutOptions(stages=1))  # type: ignore[arg-type]
    worker = idle_worker()
    for handler, role in ((front, "stage"), (worker, "front")):
        link = Link(role)
        if handler is worker:
            worker.front_linked(link)  # type: ignore[arg-type]
        else:
            handler.linked(link)  # type: ignore[arg-type]
        for _ in range(60):
            kind = rng.choice([kind for kind in Kind if kind is not Kind.ROWS])
            message = Message(kind=kind, step=rng.choice([0, 1, 2, 1 << 60]), meta=anything(rng, rng.choice(METAS)))
            handler.received(link, message)  # type: ignore[arg-type]
            handler.place(link, head("float16", (4, 32)))  # type: ignore[arg-type]
            while worker._tasks.qsize():
                task = worker._tasks.get()
                if task is not None:
                    task()
        handler.unlinked(link, "the end")  # type: ignore[arg-type]


def test_a_stage_opens_allowed_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_source(reference: dict[str, str]) -> SimpleNamespace:
        opened.append(reference["path"])
        return SimpleNamespace(fingerprint=MODEL.fingerprint, name="m")

    monkeypatch.setattr("smolcluster.serve.engine.stage_weights.open_source", open_source)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "link.gguf").symlink_to("/etc/hostname")
    inside, outside = str(tmp_path / "models" / "a.gguf"), str(tmp_path / "id_ed25519")
    paths = [
        inside,
        outside,
        str(tmp_path / "models" / ".." / "id_ed25519"),
        str(tmp_path / "models" / "link.gguf"),
        "\0",
    ]
    for files, allowed in ((None, []), (tmp_path / "models", [inside])):
        for path in paths:
            for kind in ("gguf", "hugging_face", "run"):
                worker = idle_worker(files)
                found = worker._weights._find(dataclasses.replace(MODEL, reference={"kind": kind, "path": path}))
                assert (found is not None) == (path in allowed)
        assert set(opened) == set(allowed)
    assert (
        idle_worker()._weights._find(dataclasses.replace(MODEL, reference={"kind": "package", "path": "smollm2"}))
        is not None
    )


def idle_worker(files: Path | None = None) -> StageWorker:
    return StageWorker(
        Transport(),  # type: ignore[arg-type]
        "127.0.0.1:1",
        name="s",
        host="h",
        listen=("127.0.0.1", 0),
        device=torch.device("cpu"),
        files=files,
    )


def test_a_new_assignment_cancels_a_weight_transfer() -> None:
    worker, link = idle_worker(), Link("front")
    worker.front_linked(link)  # type: ignore[arg-type]
    worker._model = MODEL
    worker._wanted = (1, ASSIGNMENT)
    first, *_ = state_messages({"a": torch.zeros(8)}, {})
    worker.received(link, first)  # type: ignore[arg-type]
    assert worker._incoming is not None
    worker.received(link, Message(kind=Kind.LAYERS, step=2, meta=wire.meta_of(ASSIGNMENT)))  # type: ignore[arg-type]
    assert (worker._incoming, worker._wanted) == (None, None)
    assert not link.closed


def test_shared_memory_does_not_depend_on_loaded_weights() -> None:
    """Else those who hold their layers already would look too small to a front that was started again."""
    worker, link = idle_worker(), Link("front")
    worker.front_linked(link)  # type: ignore[arg-type]
    told = []
    for weights in ({}, {"a": torch.zeros(1 << 20)}):
        worker._weights.tensors = weights
        worker._join(MODEL)
        told.append(wire.read_offer(link.sent[-1].meta).shared_bytes)
    assert told == [physical_memory_bytes(torch.device("cpu"))] * 2
    assert told[0] >= machine_bytes()


def test_an_early_timer_fails_batches_to_an_unreachable_stage() -> None:
    worker, link = idle_worker(), Link("front")
    worker.front_linked(link)  # type: ignore[arg-type]
    link.sent.clear()
    soon = (time.monotonic(), Message(kind=Kind.ROWS, step=8))
    due = (time.monotonic() - DIAL_S + 0.005, Message(kind=Kind.ROWS, step=7))
    worker._next._unsent["ab"] = [due, soon]
    worker._next._expire("ab")
    assert [(message.kind, message.step) for message in link.sent] == [(Kind.FAILED, 7)]
    assert worker._next._unsent == {"ab": [soon]}
