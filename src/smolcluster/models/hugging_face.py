"""Convert decoders to and from Hugging Face's format: pure functions on dictionaries of tensors, by `registry.py`'s tables.

    ours                        GPT2LMHeadModel              LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
    attention.qkv               c_attn, transposed           q_proj, k_proj, v_proj
    mlp.up                      c_fc, transposed             gate_proj, up_proj
    every other matrix          transposed, but embeddings   unchanged

GPT-2's Conv1D layers store transposed weights. Rotary positions rotate the pair (i, i + E/2) of a head in both, so no rows
are permuted. Nothing is computed: a round trip is bit-identical.

`load` reads a folder written by `transformers` or `smolcluster export`. It reads safetensors only and runs no code from it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from smolcluster.models.architecture import Architecture, Family
from smolcluster.models.parts import (
    Shape,
    cast,
    check_depth,
    check_shapes,
    check_values,
    first_of,
    is_under,
    part_of,
    their_names,
    their_shapes,
    type_name,
)
from smolcluster.models.protocols import DecoderConfig
from smolcluster.models.registry import ARCHITECTURES, architecture_of

_JSON_LIMIT_BYTES = 64 << 20  # the largest tokenizers take half of it
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

_LARGEST = 2**31  # of the numbers in a config.json
_FRACTIONS, _FLAGS = ("dropout", "norm_eps", "rope_theta"), ("tie_head", "bias", "qkv_bias")


# Export: smolcluster to Hugging Face


def family_of(config: DecoderConfig) -> Family:
    """Return the architecture with these parts. Raises ValueError for a combination that no architecture has."""
    families = architecture_of(config).families
    unsupported = {family.architecture: _unsupported_parts(config, family) for family in families}
    for family in families:
        if not unsupported[family.architecture]:
            return family
    nearest = min(unsupported, key=lambda name: len(unsupported[name]))
    raise ValueError(
        f"Hugging Face has no model with these parts together; the nearest is {nearest}, but for "
        f"{', '.join(unsupported[nearest])}"
    )


def export_config(config: DecoderConfig, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the contents of config.json."""
    family = family_of(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(config, name) for key, name in family.keys.items()},
        **{key: values[0] for key, values in family.choices.items()},
        # The defaults of `transformers` are token ids of other tokenizers, and would stop a text early.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": type_name(dtype),
    }


def export_weights(config: DecoderConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights under Hugging Face's names, as views if possible."""
    family = family_of(config)
    check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, config.shapes())
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        theirs, transposed = their_names(family.names, name), is_under(name, family.transposed)
        pieces = tensor.split_with_sizes(config.cuts(name)) if len(theirs) > 1 else (tensor,)
        result |= {their: piece.t() if transposed else piece for their, piece in zip(theirs, pieces, strict=True)}
    return result


def _unsupported_parts(config: DecoderConfig, family: Family) -> list[str]:
    """Return the parts of a model that this architecture does not have."""
    found = [
        f"{part} {getattr(config, part)} (there: {theirs})"
        for part, theirs in family.parts.items()
        if getattr(config, part) != theirs
    ]
    if family.biases and (biases := _biases(config)) not in family.biases:
        found.append(f"biases {biases} (there: {' or '.join(family.biases)})")
    if config.num_kv_heads != config.num_heads and not family.grouped_heads:
        found.append(f"num_kv_heads {config.num_kv_heads} (there: the same as num_heads, {config.num_heads})")
    return found


def _biases(config: DecoderConfig) -> str:
    everywhere, on_qkv = getattr(config, "bias"), getattr(config, "qkv_bias")  # noqa: B009 - not every shape has them
    if everywhere:
        return "everywhere" if on_qkv else "everywhere but on q, k, v"
    return "on q, k, v" if on_qkv else "none"


# Import: Hugging Face to smolcluster


