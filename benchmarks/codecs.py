"""Codecs: how long encoding and decoding a gradient takes, beside copying it.

One 2048 x 2048 float32 gradient (16 MiB), one thread, warm memory. The peer is `copy_` of the same tensor: what any exchange
does at least once. Three passes are timed: `encode`, `decode`, and `encode` with error feedback, which adds the residual,
decodes what was encoded and keeps what is left.

Target: none. A codec is worth its time where the bytes that it saves take longer to send. The name of each variant has the
factor by which it reduces them; a link of 100 Mbit/s needs 1.3 s for the gradient in fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from benchmarks.harness import Comparison, Session, Variant, timed
from smolcluster.comm.codecs import Feedback, Packer, make_codec

EXAMPLE = "python -m benchmarks codecs --quick"
SIDE = 2048
VARIANTS: list[tuple[str, dict[str, int | bool]]] = [
    ("fp32", {}),
    ("bf16", {}),
    ("fp16", {}),
    ("int8", {}),
    ("int8", {"unbiased": True}),
    ("topk", {}),
    ("randk", {}),
    ("powersgd", {}),
    ("powersgd", {"rank": 8}),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="samples per variant and repeat (default: 5; quick: 1)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")


def run(session: Session, arguments: argparse.Namespace) -> None:
    rounds = arguments.rounds or (1 if session.quick else 5)
    session.parameters = {"threads": arguments.threads, "shape": [SIDE, SIDE]}
    threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        passes = [Passes(name, options) for name, options in VARIANTS]
        for title in ("encode", "decode", "encode with feedback"):
            # Feedback only where the codec needs it.
            chosen = [p for p in passes if p.packer.codec.feedback or title != "encode with feedback"]
            session.compare(
                Comparison(
                    name=f"{title} {SIDE} x {SIDE}",
                    variants=[
                        Variant(name="copy", run=timed(passes[0].copy), role="peer"),
                        *(Variant(name=p.name, run=timed(p.of(title))) for p in chosen),
                        Variant(name="copy again", run=timed(passes[0].copy), role="noise"),
                    ],
                    rounds=rounds,
                )
            )
    finally:
        torch.set_num_threads(threads)


class Passes:
    """One codec and the memory it works in, ready before the clock starts."""

    gradient = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    decoded = torch.empty(SIDE, SIDE)

    def __init__(self, name: str, options: dict[str, int | bool]) -> None:
        self.packer = Packer([("weight", (SIDE, SIDE))], make_codec(name, **options))
        shown = "".join(f" {k}" if v is True else f" {k} {v}" for k, v in options.items())
        self.name = f"{name}{shown} ({self.gradient.nbytes / self.packer.nbytes:.3g}x)"
        self.feedback = Feedback()
        self.payload = torch.zeros(self.packer.nbytes, dtype=torch.uint8)
        self.encode()

    def of(self, title: str) -> Callable[[], None]:
        return {"encode": self.encode, "decode": self.decode, "encode with feedback": self.encode_with_feedback}[title]

    def copy(self) -> None:
        self.decoded.copy_(self.gradient)

    def encode(self) -> None:
        self.packer.encode([self.gradient], self.payload, key=1)

    def decode(self) -> None:
        self.packer.decode(self.payload, [self.decoded])

    def encode_with_feedback(self) -> None:
        self.packer.encode([self.gradient], self.payload, key=1, feedback=self.feedback)
        self.feedback.commit()
