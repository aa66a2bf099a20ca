"""The tensor-parallel plan of a GPT: the style of each module.

    columns      a linear layer's outputs are sharded; no communication
    rows         its inputs are sharded; partial sums are reduced over the axis
    vocabulary   rows of an embedding are sharded; ranks without a token's row add zero
    stream       acts on each token: on this rank's part of the sequence, or, without sequence parallelism, on all of it
    positions    a replicated table; its output is sliced to this rank's part of the sequence
    heads        acts on each of this rank's heads: B x T x H x E
    gather       its first input is gathered to all tokens
    logits       as stream; its output is gathered for the vocabulary-parallel head

Attention is sharded by heads and the feed-forward layer by its inner width (Shoeybi et al., "Megatron-LM", 2019); the
stream between them by tokens (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022).
"""

from __future__ import annotations

from smolcluster.models.gpt_config import GPTConfig

STYLES = {
    "token_embedding": "vocabulary",
    "position_embedding": "positions",
    "blocks.*.attention_norm": "stream",
    "blocks.*.attention": "gather",
    "blocks.*.attention.qkv": "columns",
    "blocks.*.attention.q_norm": "heads",
    "blocks.*.attention.k_norm": "heads",
    "blocks.*.attention.out": "rows",
    "blocks.*.mlp_norm": "stream",
    "blocks.*.mlp": "gather",
    "blocks.*.mlp.up": "columns",
    "blocks.*.mlp.down": "rows",
    "norm": "logits",
    "lm_head": "vocabulary head",
}


def fused(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the layers whose output concatenates several projections; each projection is sharded separately."""
    names = ("attention.qkv", "mlp.up") if config.activation == "swiglu" else ("attention.qkv",)
    return {f"blocks.*.{name}": tuple(config.cuts(f"{name}.weight")) for name in names}


def must_divide(config: GPTConfig) -> dict[str, int]:
    """Return the numbers that the axis size must divide, by configuration key."""
    return {
        "heads": config.num_heads,
        "key and value heads": config.num_kv_heads,
        "feed-forward width": config.ff_dim,
    }