def import_config(theirs: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder configuration of a config.json. Raises ValueError for an unsupported one.

    The dropout is that of the residual stream (GPT-2) or of attention (all others).
    """
    architecture, family = _named_family(theirs)
    theirs = _with_rope_theta(theirs) if "rope_theta" in family.keys else theirs
    for key, known in family.choices.items():
        if theirs.get(key, known[0]) not in known:
            raise ValueError(f"{key} is {theirs[key]!r}, which is not supported: only {' or '.join(map(repr, known))}")
    if theirs.get("quantization_config") is not None:
        raise ValueError("the weights are quantized, which is not supported: use the weights before quantization")
    kinds = theirs.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError("layer_types names layers without full attention, which are not supported")
    fields = {name: _value(theirs, key, name, family.defaults) for key, name in family.keys.items()}
    config = architecture.config(**(dict(family.parts) | dict(family.fields) | fields))
    if theirs.get("head_dim") not in (None, config.head_dim):
        raise ValueError(
            f"head_dim is {theirs['head_dim']}, which is not supported: only hidden_size / num_attention_heads, "
            f"here {config.head_dim}"
        )
    return config


def load(folder: str | Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Load a model from config.json and model.safetensors, single or sharded. Raises ValueError with the file.

    config, weights = load("smollm")
    model = build(config)
    model.load_state_dict(weights)
    """
    model = Folder(folder)
    return model.config, model.load(range(model.config.num_layers), first=True, last=True)


class Folder:
    """A model on disk whose parts can be read. Opening it reads headers only and checks all names and shapes; `load` checks
    the values."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        theirs = read_json(self.path / CONFIG)
        try:
            self.config = import_config(theirs)
        except ValueError as error:
            raise ValueError(f"{self.path / CONFIG}: {error}") from error
        self._places = _find_weights(self.path)
        try:
            self._check_names()
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _check_names(self) -> None:
        self._family = family = family_of(self.config)
        self._stored = names = _full_names(family, self._places)
        embedding, head = f"{family.names['token_embedding'][0]}.weight", "lm_head.weight"
        # A tied head may be stored as well.
        self._twins = (embedding, head) if self.config.tie_head and {embedding, head} <= names.keys() else None
        found = {name: self._places[stored][1] for name, stored in names.items() if not (self._twins and name == head)}
        check_depth(self.config.num_layers, len(found), where=CONFIG)
        check_shapes(found, their_shapes(family.names, self.config, transposed=family.transposed))

    @property
    def files(self) -> list[Path]:
        """The files that define this model: config and weights."""
        return [self.path / CONFIG, *sorted({path for path, _ in self._places.values()})]

    def load(
        self,
        layers: range,
        *,
        first: bool,
        last: bool,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> dict[str, Tensor]:
        """Return the parameters of a part of the model (parts.py), under our names. `dtype` None: as stored."""
        names = part_of(self.config.shapes(), self.config, layers, first=first, last=last)
        with contextlib.ExitStack() as stack:
            opened: dict[Path, Any] = {}

            def read(their: str) -> Tensor:
                stored = self._stored[their]
                path = self._places[stored][0]
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                tensor: Tensor = opened[path].get_tensor(stored)
                return tensor

            def parameter(name: str) -> Tensor:
                tensor = self._joined(name, read)
                return (tensor if dtype is None else cast(name, tensor, dtype)).to(device)

            try:
                # One at a time: the model may not fit in memory twice.
                return {name: parameter(name) for name in names}
            except (ValueError, SafetensorError, OSError) as error:
                raise ValueError(f"{self.path}: {error}") from error

    def _joined(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return one of our parameters, in new memory. `read` returns a tensor of theirs."""
        transposed = is_under(name, self._family.transposed)
        pieces = []
        for their in their_names(self._family.names, name):
            piece = read(their)
            check_values(their, piece)
            if self._twins and their == self._twins[0] and not torch.equal(piece, read(self._twins[1])):
                raise ValueError(f"the head is tied according to {CONFIG}, but {self._twins[1]} differs from {their}")
            pieces.append(piece.t() if transposed else piece)
        return torch.cat(pieces)


def _full_names(family: Family, stored: Iterable[str]) -> dict[str, str]:
    """Return the stored names by full names: the released GPT-2 leaves the prefix out."""
    stored = list(stored)
    if family.model_type == "gpt2" and not any(name.startswith("transformer.") for name in stored):
        names = {name if name == "lm_head.weight" else f"transformer.{name}": name for name in stored}
    else:
        names = {name: name for name in stored}
    return {name: where for name, where in names.items() if not re.fullmatch(family.no_weights, name)}


def _named_family(theirs: Mapping[str, Any]) -> tuple[Architecture, Family]:
    known = {family.architecture: (one, family) for one in ARCHITECTURES.values() for family in one.families}
    named = theirs.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in tuple(known):
        what = f"is {', '.join(map(str, named))}" if isinstance(named, list) else "is not given"
        raise ValueError(f"the architecture {what}; known: {', '.join(known)}")
    return known[named[0]]


def _with_rope_theta(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move rope_theta out of `rope_parameters`, whose other options must be off."""
    for key in ("rope_parameters", "rope_scaling"):
        options = theirs.get(key)
        if options is None:
            continue
        plain = isinstance(options, dict) and options.get("partial_rotary_factor", 1) == 1
        if not plain or options.get("rope_type", options.get("type", "default")) != "default":
            raise ValueError(f"{key} is {options}, which is not supported: only plain rotary positions")
        if "rope_theta" in options:
            theirs = {**theirs, "rope_theta": options["rope_theta"]}
    return theirs


def _value(theirs: Mapping[str, Any], key: str, name: str, defaults: Mapping[str, Any]) -> Any:
    """Return the value of a config.json key for one of our fields, with the right type."""
    if key not in theirs and key not in defaults:
        raise ValueError(f"{key} is missing")
    value = theirs.get(key, defaults.get(key))
    if value is None and defaults.get(key, 0) is None:
        return 0  # automatic, there and here
    kind: Any = bool if name in _FLAGS else int | float if name in _FRACTIONS else int
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{key} is {value!r}, which is not {'true or false' if kind is bool else 'a number'}")
    if kind is not bool and not 0 <= value <= _LARGEST:
        raise ValueError(f"{key} is {value!r}, which no model has")
    return value


# Files


def _check_file(path: Path) -> None:
    """Raise an error unless it is a regular file: reading a pipe could block forever."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a file")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file in the folder of the weights. Raises ValueError with the file."""
    _check_file(path)
    try:
        with path.open("rb") as file:
            data = file.read(_JSON_LIMIT_BYTES + 1)
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} has no {path.name}") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > _JSON_LIMIT_BYTES:
        raise ValueError(f"{path}: larger than {_JSON_LIMIT_BYTES >> 20} MiB")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, not an object")
    return found


def _find_weights(folder: Path) -> dict[str, tuple[Path, Shape]]:
    """Return the file and shape of each tensor."""
    if (folder / WEIGHTS).exists():
        return {name: (folder / WEIGHTS, shape) for name, shape in _read_shapes(folder / WEIGHTS).items()}
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}; weights in other formats are not read")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{folder / INDEX}: weight_map is not a table of tensors and files")
    for place in places.values():
        if not re.fullmatch(r"[\w.-]+\.safetensors", place):  # a name in this folder, never a path out of it
            raise ValueError(f"{folder / INDEX}: {place!r} is not the name of a safetensors file in this folder")
    found: dict[str, tuple[Path, Shape]] = {}
    for place in sorted(set(places.values())):
        shard = _read_shapes(folder / place)
        wrong = {n for n in shard if places.get(n) != place} | {
            n for n in places if places[n] == place and n not in shard
        }
        if wrong:
            raise ValueError(f"{folder / place}: does not hold the tensors of {INDEX}: {first_of(sorted(wrong))}")
        found |= {name: (folder / place, shape) for name, shape in shard.items()}
    return found


def _read_shapes(path: Path) -> dict[str, Shape]:
    _check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from error
