"""Qwen3: Llama's parts, an RMSNorm over each query and key head, and heads of any width.

Both are options of the decoder in `gpt.py`; only configuration and names are new here.

Qwen Team, "Qwen3 technical report", 2025; Dehghani et al., "Scaling vision transformers to 22 billion parameters", 2023
(norms over queries and keys).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from smolcluster.models.architecture import Architecture, Family, GGUFLayout
from smolcluster.models.gpt_config import GPTConfig
from smolcluster.models.gpt_names import LLAMA_DEFAULTS, LLAMA_GGUF, LLAMA_KEYS, LLAMA_NAMES, LLAMA_NO_WEIGHTS


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(GPTConfig):
    """The configuration of a Qwen3."""

    qk_norm: ClassVar[bool] = True

    head_dim: int = 0  # 0: model_dim / num_heads
    position: Literal["learned", "rotary"] = field(default="rotary", init=False)
    norm: Literal["layernorm", "rmsnorm"] = field(default="rmsnorm", init=False)
    activation: Literal["gelu", "swiglu"] = field(default="swiglu", init=False)
    bias: bool | None = field(default=False, init=False)
    qkv_bias: bool | None = field(default=False, init=False)

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.head_dim == 0:
            super()._check_width()
            object.__setattr__(self, "head_dim", self.model_dim // self.num_heads)

    def _check_width(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}: it must be even and at least 2, since rotary positions turn pairs"
            )


QWEN3 = Architecture(
    name="qwen3",
    config=Qwen3Config,
    model="smolcluster.models.gpt:GPT",
    families=(
        Family(
            architecture="Qwen3ForCausalLM",
            model_type="qwen3",
            names=LLAMA_NAMES
            | {f"blocks.N.attention.{part}_norm": (f"model.layers.N.self_attn.{part}_norm",) for part in "qk"},
            keys=LLAMA_KEYS | {"head_dim": "head_dim"},
            defaults=LLAMA_DEFAULTS | {"head_dim": 128},
            choices={"hidden_act": ("silu", "swish"), "attention_bias": (False,), "use_sliding_window": (False,)},
            no_weights=LLAMA_NO_WEIGHTS,
        ),
    ),
    layouts=(
        GGUFLayout(
            architecture="qwen3",
            names=LLAMA_GGUF | {f"blocks.N.attention.{part}_norm": (f"blk.N.attn_{part}_norm",) for part in "qk"},
        ),
    ),
)
