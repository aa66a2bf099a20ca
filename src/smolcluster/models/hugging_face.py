"""A GPT under Hugging Face's names, and back: tables, and pure functions on dictionaries of tensors.

    ours                        GPT2LMHeadModel              LlamaForCausalLM, Qwen2ForCausalLM
    attention.qkv               c_attn, transposed           q_proj, k_proj, v_proj
    mlp.up                      c_fc, transposed             gate_proj, up_proj
    every other matrix          transposed, but embeddings   as it is

GPT-2's layers there multiply from the other side, hence the transposes. Rotary positions turn the pair (i, i + E/2) of a head
on both sides, so no rows change places. Every step moves numbers and computes none: the round trip gives the same bits.

`load` reads a folder that `transformers` or `smolcluster export` wrote. It reads safetensors only and runs no code from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from smolcluster.models.gpt import GPT
from smolcluster.models.gpt_config import GPTConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

Names = Mapping[str, tuple[str, ...]]  # our module -> theirs, in the order in which ours joins them; N is the layer

GPT2_NAMES: Names = {
    "token_embedding": ("transformer.wte",),
    "position_embedding": ("transformer.wpe",),
    "blocks.N.attention_norm": ("transformer.h.N.ln_1",),
    "blocks.N.attention.qkv": ("transformer.h.N.attn.c_attn",),
    "blocks.N.attention.out": ("transformer.h.N.attn.c_proj",),
    "blocks.N.mlp_norm": ("transformer.h.N.ln_2",),
    "blocks.N.mlp.up": ("transformer.h.N.mlp.c_fc",),
    "blocks.N.mlp.down": ("transformer.h.N.mlp.c_proj",),
    "norm": ("transformer.ln_f",),
    "lm_head": ("lm_head",),
}
LLAMA_NAMES: Names = {
    "token_embedding": ("model.embed_tokens",),
    "blocks.N.attention_norm": ("model.layers.N.input_layernorm",),
    "blocks.N.attention.qkv": tuple(f"model.layers.N.self_attn.{part}_proj" for part in "qkv"),
    "blocks.N.attention.out": ("model.layers.N.self_attn.o_proj",),
    "blocks.N.mlp_norm": ("model.layers.N.post_attention_layernorm",),
    "blocks.N.mlp.up": ("model.layers.N.mlp.gate_proj", "model.layers.N.mlp.up_proj"),
    "blocks.N.mlp.down": ("model.layers.N.mlp.down_proj",),
    "norm": ("model.norm",),
    "lm_head": ("lm_head",),
}

LLAMA_PARTS = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu"}
LLAMA_KEYS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
    "hidden_size": "model_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ff_dim",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tie_head",
    "attention_dropout": "dropout",
}
LLAMA_DEFAULTS = {
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of Hugging Face, and what of ours it stands for."""

    architecture: str
    model_type: str
    parts: Mapping[str, str]
    biases: tuple[str, ...]  # as `_biases` says it
    grouped_heads: bool
    names: Names
    transposed: tuple[str, ...] = ()  # endings of our modules
    keys: Mapping[str, str]  # key of config.json -> field of GPTConfig; where two keys have one field, the last is read
    defaults: Mapping[str, Any]  # what stands for a key that config.json leaves out
    fields: Mapping[str, bool] = field(default_factory=dict)  # of GPTConfig, the same in every such model
    choices: Mapping[str, tuple[Any, ...]]  # keys whose other values mean other arithmetic; the first is written
    no_weights: str  # tensors that old files hold beside the weights


