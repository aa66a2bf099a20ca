"""powersgd: a matrix as the product of two thin ones, found by one step of power iteration.

    M = the tensor as a matrix: its first dim by all the others
    P = orthonormal basis of M Q          (Q: of the last step; at first random, from the key)
    Q = M^T P
    decoded = P Q^T                       which is P P^T M: M projected on the space that P spans

Bytes for an a x b matrix:   2 r (a + b), with r = min(rank, a, b); twice that with `values` fp32
Tensors of fewer than 2 dims, and those that this would not make smaller, are sent as fp32.

The error of a projection is bounded: |M - decoded| <= |M|, and a matrix of rank <= r comes back; both up to the rounding of P
and Q, for bf16 about (1 + sqrt(r)) 2^-8 |M|. What is left out, rounding included, needs error feedback, and Q must be kept from
step to step (`state["q"]`) for the iteration to converge; without a state every step begins with a random Q. Magnitudes up to
2^100, so that sums over rows and columns stay finite.

Decoding multiplies matrices, so machines of different kinds may get results that differ in the last bits. Every other codec
decodes to the same bits everywhere.

Payload: P, then Q, both row by row.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smolcluster.comm.codecs.base import VALUES, Codec, check_count, check_values, generator, numbers, store


@dataclass(frozen=True)
class PowerSGD(Codec):
    name = "powersgd"
    feedback = True
    limit = 2.0**100
    rank: int = 2
    values: str = "bf16"

    def __post_init__(self) -> None:
        check_count(self.name, "rank", self.rank)
        check_values(self.name, self.values)

    def nbytes(self, shape: Sequence[int]) -> int:
        rank = self._rank(shape)
        return rank * (shape[0] + math.prod(shape[1:])) * self._dtype.itemsize if rank else 4 * math.prod(shape)

    def _encode(self, source: Tensor, out: Tensor, *, key: int, state: dict[str, Tensor]) -> None:
        rank = self._rank(source.shape)
        if not rank:
            store(source, out, dtype=torch.float32)
            return
        matrix = source.view(source.shape[0], -1)
        # Householder's QR gives an orthonormal basis for any input, a zero matrix included.
        p = torch.linalg.qr(matrix @ _start(state.get("q"), matrix.shape[1], rank, key=key)).Q
        q = matrix.T @ p
        split = p.numel() * self._dtype.itemsize
        store(p, out[:split], dtype=self._dtype)
        store(q, out[split:], dtype=self._dtype)
        state["q"] = q

    def _decode(self, data: Tensor, target: Tensor) -> None:
        rank = self._rank(target.shape)
        if not rank:
            target.view(-1).copy_(numbers(data, torch.float32))
            return
        matrix = target.view(target.shape[0], -1)
        thin = numbers(data, self._dtype).float().view(-1, rank)
        torch.mm(thin[: matrix.shape[0]], thin[matrix.shape[0] :].T, out=matrix)

    @property
    def _dtype(self) -> torch.dtype:
        return VALUES[self.values]

    def _rank(self, shape: Sequence[int]) -> int:
        """Columns of P and Q for this shape; 0 where the tensor is sent as fp32."""
        if len(shape) < 2:
            return 0
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(self.rank, rows, columns)
        return rank if rank * (rows + columns) * self._dtype.itemsize < 4 * rows * columns else 0


def _start(q: Tensor | None, columns: int, rank: int, *, key: int) -> Tensor:
    """The Q to begin with: that of the last step, its columns scaled to magnitude 1 so that products stay in range.

    A column of zeros would stay zero: it is drawn again, as is all of Q if its shape differs.
    """
    kept = q if q is not None and q.shape == (columns, rank) else torch.zeros(columns, rank)
    peak = kept.abs().amax(dim=0)
    if bool((peak > 0).all()):
        return kept / peak
    fresh = torch.from_numpy(generator(key).standard_normal((columns, rank), dtype=np.float32))
    return torch.where(peak > 0, kept / peak, fresh)
