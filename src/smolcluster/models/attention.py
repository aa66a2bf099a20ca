"""Rotary positions, and attention over grouped heads. Shapes as in `gpt.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from smolcluster.models.gpt_config import GPTConfig

Rope = tuple[Tensor, Tensor]  # cosines and sines, each T x 1 x E/2, fp32


def rope_at(config: GPTConfig, positions_T: Tensor) -> Rope | None:
    """Return cosine and sine of each position's angles, in fp32 whatever the model's dtype."""
    if config.position != "rotary":
        return None
    exponents = torch.arange(0, config.head_dim, 2, device=positions_T.device, dtype=torch.float32) / config.head_dim
    angles = positions_T.float()[:, None, None] * (1.0 / config.rope_theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x_BTHE: Tensor, rope: Rope) -> Tensor:
    """Rotate the pair (i, i + E/2) of every head by the angle of its position, in fp32."""
    cos, sin = rope
    a, b = x_BTHE.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTHE.dtype)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable torch's cuDNN attention here, whatever the device.

    cuDNN builds a plan for every new length of the keys, 40 to 300 ms each on an H200; with a cache, each token is a new
    length. The flag is global: if threads overlap, it may change early or late, which affects speed only.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def attend(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    *,
    mask_TS: Tensor | None,
    dropout: float = 0.0,
    cached: bool = False,
) -> Tensor:
    """Causal attention; each key and value head serves H/K query heads. Without a mask, T is S or 1.

    `cached`: keys and values come from a cache, and the caller has excluded cuDNN (`without_cudnn_attention`).
    """
    groups = q_BHTE.size(1) // k_BKSE.size(1)
    # On CUDA flash attention takes grouped heads but no mask; cuDNN takes both; neither takes fp32.
    half = q_BHTE.dtype in (torch.float16, torch.bfloat16)
    native = q_BHTE.device.type == "cpu" or (q_BHTE.is_cuda and half and not (cached and mask_TS is not None))
    if groups > 1 and not native:
        # No fused kernel takes grouped heads here: CUDA would build the T x S matrix, old MPS would crash.
        k_BKSE, v_BKSE = k_BKSE.repeat_interleave(groups, dim=1), v_BKSE.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(
        q_BHTE,
        k_BKSE,
        v_BKSE,
        attn_mask=mask_TS,
        dropout_p=dropout,
        is_causal=mask_TS is None and q_BHTE.size(2) > 1,
        enable_gqa=groups > 1 and native,
    )
