"""The configuration of a GPT and its parameters: arithmetic only, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

GPT2_SIZES = {"small": (768, 12, 12), "medium": (1024, 24, 16), "large": (1280, 36, 20), "xl": (1600, 48, 25)}
CHOICES = {"position": ("learned", "rotary"), "norm": ("layernorm", "rmsnorm"), "activation": ("gelu", "swiglu")}


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The configuration of a `GPT`. Automatic values are resolved, so every field holds the actual value."""

    qk_norm: ClassVar[bool] = False  # norms over each query and key head

    vocab_size: int
    model_dim: int
    num_layers: int
    num_heads: int
    max_seq_len: int
    num_kv_heads: int = 0  # 0: num_heads
    ff_dim: int = 0  # 0: 4 x model_dim; for swiglu 8/3 x, rounded up to a multiple of 64
    dropout: float = 0.0
    position: Literal["learned", "rotary"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    activation: Literal["gelu", "swiglu"] = "gelu"
    bias: bool | None = None  # None: yes for layernorm, no for rmsnorm
    qkv_bias: bool | None = None  # None: bias
    tie_head: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @classmethod
    def gpt2(cls, size: str = "small", **changes: Any) -> GPTConfig:
        """GPT-2 as released: small 124 M, medium 355 M, large 774 M, xl 1.56 B parameters."""
        if size not in GPT2_SIZES:
            raise ValueError(f"GPT-2 has no size '{size}': choose {', '.join(GPT2_SIZES)}")
        model_dim, num_layers, num_heads = GPT2_SIZES[size]
        shape = {"model_dim": model_dim, "num_layers": num_layers, "num_heads": num_heads}
        return cls(**({"vocab_size": 50257, "max_seq_len": 1024} | shape | changes))

    @classmethod
    def llama(cls, **shape: Any) -> GPTConfig:
        """Return a configuration with the parts of Llama. Qwen2 adds `qkv_bias=True`; a large model sets `tie_head=False`."""
        parts: dict[str, Any] = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
        return cls(**(parts | shape))

    def __post_init__(self) -> None:
        self._fill_in()
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} '{getattr(self, name)}' is unknown: choose {' or '.join(known)}")
        for name in ("vocab_size", "model_dim", "num_layers", "num_heads", "max_seq_len", "num_kv_heads", "ff_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}: it must be at least 0 and below 1")
        self._check_width()
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % kv_heads:
            divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ValueError(
                f"num_heads {heads} is not divisible by num_kv_heads {kv_heads}: set num_kv_heads to one of {divisors}"
            )

    def _check_width(self) -> None:
        """Raise ValueError for heads of different width, or of odd width with rotary positions."""
        dim, heads = self.model_dim, self.num_heads
        if dim % heads:
            near = -(-dim // heads) * heads
            raise ValueError(
                f"model_dim {dim} is not divisible by num_heads {heads}: set model_dim to a multiple, such as {near}"
            )
        if self.position == "rotary" and dim // heads % 2:
            raise ValueError(
                f"model_dim {dim} with num_heads {heads} gives heads of odd width {dim // heads}, "
                f"and rotary positions turn pairs: set model_dim to a multiple of {2 * heads}"
            )

    def _fill_in(self) -> None:
        """Resolve automatic values."""
        ff_dim = -(-8 * self.model_dim // 3 // 64) * 64 if self.activation == "swiglu" else 4 * self.model_dim
        bias = self.norm == "layernorm" if self.bias is None else self.bias
        qkv_bias = bias if self.qkv_bias is None else self.qkv_bias
        filled = {
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "ff_dim": self.ff_dim or ff_dim,
            "bias": bias,
            "qkv_bias": qkv_bias,
        }
        for name, value in filled.items():
            object.__setattr__(self, name, value)

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def qkv_dim(self) -> int:
        """Width of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def up_dim(self) -> int:
        """Width of the first feed-forward projection: swiglu fuses gate and up."""
        return 2 * self.ff_dim if self.activation == "swiglu" else self.ff_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of all parameters, in the model's order."""
        dim, heads_dim = self.model_dim, self.num_heads * self.head_dim
        result: dict[str, tuple[int, ...]] = {"token_embedding.weight": (self.vocab_size, dim)}
        if self.position == "learned":
            result["position_embedding.weight"] = (self.max_seq_len, dim)
        for layer in range(self.num_layers):
            block = f"blocks.{layer}"
            result |= self._norm(f"{block}.attention_norm")
            result |= _linear(f"{block}.attention.qkv", self.qkv_dim, dim, bias=self.qkv_bias)
            if self.qk_norm:
                result |= {f"{block}.attention.{part}_norm.weight": (self.head_dim,) for part in "qk"}
            result |= _linear(f"{block}.attention.out", dim, heads_dim, bias=self.bias)
            result |= self._norm(f"{block}.mlp_norm")
            result |= _linear(f"{block}.mlp.up", self.up_dim, dim, bias=self.bias)
            result |= _linear(f"{block}.mlp.down", dim, self.ff_dim, bias=self.bias)
        result |= self._norm("norm")
        if not self.tie_head:
            result["lm_head.weight"] = (self.vocab_size, dim)
        return result

    def _norm(self, name: str) -> dict[str, tuple[int, ...]]:
        biased = self.norm == "layernorm" and self.bias
        return {f"{name}.{kind}": (self.model_dim,) for kind in (("weight", "bias") if biased else ("weight",))}

    def cuts(self, name: str) -> list[int]:
        """Return the number of rows of each part of a concatenated projection."""
        if ".qkv." in name:
            return [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        return [self.ff_dim, self.ff_dim]

    @property
    def num_parameters(self) -> int:
        """Return the exact number of parameters, without building the model."""
        return sum(map(math.prod, self.shapes().values()))


def _linear(name: str, out: int, into: int, *, bias: bool | None) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, into)}
    return weight | ({f"{name}.bias": (out,)} if bias else {})
