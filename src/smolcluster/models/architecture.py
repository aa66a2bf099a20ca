"""Records that describe an architecture, without torch. `registry.py` has the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from smolcluster.models.protocols import DecoderConfig

Names = Mapping[str, tuple[str, ...]]  # our module -> theirs, in the order in which ours joins them; N is the layer


@dataclass(frozen=True, kw_only=True)
class Family:
    """A Hugging Face architecture, and its mapping to the names of this package."""

    architecture: str
    model_type: str
    parts: Mapping[str, str] = field(default_factory=dict)  # of our config, if its class supports several
    biases: tuple[str, ...] = ()  # supported ones, as named by `hugging_face.py`, if its class supports several
    grouped_heads: bool = True
    names: Names
    transposed: tuple[str, ...] = ()  # endings of our modules
    keys: Mapping[str, str]  # key of config.json -> field of ours; if two keys have one field, the last is read
    defaults: Mapping[str, Any]  # of keys that config.json leaves out
    fields: Mapping[str, bool] = field(default_factory=dict)  # of our config, fixed in this architecture
    choices: Mapping[str, tuple[Any, ...]]  # supported values of keys that change the arithmetic; the first is written
    no_weights: str  # regular expression of tensors that old files contain in addition to the weights


@dataclass(frozen=True, kw_only=True)
class GGUFLayout:
    """The layout of GGUF files of one `general.architecture`."""

    architecture: str
    names: Names
    parts: Mapping[str, Any] = field(default_factory=dict)  # of our config, if its class supports several
    rotary: bool = True  # else a table of positions, and layer norms
    adjacent_pairs: bool = False  # rotary positions turn rows 2i and 2i + 1 of a head


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder that can be trained, imported, exported and served under its name."""

    name: str  # `model.type` in a configuration
    config: type[DecoderConfig]
    model: str  # module:class of an nn.Module with this config as its only argument; see protocols.py
    families: tuple[Family, ...]
    layouts: tuple[GGUFLayout, ...]
