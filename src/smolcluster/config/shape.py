"""Convert the `model` section to a decoder's configuration, and back."""

from __future__ import annotations

from smolcluster.config.schema import ModelConfig
from smolcluster.models.protocols import DecoderConfig
from smolcluster.models.registry import ARCHITECTURES, architecture_of, fields_of, to_plain

_NOT_OF_A_SHAPE = {"type", "vocab_size", "options", "input_dim", "hidden", "out"}
_KEYS = ModelConfig.model_fields.keys() - _NOT_OF_A_SHAPE


def shape_of(model: ModelConfig, *, vocab_size: int) -> DecoderConfig:
    """Return the decoder configuration of a section. Raises ValueError for invalid values."""
    kind = ARCHITECTURES[model.type].config
    fields = fields_of(kind)
    for key in sorted(_KEYS - fields.keys()):
        if (value := getattr(model, key)) != ModelConfig.model_fields[key].default:
            raise ValueError(f"{key} is {value}, which a {model.type} does not have: leave it out")
    own = fields.keys() - _KEYS - {"vocab_size"}
    for key in model.options:
        if key not in own:
            known = f"its own are {', '.join(sorted(own))}" if own else "it has none of its own"
            raise ValueError(f"a {model.type} has no options.{key}: {known}")
    given = {key: getattr(model, key) for key in _KEYS & fields.keys()} | model.options
    return kind(vocab_size=vocab_size, **{key: value for key, value in given.items() if value is not None})


def section_of(shape: DecoderConfig) -> ModelConfig:
    """Return the section of a decoder configuration."""
    plain = to_plain(shape)
    options = {key: value for key, value in plain.items() if key not in ModelConfig.model_fields}
    rest = {key: value for key, value in plain.items() if key not in options}
    return ModelConfig(type=architecture_of(shape).name, options=options, **rest)
