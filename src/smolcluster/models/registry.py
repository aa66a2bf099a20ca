"""The architectures, by name. To add one, write its config, its model and its record, and name the record here."""

from __future__ import annotations

import dataclasses
import importlib
import math
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smolcluster.models.architecture import Architecture
from smolcluster.models.gpt_names import GPT
from smolcluster.models.protocols import DecoderConfig
from smolcluster.models.qwen3 import QWEN3

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES: dict[str, Architecture] = {one.name: one for one in (GPT, QWEN3)}
MAX_SIZE = 1 << 31  # of any length in the shape of a model


def architecture_of(config: DecoderConfig) -> Architecture:
    return next(one for one in ARCHITECTURES.values() if one.config is type(config))


def build(config: DecoderConfig) -> nn.Module:
    """Make a model of this configuration, with new weights."""
    module, _, name = architecture_of(config).model.partition(":")
    model: nn.Module = getattr(importlib.import_module(module), name)(config)
    return model


def fields_of(kind: type[DecoderConfig]) -> dict[str, Any]:
    """Return the fields of a configuration with their types, except those that the architecture fixes."""
    types = typing.get_type_hints(kind)
    return {field.name: types[field.name] for field in dataclasses.fields(kind) if field.init}


def to_plain(config: DecoderConfig) -> dict[str, Any]:
    """Return the values from which `from_plain` makes an equal configuration."""
    return {name: getattr(config, name) for name in fields_of(type(config))}


def from_plain(name: str, values: Mapping[str, Any]) -> DecoderConfig:
    """Make a configuration from untrusted values, all of them given. Raises ValueError for invalid ones."""
    if name not in ARCHITECTURES:
        raise ValueError(f"the architecture {name[:40]!r} is not known here; known: {', '.join(ARCHITECTURES)}")
    kind = ARCHITECTURES[name].config
    types = fields_of(kind)
    if values.keys() != types.keys():
        raise ValueError(f"not the shape of a {name}: {', '.join(map(str, sorted(values.keys() ^ types.keys())))[:80]}")
    for field, wanted in types.items():
        _check(field, values[field], wanted)
    return kind(**values)


def _check(name: str, value: Any, wanted: Any) -> None:
    if wanted is int:
        good = type(value) is int and 1 <= value <= MAX_SIZE
        expected = f"an integer from 1 to {MAX_SIZE}"
    elif wanted is float:
        good = type(value) in (int, float) and 0 <= value < math.inf
        expected = "a number >= 0"
    elif bool in (wanted, *typing.get_args(wanted)):
        good, expected = type(value) is bool, "true or false"
    else:
        good, expected = isinstance(value, str), "a string"
    if not good:
        raise ValueError(f"{name} is {value!r:.40}, not {expected}")
