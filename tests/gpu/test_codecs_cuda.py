"""On a GPU: payloads, what they decode to, and means of them are bit for bit those of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smolcluster.comm.codecs import CodecError, flat_encoding, make_codec
from smolcluster.comm.codecs.flat import FlatEncoding
from smolcluster.comm.gathered_mean import GatheredMean
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.comm.rounds import Committed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYOUT: list[tuple[str, tuple[int, ...]]] = [
    ("embedding", (1000, 192)),
    ("matrix", (256, 128)),
    ("tall", (200, 63)),
    ("bias", (768,)),
    ("scale", (768,)),
    ("vector", (5001,)),
    ("kernel", (3, 5, 7, 11)),
    ("number", ()),
    ("nothing", (0, 4)),
]
CODECS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("fp16", {}),
    ("int8", {}),
    ("int4", {}),
    ("int4", {"block": 7}),
    ("blocktopk", {}),
    ("blocktopk", {"k": 128, "bits": 2}),
    ("blocktopk", {"k": 300, "bits": 5}),
    ("blocktopk", {"bits": 0}),
]
every = pytest.mark.parametrize(("name", "options"), CODECS, ids=[f"{n}-{list(o.values())}" for n, o in CODECS])


def drawn(seed: int, scale: float = 1e-3) -> dict[str, Tensor]:
    """Draw from so many numbers that no two of a block are equally large."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).float() for name, shape in LAYOUT
    }


def filled(encoding: FlatEncoding, seed: int, scale: float = 1e-3) -> Tensor:
    flat = encoding.empty(CPU)
    for view, tensor in zip(encoding.views(flat), drawn(seed, scale).values(), strict=True):
        view.copy_(tensor)
    return flat


def decoded(encoding: FlatEncoding, payload: Tensor) -> Tensor:
    flat = encoding.zeros(payload.device)
    for part in encoding.decode(payload):
        part.add_to(flat, 1 / 3)
    return torch.cat([view.reshape(-1) for view in encoding.views(flat)]).cpu()


def outcome(encoding: FlatEncoding, payload: Tensor) -> Any:
    """Return what it decodes to, or why it is refused."""
    try:
        return decoded(encoding, payload)
    except CodecError as error:
        return str(error)


@every
@pytest.mark.parametrize("scale", [1.0, 1e-3, 2.0**-130])
def test_payloads_and_numbers_are_those_of_a_cpu(name: str, options: dict[str, Any], scale: float) -> None:
    if name == "fp16" and scale < 1e-10:
        pytest.skip("fp16 has no such numbers")
    encoding = flat_encoding(make_codec(name, **options), LAYOUT)
    flat = filled(encoding, 1, scale)
    expected, _ = encoding.encode(flat)
    payload, _ = encoding.encode(flat.to(CUDA))
    assert payload.device.type == "cuda"
    assert torch.equal(payload.cpu(), expected)
    assert torch.equal(decoded(encoding, payload), decoded(encoding, expected))


@every
def test_encoding_leaves_the_same_rest(name: str, options: dict[str, Any]) -> None:
    encoding = flat_encoding(make_codec(name, **options), LAYOUT)
    rests = []
    for device in (CPU, CUDA):
        flat = filled(encoding, 2).to(device)
        for part in encoding.encode(flat)[1]:
            part.add_to(flat, -1.0)
        rests.append(torch.cat([view.reshape(-1) for view in encoding.views(flat)]).cpu())
    assert torch.equal(*rests)


@pytest.mark.parametrize("name", ["bf16", "int4", "blocktopk"])
def test_damaged_payloads_are_decoded_or_refused_as_on_a_cpu(name: str) -> None:
    encoding = flat_encoding(make_codec(name), LAYOUT)
    payload, _ = encoding.encode(filled(encoding, 3))
    generator = torch.Generator().manual_seed(4)
    refused = 0
    for _ in range(60):
        damaged = payload.clone()
        places = torch.randint(len(payload), (20,), generator=generator)
        damaged[places] = torch.randint(0, 256, (20,), dtype=torch.uint8, generator=generator)
        found = [outcome(encoding, damaged.to(device)) for device in (CPU, CUDA)]
        refused += isinstance(found[0], str)
        assert found[0] == found[1] if isinstance(found[0], str) else torch.equal(*found)
    assert refused > 0 or name == "int4"


@every
@pytest.mark.parametrize("senders", [False, True])
def test_means_of_unlike_members_are_bit_identical(name: str, options: dict[str, Any], senders: bool) -> None:
    """Members on a GPU and on a CPU take the mean of the same messages, some without every tensor."""
    codec, messages = make_codec(name, **options), {}

    def member(device: torch.device) -> GatheredMean:
        parameters = {each: nn.Parameter(torch.zeros(shape, device=device)) for each, shape in LAYOUT}
        return GatheredMean(parameters, MemoryGroup.world(1)[0], codec=codec, decay=0.95, senders=senders)

    members = [member(CPU), member(CUDA), member(CUDA)]
    for place, (mean, weight) in enumerate(zip(members, (6.0, 2.0, 4.0), strict=True)):
        for (each, tensor), parameter in zip(drawn(place).items(), mean._parameters, strict=True):
            parameter.grad = None if place == 1 and each == "matrix" else tensor.to(parameter.device)
        mean.start(0, weight=weight)
        mean.finish(0)
        messages[place] = mean.shares(0)[0]
        mean.drop(0)
    results = []
    for mean in members[:2]:
        mean.follow(0, messages, members=3)
        mean.give(Committed(1, 0))
        results.append([parameter.grad for parameter in mean._parameters])
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs.cpu())
