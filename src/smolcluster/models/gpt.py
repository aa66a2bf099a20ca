"""A decoder-only transformer that covers several families with one set of parts.

              position   norm        activation   bias          head
    GPT-2     learned    layernorm   gelu (tanh)  yes           tied
    Llama     rotary     rmsnorm     swiglu       no            either    (also SmolLM2, TinyLlama)
    Qwen2     rotary     rmsnorm     swiglu       on q, k, v    either
    Qwen3     rotary     rmsnorm     swiglu       no            either    norms over each query and key head (qwen3.py)

Papers: Radford et al. 2019 (GPT-2), Touvron et al. 2023 (Llama), Su et al. 2021 (rotary positions), Ainslie et al. 2023
(grouped-query attention), Shazeer 2020 (SwiGLU).

Shapes are written as suffixes:

    B  sequences in the batch          H  query heads              F  feed-forward width
    T  tokens of this call             K  key and value heads      V  vocabulary
    S  tokens seen, cache included     E  width of one head        D  model width
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smolcluster.models.attention import Rope, attend, rope_at, rotate, without_cudnn_attention
from smolcluster.models.gpt_config import GPTConfig
from smolcluster.models.gpt_tensor import STYLES, fused, must_divide
from smolcluster.models.protocols import CachedPiece, TensorStyles
from smolcluster.models.ragged import positions, run_pieces


@dataclass
class KVCache:
    """Keys and values of the tokens seen so far: per layer two preallocated B x K x max_len x E buffers."""

    layers: dict[int, tuple[Tensor, Tensor]]
    batch: int
    max_len: int
    length: int = 0

    def check(self, tokens_BT: Tensor) -> None:
        """Raise an error for tokens that do not fit, before anything is written."""
        batch, num_tokens = tokens_BT.shape
        if batch != self.batch:
            raise ValueError(
                f"the cache is for {self.batch} sequences, this batch has {batch}: make a cache for this batch"
            )
        if self.length + num_tokens > self.max_len:
            held = f"{self.length} of {self.max_len} tokens"
            raise ValueError(f"the cache holds {held}, {num_tokens} more do not fit: make it with a larger max_len")

    def append(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store this call's keys and values; return those of all S tokens, in the type these came in.

        `length` stays: the caller moves it once all layers have appended.
        """
        end = self.length + k_BKTE.size(2)
        keys, values = self.layers[layer]
        keys[:, :, self.length : end] = k_BKTE
        values[:, :, self.length : end] = v_BKTE
        return keys[:, :, :end].to(k_BKTE.dtype), values[:, :, :end].to(v_BKTE.dtype)


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing: `GPT.init_weights` initializes every parameter. Doing both takes three times as long."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing, as in `Linear`."""


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        # Of this rank, if they are sharded.
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.gather: Callable[[Tensor], Tensor] | None = None  # keys and values, under context parallelism
        self.qkv = Linear(config.model_dim, config.qkv_dim, bias=bool(config.qkv_bias))
        # Over each head; the weight is the same for all.
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.out = Linear(config.num_heads * config.head_dim, config.model_dim, bias=bool(config.bias))

    def prepare(self, qk: Tensor, rope: Rope | None) -> Tensor:
        """Norm the query and key heads and apply rotary positions. Heads are the second to last dim."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split_with_sizes((self.num_heads, self.num_kv_heads), dim=-2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        return qk if rope is None else rotate(qk, rope)

    def forward(self, x_BTD: Tensor, rope: Rope | None, mask_TS: Tensor | None, cache: KVCache | None) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        # The projection gives all query heads, then key heads, then value heads; the first two are prepared together.
        qkv = self.qkv(x_BTD).unflatten(-1, (heads + 2 * kv_heads, self.config.head_dim))
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=2)
        q, k = self.prepare(qk, rope).split_with_sizes((heads, kv_heads), dim=2)
        q_BHTE, k_BKSE, v_BKSE = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k_BKSE, v_BKSE = cache.append(self.layer, k_BKSE, v_BKSE)
        elif self.gather is not None:
            k_BKSE, v_BKSE = self.gather(torch.cat((k_BKSE, v_BKSE), dim=1)).chunk(2, dim=1)
        dropout = self.config.dropout if self.training else 0.0
        y_BHTE = attend(q_BHTE, k_BKSE, v_BKSE, mask_TS=mask_TS, dropout=dropout, cached=cache is not None)
        y_BTD: Tensor = self.out(y_BHTE.transpose(1, 2).flatten(2))
        return y_BTD


class FeedForward(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.swiglu = config.activation == "swiglu"
        self.up = Linear(config.model_dim, config.up_dim, bias=bool(config.bias))  # swiglu: gate, then up
        self.down = Linear(config.ff_dim, config.model_dim, bias=bool(config.bias))

    def forward(self, x_BTD: Tensor) -> Tensor:
        h = self.up(x_BTD)
        if self.swiglu:
            gate_BTF, up_BTF = h.chunk(2, dim=-1)
            h_BTF = F.silu(gate_BTF) * up_BTF
        else:
            h_BTF = F.gelu(h, approximate="tanh")
        y_BTD: Tensor = self.down(h_BTF)
        return y_BTD


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). It knows its global layer number, wherever it is run."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BTD: Tensor, rope: Rope | None = None, mask_TS: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        h_BTD: Tensor = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), rope, mask_TS, cache))
        y_BTD: Tensor = h_BTD + self.dropout(self.mlp(self.mlp_norm(h_BTD)))
        return y_BTD


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.model_dim, eps=config.norm_eps)
    return nn.LayerNorm(config.model_dim, eps=config.norm_eps, bias=bool(config.bias))


def call_block(
    block: nn.Module, x_BTD: Tensor, rope: Rope | None, mask_TS: Tensor | None, cache: KVCache | None = None
) -> Tensor:
    y_BTD: Tensor = block(x_BTD, rope, mask_TS, cache)
    return y_BTD


def hidden_states(model: GPT, tokens_BT: Tensor) -> Tensor:
    """Return the output of the last block."""
    return model.run_blocks(model.embed(tokens_BT, model.piece * tokens_BT.size(1)), model.blocks)


class GPT(nn.Module):
    """Tokens in, logits out.

    - `embed`, `run_blocks` and `head` are the three parts of `forward`; a pipeline stage runs some of them.
    - To compile, call `compile_blocks` and compile `model.loss`: one block for all; the loss fuses with the head.
    - `gradient_checkpointing = True` recomputes each block in the backward pass.
    - There are no buffers: a model made on the meta device needs `to_empty`, then `init_weights` or loaded weights.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.sequence_shards = 1  # sequence parallelism: the stream between blocks is sharded along T
        self.piece = 0  # context parallelism: index of this rank's piece of each sequence
        self.by_region, self._call, self._hidden = False, call_block, hidden_states  # see `compile_blocks`
        self.token_embedding = Embedding(config.vocab_size, config.model_dim)
        learned = config.position == "learned"
        self.position_embedding = Embedding(config.max_seq_len, config.model_dim) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = make_norm(config)
        # A tied head is the embedding itself: no second parameter, nothing doubled in a checkpoint.
        self.lm_head = None if config.tie_head else Linear(config.model_dim, config.vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, *, generator: torch.Generator | None = None) -> None:
        """Initialize matrices to normal(0, 0.02), those that write to the residual stream times 1/sqrt(2 L); biases 0, norms 1.

        This is GPT-2's scheme, used for both families. Learned positions take 0.02 too (OpenAI's own code has 0.01).
        """
        for name, parameter in self.named_parameters():
            if parameter.is_meta:  # nothing to write to, and torch would import its compiler for it
                continue
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                parameter.normal_(0.0, 0.02 / (2 * self.config.num_layers) ** 0.5, generator=generator)
            elif parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    @property
    def output_layer(self) -> nn.Module | None:
        return self.lm_head

    def embed(self, tokens_BT: Tensor, start: int = 0) -> Tensor:
        """Return token embeddings, plus learned positions from `start` on."""
        end = start + tokens_BT.size(1)
        if end > self.config.max_seq_len:
            limit = self.config.max_seq_len
            raise ValueError(
                f"{end} tokens do not fit max_seq_len {limit}: crop them, or build the model with a larger one"
            )
        x_BTD: Tensor = self.token_embedding(tokens_BT)
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding(torch.arange(start, end, device=tokens_BT.device))
        dropped_BTD: Tensor = self.dropout(x_BTD)
        return dropped_BTD

    def run_blocks(self, x_BTD: Tensor, blocks: Iterable[nn.Module], *, cache: KVCache | None = None) -> Tensor:
        """Run some of the blocks, in order. Rotary angles and the mask are computed once and shared."""
        num_tokens = x_BTD.size(1) * self.sequence_shards
        start = self.piece * num_tokens if cache is None else cache.length
        rope = self.rope(start, num_tokens, device=x_BTD.device)
        mask_TS = None
        if start > 0 and num_tokens > 1:
            # A later chunk: is_causal would align its first query with the first key.
            mask_TS = torch.ones(num_tokens, start + num_tokens, dtype=torch.bool, device=x_BTD.device).tril(start)
        training = cache is None and torch.is_grad_enabled()
        call: Callable[..., Tensor] = self._call if training else call_block
        if training and self.gradient_checkpointing:
            call = partial(checkpoint, call, use_reentrant=False)
        with nullcontext() if cache is None else without_cudnn_attention():
            for block in blocks:
                x_BTD = call(block, x_BTD, rope, mask_TS, cache)
        return x_BTD

    def compile_blocks(self) -> None:
        """Compile `loss` by region: one block, whose code is used for all, and the head with the loss.

        The time to the first step no longer grows with the number of layers: on an H200 11 s instead of 90 s for 48 layers, at
        0.995x the speed. Nothing is fused across blocks, which narrow ones feel: 12 layers of 768 reach 0.97x to 0.99x.
        """
        self.by_region = True
        self._call = torch.compile(call_block)
        self._hidden = torch.compiler.disable(hidden_states)  # type: ignore[no-untyped-call]

    def rope(self, start: int, num_tokens: int, *, device: torch.device) -> Rope | None:
        """Return cosine and sine of each position's angles. Not a buffer, so never saved, moved or rounded to bf16."""
        return rope_at(self.config, torch.arange(start, start + num_tokens, device=device))

    def head(self, x_BTD: Tensor) -> Tensor:
        """Apply the last norm and the projection to the vocabulary."""
        weight_VD = self.token_embedding.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(self.norm(x_BTD), weight_VD)

    def forward(self, tokens_BT: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """Return logits B x T x V. With a cache, the tokens follow those in it and are added to it."""
        if cache is None:
            return self.head(hidden_states(self, tokens_BT))
        cache.check(tokens_BT)
        x_BTD = self.run_blocks(self.embed(tokens_BT, cache.length), self.blocks, cache=cache)
        cache.length += tokens_BT.size(1)
        return self.head(x_BTD)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean over the targets that are not -100. Forward hooks of the GPT itself are not run."""
        return next_token_loss(self.head(self._hidden(self, tokens_BT)), targets_BT)

    def embed_pieces(self, tokens_N: Tensor, pieces: Sequence[CachedPiece]) -> Tensor:
        """Return token embeddings, plus learned positions, of pieces of many sequences (`ragged.py`)."""
        x_ND: Tensor = self.token_embedding(tokens_N)
        if self.position_embedding is not None:
            x_ND = x_ND + self.position_embedding(positions(pieces, device=tokens_N.device))
        return x_ND

    def run_pieces(self, x_ND: Tensor, pieces: Sequence[CachedPiece]) -> Tensor:
        """Run the blocks on pieces of many sequences (`ragged.py`)."""
        return run_pieces(self.blocks.children(), x_ND, pieces, config=self.config)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    def stage(self, layers: range, *, first: bool, last: bool) -> GPT:
        """Return some of the layers, with the embedding if `first` and the head if `last`. Weights are shared."""
        return GPTStage(self, layers, first=first, last=last)

    def tensor_styles(self) -> TensorStyles:
        """Return how the modules are sharded along a tensor-parallel axis."""
        config = self.config
        return {"styles": STYLES, "fused": fused(config), "must_divide": must_divide(config)}

    def shared_out(self, size: int, *, sequence_parallel: bool) -> None:
        """Adapt to layers that are sharded over `size` ranks."""
        self.sequence_shards = size if sequence_parallel else 1
        for block in self.modules():
            if isinstance(block, Attention):
                block.num_heads //= size
                block.num_kv_heads //= size

    def cut_sequence(self, piece: int, gather: Callable[[Tensor], Tensor]) -> None:
        """Adapt to inputs that are equal pieces of sequences, of which this is the `piece`-th.

        `gather` takes B x H x T x E of this piece, for any H, and returns those of all tokens up to the last of this piece.
        """
        self.piece = piece
        for block in self.modules():
            if isinstance(block, Attention):
                block.gather = gather

    def new_cache(self, batch: int, max_len: int, *, dtype: torch.dtype | None = None) -> KVCache:
        """Return an empty cache, on the device of the weights and in the dtype of attention: under autocast, autocast's."""
        weight = self.token_embedding.weight
        device = weight.device
        if dtype is None:
            autocast = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
        shape = (batch, self.config.num_kv_heads, max_len, self.config.head_dim)
        layers = {
            layer: (torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
            for layer in range(self.config.num_layers)
        }
        return KVCache(layers, batch, max_len)

    @torch.no_grad()
    def generate(
        self,
        tokens_BT: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the prompt followed by `max_new_tokens` sampled tokens. Temperature 0: greedy.

        When the context is full, its newer half is prefilled again and generation continues from there.
        """
        if tokens_BT.size(1) == 0:
            raise ValueError("generate needs a prompt of at least one token")
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(
                f"temperature is {temperature} and top_k {top_k}: temperature must be at least 0, top_k at least 1"
            )
        was_training = self.training
        self.eval()
        try:
            limit = self.config.max_seq_len
            cache = self.new_cache(tokens_BT.size(0), limit)
            unread_BT = tokens_BT[:, -limit:]
            for _ in range(max_new_tokens):
                if cache.length + unread_BT.size(1) > limit:
                    cache.length = 0
                    unread_BT = tokens_BT[:, -max(1, limit // 2) :]
                logits_BV = self(unread_BT, cache=cache)[:, -1].float()
                unread_BT = sample(logits_BV, temperature=temperature, top_k=top_k, generator=generator)
                tokens_BT = torch.cat((tokens_BT, unread_BT), dim=1)
        finally:
            self.train(was_training)
        return tokens_BT


class GPTStage(GPT):
    """A part of a GPT: tokens or activations in, activations or logits out. Parameters are named as in the full model."""

    def __init__(self, whole: GPT, layers: range, *, first: bool, last: bool) -> None:
        nn.Module.__init__(self)
        self.config, self.first, self.last, self.piece = whole.config, first, last, whole.piece
        self.gradient_checkpointing, self.sequence_shards = whole.gradient_checkpointing, whole.sequence_shards
        self.by_region, self._call, self._hidden = False, call_block, hidden_states
        if first:
            self.token_embedding = whole.token_embedding
        elif last and whole.lm_head is None:
            # A tied head on another stage than the embedding: a copy of the weight.
            self.token_embedding = Embedding(whole.config.vocab_size, whole.config.model_dim, device="meta")
            self.token_embedding.weight = nn.Parameter(whole.token_embedding.weight.detach().clone())
        self.position_embedding = whole.position_embedding if first else None
        self.dropout = whole.dropout
        self.blocks = nn.ModuleDict({str(layer): whole.blocks[layer] for layer in layers})  # type: ignore[assignment]
        if last:
            self.norm = whole.norm
        self.lm_head = whole.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(x) if self.first else x
        x = self.run_blocks(x, self.blocks.values())  # type: ignore[operator]
        return self.head(x) if self.last else x


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross entropy over the targets that are not -100, in fp32 or wider."""
    logits = logits_BTV.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets_BT.flatten(), ignore_index=-100)


def sample(logits_BV: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Return one token per sequence, B x 1."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        least_B1 = logits_BV.topk(min(top_k, logits_BV.size(-1))).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    return torch.multinomial((logits_BV / temperature).softmax(dim=-1), 1, generator=generator)
