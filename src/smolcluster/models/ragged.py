"""Run blocks on a ragged batch: pieces of many sequences, of different lengths, with all tokens concatenated.

    piece                                      start   count      x_ND
    a chunk in the middle of a long prompt       500       4      a
    a sequence that is being continued            37       1      a
    a short prompt                                 0       2      a
                                                                  a
    Linear layers and norms take each token by itself:            b
    they run once over all N.                                     c
    Attention runs piece by piece, each on its own cache.         c

A loop over pieces is the fastest way to attend on a CPU: it reads only existing tokens. Padding with a mask reads up to the
longest length for every piece, and copying the caches together for it costs more than it saves.

Shapes as in `gpt.py`, and: N tokens of all pieces, L layers, R tokens that a cache has room for, G = H/K.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smolcluster.models.attention import attend, rope_at, without_cudnn_attention
from smolcluster.models.gpt_config import GPTConfig
from smolcluster.models.protocols import CachedPiece

if TYPE_CHECKING:
    from torch import nn


def positions(pieces: Iterable[CachedPiece], *, device: torch.device) -> Tensor:
    """Return the position of each of the N tokens."""
    return torch.tensor([at for piece in pieces for at in range(piece.start, piece.start + piece.count)], device=device)


@without_cudnn_attention()
def run_pieces(
    blocks: Iterable[nn.Module], x_ND: Tensor, pieces: Sequence[CachedPiece], *, config: GPTConfig
) -> Tensor:
    """Run the blocks in order. The i-th reads and writes the i-th layer of the caches."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    rope = rope_at(config, positions(pieces, device=x_ND.device))
    counts = [piece.count for piece in pieces]
    passages = [Passage(piece, dtype=x_ND.dtype) for piece in pieces]
    for layer, one in enumerate(blocks):
        block: Any = one  # as in gpt.py
        qkv = block.attention.qkv(block.attention_norm(x_ND)).unflatten(-1, (heads + 2 * kv_heads, config.head_dim))
        prepared = block.attention.prepare(qkv[:, : heads + kv_heads], rope)
        if rope is not None or config.qk_norm:
            # In place, so that keys and values stay contiguous and are copied to the cache in one operation.
            qkv[:, : heads + kv_heads] = prepared
        q_NHE, kv = qkv.split((heads, 2 * kv_heads), dim=1)
        y = [
            passage.attend(layer, q_THE, new)
            for passage, q_THE, new in zip(passages, q_NHE.split(counts), kv.split(counts), strict=True)
        ]
        x_ND = x_ND + block.attention.out(torch.cat(y))
        x_ND = x_ND + block.mlp(block.mlp_norm(x_ND))
    return x_ND


class Passage:
    """One piece, with views of its cache.

    The views are made for all layers at once: for a single token these calls cost as much as the arithmetic.
    """

    def __init__(self, piece: CachedPiece, *, dtype: torch.dtype) -> None:
        start, end, cache = piece.start, piece.start + piece.count, piece.cache
        self.new = cache.flatten(1, 2)[:, :, start:end].unbind(0)  # of each layer 2K x T x E
        self.keys = cache[:, 0, None, :, :end].unbind(0)  # of each layer 1 x K x S x E
        self.values = cache[:, 1, None, :, :end].unbind(0)
        self.mask_TS: Tensor | None = None
        if start > 0 and piece.count > 1:
            # Added to the scores. A boolean mask would be converted to this one in every layer.
            full = torch.full((piece.count, end), float("-inf"), dtype=dtype, device=cache.device)
            self.mask_TS = full.triu(start + 1)

    def attend(self, layer: int, q_THE: Tensor, kv: Tensor) -> Tensor:
        """Store the keys and values of the new tokens, and return their attention output, T x D."""
        self.new[layer].copy_(kv.transpose(0, 1))
        keys, values = self.keys[layer], self.values[layer]
        if len(q_THE) > 1:
            y_1HTE = attend(q_THE.transpose(0, 1)[None], keys, values, mask_TS=self.mask_TS, cached=True)
            return y_1HTE[0].transpose(0, 1).flatten(1)
        # One token attends to all: the G query heads of a key head are passed as G tokens, so that each key is read once.
        q_1KGE = q_THE.view(1, keys.size(1), -1, keys.size(3))
        return F.scaled_dot_product_attention(q_1KGE, keys, values).reshape(1, -1)
