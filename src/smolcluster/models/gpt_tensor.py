"""How a GPT is shared out along a tensor-parallel axis: the name of each module, and what becomes of it.

    columns      a linear layer's outputs are dealt out; nothing travels
    rows         its inputs are; the partial sums are added up over the axis
    vocabulary   rows of an embedding are dealt out; who has none for a token adds zero
    stream       works on each token alone: on its part of the sequence, or, without sequence parallelism, on all of it
    positions    a table that every rank has; of what it gives, the part for this rank's part of the sequence
    heads        works on each head alone, of those of this rank: B x T x H x E
    gather       the first input is needed in whole, all tokens of it
    logits       as stream; its output goes to the vocabulary-parallel head, in whole

Attention is dealt out by heads and the feed-forward layer by its inner width (Shoeybi et al., "Megatron-LM", 2019); the
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
    """Layers whose outputs are several things one after the other: each of them is dealt out by itself."""
    names = ("attention.qkv", "mlp.up") if config.activation == "swiglu" else ("attention.qkv",)
    return {f"blocks.*.{name}": tuple(config.cuts(f"{name}.weight")) for name in names}


def must_divide(config: GPTConfig) -> dict[str, int]:
    """What the length of the axis must divide, by the name users know it by."""
    return {
        "heads": config.num_heads,
        "key and value heads": config.num_kv_heads,
        "feed-forward width": config.ff_dim,
    }
