"""Codecs: encode gradients as bytes.

    codec = make_codec("topk", fraction=0.01)
    packer = Packer([("weight", (512, 128)), ("bias", (512,))], codec)      one bucket, the same at both ends

    feedback = Feedback() if codec.feedback else None                        the sender's, for all its buckets
    payload = packer.encode(gradients, key=step, feedback=feedback)          uint8, packer.nbytes or fewer if bounded
    ... send ...
    feedback.commit()                                                        or undo(), if it was rejected

    packer.decode(payload, gradients)                                        the receiver

The file of a codec documents method, error bounds and bytes; docs/codecs.md compares them. To add one: a class here and its
name in `CODECS` below, in `CODECS` of elastic/transport/frames.py (numbers on the wire) and in `Codec` of config/options.py.

    base.py                          the interface; bits.py, bins.py: bit fields, bins of equal width
    casts.py                         fp32, fp16, bf16
    levels.py                        int8, int4
    sparse.py                        topk, randk
    block_topk.py                    blocktopk
    powersgd.py                      powersgd
    packer.py                        several tensors as one payload
    flat.py                          many tensors encoded at once, on their device: flat_levels.py, flat_blocks.py
    feedback.py                      error feedback
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from smolcluster.comm.codecs.base import Codec, CodecError
from smolcluster.comm.codecs.block_topk import BlockTopK
from smolcluster.comm.codecs.casts import Bf16, Cast, Fp16, Fp32
from smolcluster.comm.codecs.feedback import Feedback
from smolcluster.comm.codecs.flat import FlatCasts, FlatEncoding
from smolcluster.comm.codecs.flat_blocks import FlatBlocks
from smolcluster.comm.codecs.flat_levels import FlatLevels
from smolcluster.comm.codecs.levels import Int4, Int8
from smolcluster.comm.codecs.packer import Packer
from smolcluster.comm.codecs.powersgd import PowerSGD
from smolcluster.comm.codecs.sparse import RandK, TopK
from smolcluster.config.options import CodecOptions
from smolcluster.errors import UserError, suggest, unknown_name

CODECS: dict[str, type[Codec]] = {c.name: c for c in (Fp32, Bf16, Fp16, Int8, Int4, TopK, RandK, PowerSGD, BlockTopK)}

__all__ = [
    "CODECS",
    "Codec",
    "CodecError",
    "Feedback",
    "FlatEncoding",
    "Packer",
    "chosen_codec",
    "flat_encoding",
    "make_codec",
]


def make_codec(name: str, **options: Any) -> Codec:
    """Make a codec by name. Raises UserError for an unknown name or option, or an invalid value."""
    if name not in CODECS:
        raise unknown_name("codec", name, CODECS)
    codec = CODECS[name]
    known = [f.name for f in dataclasses.fields(codec)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            hint = suggest(option, known) if known else "it has none"
            raise UserError(f"codec {name} has no option '{option}'; {hint}")
    return codec(**options)


def chosen_codec(options: CodecOptions) -> Codec:
    """Make the codec that a strategy's options select."""
    name = options.chosen
    extra: dict[str, dict[str, Any]] = {
        "topk": {"fraction": options.codec_fraction},
        "randk": {"fraction": options.codec_fraction},
        "powersgd": {"rank": options.codec_rank},
        "blocktopk": {"k": options.codec_k, "bits": options.codec_bits},
    }
    return make_codec(name, **extra.get(name, {}))


def flat_encoding(codec: Codec, layout: Sequence[tuple[str, tuple[int, ...]]]) -> FlatEncoding:
    """Return the encoding of many tensors together, for the codecs that have one."""
    if isinstance(codec, BlockTopK):
        return FlatBlocks(codec, layout)
    if isinstance(codec, Int8 | Int4):
        return FlatLevels(codec, layout)
    if isinstance(codec, Cast):
        return FlatCasts(codec, layout)
    raise ValueError(f"codec {codec.name} encodes one tensor at a time")
