"""Derive seeds from the position in the run, so that no generator state needs saving.

Every step is seeded from (run seed, step, rank), and the reading of its batch from (run seed, step, data shard). A resumed run
draws the same dropout masks as an uninterrupted one. Ranks draw different ones, but those of one data shard augment its samples
identically.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """Return 63 well-mixed bits."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(*parts: int | str, device: torch.device) -> None:
    """Seed torch (the CPU and this device), numpy and random. Called every step, so it must cost microseconds.

    `torch.manual_seed` visits every kind of device, which takes a hundred times longer.
    """
    seed = derive_seed(*parts)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