FAMILIES = (
    Family(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        parts={"position": "learned", "norm": "layernorm", "activation": "gelu"},
        biases=("everywhere",),
        grouped_heads=False,
        names=GPT2_NAMES,
        transposed=("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
        keys={
            "vocab_size": "vocab_size",
            "n_positions": "max_seq_len",
            "n_embd": "model_dim",
            "n_layer": "num_layers",
            "n_head": "num_heads",
            "n_inner": "ff_dim",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tie_head",
            "embd_pdrop": "dropout",
            "attn_pdrop": "dropout",
            "resid_pdrop": "dropout",
        },
        defaults={
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "resid_pdrop": 0.1,
        },
        fields={"bias": True, "qkv_bias": True},
        choices={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        no_weights=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    ),
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        parts=LLAMA_PARTS,
        biases=("none", "everywhere"),
        grouped_heads=True,
        names=LLAMA_NAMES,
        keys=LLAMA_KEYS | {"attention_bias": "qkv_bias", "mlp_bias": "bias"},
        defaults=LLAMA_DEFAULTS | {"attention_bias": False, "mlp_bias": False},
        choices={"hidden_act": ("silu", "swish")},
        no_weights=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        parts=LLAMA_PARTS,
        biases=("on q, k, v",),
        grouped_heads=True,
        names=LLAMA_NAMES,
        keys=LLAMA_KEYS,
        defaults=LLAMA_DEFAULTS,
        fields={"bias": False, "qkv_bias": True},
        choices={"hidden_act": ("silu", "swish"), "use_sliding_window": (False,)},
        no_weights=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    ),
)
_LARGEST = 2**31  # of the numbers in a config.json
_FRACTIONS, _FLAGS = ("dropout", "norm_eps", "rope_theta"), ("tie_head", "bias", "qkv_bias")


# From ours to theirs


def family_of(config: GPTConfig) -> Family:
    """The architecture with these parts. Raises ValueError with those that no architecture has together."""
    strange = {family.architecture: _strange(config, family) for family in FAMILIES}
    for family in FAMILIES:
        if not strange[family.architecture]:
            return family
    nearest = min(strange, key=lambda name: len(strange[name]))
    raise ValueError(
        f"Hugging Face has no model with these parts together; the nearest is {nearest}, but for "
        f"{', '.join(strange[nearest])}"
    )


def export_config(config: GPTConfig, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The contents of config.json."""
    family = family_of(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(config, name) for key, name in family.keys.items()},
        **{key: values[0] for key, values in family.choices.items()},
        # Their defaults are tokens of their own tokenizers: here they would stop a text in its middle.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def export_weights(config: GPTConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under their names: views where possible, no arithmetic."""
    family = family_of(config)
    _check_tensors(weights, _empty(config))
    return _theirs(family, config, weights)


def _theirs(family: Family, config: GPTConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        theirs, transposed = _their_names(family, name)
        pieces = tensor.split_with_sizes(_cuts(config, name)) if len(theirs) > 1 else (tensor,)
        result |= {their: piece.t() if transposed else piece for their, piece in zip(theirs, pieces, strict=True)}
    return result


def _their_names(family: Family, name: str) -> tuple[list[str], bool]:
    """Their names for one of our parameters, and whether its matrices are transposed."""
    layer = re.match(r"blocks\.(\d+)\.", name)
    module, _, kind = re.sub(r"^blocks\.\d+\.", "blocks.N.", name).rpartition(".")
    number = layer[1] if layer else ""
    theirs = [f"{their}.{kind}".replace(".N.", f".{number}.") for their in family.names[module]]
    return theirs, module.endswith(family.transposed)


def _cuts(config: GPTConfig, name: str) -> list[int]:
    """How many rows of a joined projection belong to each of its parts."""
    if ".qkv." in name:
        return [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    return [config.ff_dim, config.ff_dim]


def _strange(config: GPTConfig, family: Family) -> list[str]:
    """The parts of a model that this architecture does not have."""
    found = [
        f"{part} {getattr(config, part)} (there: {theirs})"
        for part, theirs in family.parts.items()
        if getattr(config, part) != theirs
    ]
    if _biases(config) not in family.biases:
        found.append(f"biases {_biases(config)} (there: {' or '.join(family.biases)})")
    if config.num_kv_heads != config.num_heads and not family.grouped_heads:
        found.append(f"num_kv_heads {config.num_kv_heads} (there: as many as num_heads, {config.num_heads})")
    return found


def _biases(config: GPTConfig) -> str:
    if config.bias:
        return "everywhere" if config.qkv_bias else "everywhere but on q, k, v"
    return "on q, k, v" if config.qkv_bias else "none"


# From theirs to ours


def import_config(theirs: Mapping[str, Any]) -> GPTConfig:
    """The shape that a config.json describes. Raises ValueError for what a GPT of ours cannot be.

    The dropout is that of the residual stream (GPT-2) or of attention (Llama, Qwen2).
    """
    family = _named_family(theirs)
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
    config = GPTConfig(**(dict(family.parts) | dict(family.fields) | fields))
    if theirs.get("head_dim") not in (None, config.head_dim):
        raise ValueError(
            f"head_dim is {theirs['head_dim']}, which is not supported: only hidden_size / num_attention_heads, "
            f"here {config.head_dim}"
        )
    return config


def import_weights(config: GPTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors as our state dict, in memory of its own. Raises ValueError with the names that are wrong."""
    family = family_of(config)
    tensors = _weights_only(family, config, tensors)
    if config.num_layers > len(tensors):  # before a model of that many layers is laid out
        raise ValueError(f"{CONFIG} says {config.num_layers} layers, but there are only {len(tensors)} tensors")
    ours = _empty(config)
    _check_tensors(tensors, _theirs(family, config, ours))
    _check_values(tensors)
    result: dict[str, Tensor] = {}
    for name in ours:
        theirs, transposed = _their_names(family, name)
        result[name] = torch.cat([tensors[their].t() if transposed else tensors[their] for their in theirs])
    return result


def load(folder: str | Path) -> tuple[GPTConfig, dict[str, Tensor]]:
    """A model from config.json and model.safetensors, in one piece or in shards. Raises ValueError with the place.

    config, weights = load("smollm")
    model = GPT(config)
    model.load_state_dict(weights)
    """
    folder = Path(folder)
    theirs = _read_json(folder / CONFIG)
    try:
        config = import_config(theirs)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    tensors = _read_weights(folder)
    try:
        return config, import_weights(config, tensors)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _named_family(theirs: Mapping[str, Any]) -> Family:
    known = {family.architecture: family for family in FAMILIES}
    named = theirs.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in tuple(known):
        what = f"is {', '.join(map(str, named))}" if isinstance(named, list) else "is not given"
        raise ValueError(f"the architecture {what}; known: {', '.join(known)}")
    return known[named[0]]


def _with_rope_theta(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The base of the frequencies stands by itself, or among other options that must all be off."""
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
    """One key of config.json for one field of ours, of the right type."""
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


def _weights_only(family: Family, config: GPTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what is no weight or is there twice, and under full names: the released GPT-2 leaves the prefix out."""
    if family.model_type == "gpt2" and not any(name.startswith("transformer.") for name in tensors):
        tensors = {name if name == "lm_head.weight" else f"transformer.{name}": t for name, t in tensors.items()}
    kept = {name: tensor for name, tensor in tensors.items() if not re.fullmatch(family.no_weights, name)}
    embedding, head = f"{family.names['token_embedding'][0]}.weight", "lm_head.weight"
    if config.tie_head and head in kept and embedding in kept:
        if not torch.equal(kept[head], kept[embedding]):
            raise ValueError(f"{CONFIG} says that the head is tied, but {head} differs from {embedding}")
        del kept[head]
    return kept


# Files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} has no {path.name}") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, not an object")
    return found


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if (folder / WEIGHTS).exists():
        return _read_tensors(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}; weights in other formats are not read")
    places = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{folder / INDEX}: weight_map is not a table of tensors and files")
    for place in places.values():
        if not re.fullmatch(r"[\w.-]+\.safetensors", place):  # a name in this folder, never a path out of it
            raise ValueError(f"{folder / INDEX}: {place!r} is not the name of a safetensors file in this folder")
    tensors: dict[str, Tensor] = {}
    for place in sorted(set(places.values())):
        shard = _read_tensors(folder / place)
        wrong = {n for n in shard if places.get(n) != place} | {
            n for n in places if places[n] == place and n not in shard
        }
        if wrong:
            raise ValueError(f"{folder / place}: does not hold the tensors of {INDEX}: {_first(sorted(wrong))}")
        tensors |= shard
    return tensors


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Views of the file; `import_weights` copies them."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from error


# Checks


def _empty(config: GPTConfig) -> dict[str, Tensor]:
    """Names and shapes of our parameters, without memory."""
    with torch.device("meta"):
        return dict(GPT(config).state_dict())


def _check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    problems = {
        "missing": [f"{name} {wanted[name]}" for name in wanted if name not in shapes],
        "superfluous": [f"{name} {shapes[name]}" for name in shapes if name not in wanted],
        "of another shape": [
            f"{name} is {shapes[name]}, not {shape}"
            for name, shape in wanted.items()
            if shapes.get(name, shape) != shape
        ],
    }
    if any(problems.values()):
        told = [f"{len(names)} {kind}: {_first(names)}" for kind, names in problems.items() if names]
        raise ValueError(f"the tensors are not those of the model ({'; '.join(told)})")


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    """Weights are numbers. One that is none would be found only as a loss that is none."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has the type {str(tensor.dtype).removeprefix('torch.')}, not one of fractions")
        wide = tensor if tensor.dtype == torch.float64 else tensor.float()
        if not bool((wide.abs() <= torch.finfo(torch.float32).max).all()):
            raise ValueError(f"{name} has values that are no numbers, or too large for fp32")


def _first(names: Iterable[str], limit: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
