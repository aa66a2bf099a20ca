"""The bytes of payloads stay what they are: peers of other versions decode them.

`golden_payloads.txt` has, for each codec and shape, the first 16 digits of the SHA-256 of three payloads in a row, with error
feedback where the codec needs it. It is written again only by `python -m tests.unit.comm.codecs.test_golden_payloads`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from smolcluster.comm.codecs import Feedback, Packer, make_codec

GOLDEN = Path(__file__).with_name("golden_payloads.txt")
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {}),
    "int8": ("int8", {}),
    "int4": ("int4", {}),
    "int4/7": ("int4", {"block": 7}),
    "blocktopk": ("blocktopk", {}),
    "blocktopk/wan": ("blocktopk", {"k": 128, "bits": 2}),
    "blocktopk/5 bits": ("blocktopk", {"k": 300, "bits": 5}),
    "blocktopk/bf16": ("blocktopk", {"k": 64, "bits": 0}),
}
SHAPES = [(), (1,), (7,), (768,), (4097,), (33, 65), (64, 64), (130, 70), (192, 128), (3, 5, 7, 11)]


def digest(name: str, shape: tuple[int, ...]) -> str:
    codec_name, options = CODECS[name]
    codec, generator = make_codec(codec_name, **options), torch.Generator().manual_seed(len(shape) + sum(shape))
    packer, feedback = Packer([("a", shape)], codec), Feedback() if codec.feedback else None
    found = hashlib.sha256()
    for step in range(3):
        # In float64, so that every machine draws the same float32.
        tensor = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
        tensor = tensor * tensor * tensor
        found.update(packer.encode([tensor.float()], key=step, feedback=feedback).numpy().tobytes())
    return found.hexdigest()[:16]


CASES = [(name, shape) for name in CODECS for shape in SHAPES]


def line(name: str, shape: tuple[int, ...]) -> str:
    return f"{name} {list(shape)}"


@pytest.mark.parametrize(("name", "shape"), CASES, ids=[line(*case) for case in CASES])
def test_payloads_are_as_they_were(name: str, shape: tuple[int, ...]) -> None:
    known = dict(row.rsplit(" ", 1) for row in GOLDEN.read_text(encoding="utf-8").splitlines())
    assert digest(name, shape) == known[line(name, shape)]


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{line(*case)} {digest(*case)}\n" for case in CASES), encoding="utf-8")
