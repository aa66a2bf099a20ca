"""Protocols of models beyond `forward`. A model implements those that it supports; callers check with `isinstance`.

    protocol           used by                                           without it
    Pipelined          pipeline, mesh (pp), serving                      its forward is traced, or it is not split
    TensorSharded      tensor, mesh (tp)                                 refused
    SequenceSharded    mesh (cp)                                         refused
    Recomputable       training.gradient_checkpointing, plan --memory    a warning
    CompiledByBlock    training.compile, for deep models                 compiled in one piece
    Generative         the sample at the end of a run                    no sample
    Ragged             serving                                           refused
    WithOutputLayer    training.optimizer: muon                          its last linear layer is treated as the output layer

`DecoderConfig` is the configuration of a model of `registry.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@runtime_checkable
class Pipelined(Protocol):
    """A model that can be split into stages of consecutive layers."""

    @property
    def num_layers(self) -> int: ...

    def stage(self, layers: range, *, first: bool, last: bool) -> nn.Module:
        """Return some of the layers, with the modules before (`first`) and after (`last`) all layers.

        A stage takes what the one before it returns. Parameters are shared with this model and keep their names.
        """


@runtime_checkable
class WithOutputLayer(Protocol):
    """A model that names its output layer."""

    @property
    def output_layer(self) -> nn.Module | None:
        """Return the layer, or None if its weight is tied to the embedding."""


class TensorStyles(TypedDict):
    """How the modules of a model are sharded; names are patterns such as `blocks.*.mlp.up`."""

    styles: Mapping[str, str]  # module -> style; `gpt_tensor.py` lists them
    fused: Mapping[str, Sequence[int]]  # module -> rows of each of the projections that it joins
    must_divide: Mapping[str, int]  # sizes that the number of ranks must divide, by the name in the configuration


@runtime_checkable
class TensorSharded(Protocol):
    """A model whose layers can all be sharded over ranks."""

    def tensor_styles(self) -> TensorStyles: ...

    def shared_out(self, size: int, *, sequence_parallel: bool) -> None:
        """Adapt to modules that now hold 1/size of their rows or columns.

        `sequence_parallel`: between attention and feed-forward layers, the stream holds 1/size of the tokens.
        """


@runtime_checkable
class SequenceSharded(Protocol):
    """A model that can be trained on pieces of sequences."""

    def cut_sequence(self, piece: int, gather: Callable[[Tensor], Tensor]) -> None:
        """Treat the inputs of all later calls as equal pieces of sequences, of which this is the `piece`-th.

        `gather` takes B x H x T x E of this piece, for any H, and returns those of all tokens up to the last of this piece.
        """


@runtime_checkable
class Recomputable(Protocol):
    """A module that recomputes its activations in the backward pass if `gradient_checkpointing` is True."""

    gradient_checkpointing: bool


@runtime_checkable
class CompiledByBlock(Protocol):
    """A deep model whose loss can be compiled by region: one block, used for all, and the head."""

    by_region: bool  # True after `compile_blocks`

    @property
    def num_layers(self) -> int: ...

    def compile_blocks(self) -> None: ...

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss over the targets that are not -100, to be compiled."""


@runtime_checkable
class Generative(Protocol):
    """A model that continues a prompt."""

    def generate(
        self,
        tokens_BT: Tensor,
        max_new_tokens: int,
        *,
        temperature: float,
        top_k: int | None,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Return the prompt followed by `max_new_tokens` sampled tokens."""


class CachedPiece(Protocol):
    """`count` tokens of a sequence, after `start` others whose keys and values are in the cache."""

    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def cache(self) -> Tensor: ...  # layers x 2 x config.num_kv_heads x room x config.head_dim


@runtime_checkable
class Ragged(Protocol):
    """A stage of a decoder that runs tokens of many sequences at once, concatenated: N tokens of all pieces."""

    def embed_pieces(self, tokens_N: Tensor, pieces: Sequence[CachedPiece]) -> Tensor:
        """Return N x D. Called on the first stage only."""

    def run_pieces(self, x_ND: Tensor, pieces: Sequence[CachedPiece]) -> Tensor:
        """Run the layers of this stage, and write the new keys and values into the caches: the i-th layer into the i-th."""

    def head(self, x_ND: Tensor) -> Tensor:
        """Return logits. Called on the last stage only."""


class DecoderConfig(Protocol):
    """A decoder's configuration: a frozen dataclass of numbers, flags and strings that raises ValueError if it is invalid.

    Parameters are named as in `parts.py`, so that a part of a model can be read without building one.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init__(self, **fields: Any) -> None: ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def model_dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tie_head(self) -> bool: ...
    @property
    def num_parameters(self) -> int: ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of all parameters, in the model's order."""

    def cuts(self, name: str) -> list[int]:
        """Return the number of rows of each projection that a parameter concatenates."""
