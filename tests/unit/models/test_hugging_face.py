"""Hugging Face's names: the round trip keeps every bit, and `transformers` computes the same logits both ways."""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.gguf_files import same_bits
from torch import Tensor

from smolcluster.config import Config, dump
from smolcluster.config.schema import ModelConfig
from smolcluster.config.shape import shape_of
from smolcluster.durable_files import Files
from smolcluster.engine.checkpoint.export_hf import export_run, write_folder
from smolcluster.engine.checkpoint.snapshot import Snapshot
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import UserError
from smolcluster.models import GPT, GPTConfig, Qwen3Config, hugging_face
from smolcluster.models.hugging_face import (
    Folder,
    export_config,
    export_weights,
    family_of,
    import_config,
    load,
)
from smolcluster.models.parts import MAX_LAYERS, cast, check_values

VOCAB, CONTEXT = 61, 24


def imported(folder: Path, theirs: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Save these with safetensors, and return the weights that `load` reads."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(theirs), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return load(folder)[1]


GPT2 = GPTConfig(vocab_size=VOCAB, model_dim=48, num_layers=2, num_heads=4, max_seq_len=CONTEXT)
LLAMA = GPTConfig.llama(
    vocab_size=VOCAB, model_dim=48, num_layers=2, num_heads=6, num_kv_heads=2, ff_dim=80, max_seq_len=CONTEXT
)
QWEN3 = Qwen3Config(
    vocab_size=VOCAB,
    model_dim=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    ff_dim=80,
    max_seq_len=CONTEXT,
)
SHAPES = {
    "gpt2": GPT2,
    "gpt2-untied": replace(GPT2, tie_head=False, ff_dim=100, norm_eps=1e-3, dropout=0.2),
    "llama": LLAMA,
    "llama-untied": replace(LLAMA, tie_head=False, rope_theta=5e5, norm_eps=1e-6),
    "llama-biases": replace(LLAMA, bias=True, qkv_bias=True, num_kv_heads=6),
    "qwen2": replace(LLAMA, qkv_bias=True, rope_theta=1e6),
    "qwen2-untied": replace(LLAMA, qkv_bias=True, tie_head=False, num_kv_heads=3),
    "qwen3": replace(QWEN3, rope_theta=1e6, norm_eps=1e-6),
    "qwen3-untied": replace(QWEN3, tie_head=False, num_kv_heads=6, head_dim=8),
}
EVERY_SHAPE = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())


def make(config: GPTConfig) -> GPT:
    """A model whose every parameter is away from its initial value, biases and norms too."""
    torch.manual_seed(0)
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ours_of(config: GPTConfig, weights: dict[str, Tensor]) -> GPT:
    model = GPT(config).eval()
    model.load_state_dict(weights)
    return model


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))


def write(folder: Path, config: GPTConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A folder as `smolcluster export` writes it; also what is in it, to be changed and written again."""
    theirs, tensors = export_config(config), export_weights(config, make(config).state_dict())
    write_folder(folder, theirs, tensors)
    return theirs, {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


# ---- names and shapes


@EVERY_SHAPE
def test_there_and_back_keeps_every_bit(config: GPTConfig, tmp_path: Path) -> None:
    write(tmp_path / "out", config)
    found, read = load(tmp_path / "out")
    assert found == config
    assert same_bits(read, make(config).state_dict())
    assert all(tensor.is_contiguous() for tensor in read.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_type_of_the_weights_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in make(LLAMA).state_dict().items()}
    theirs = export_config(LLAMA, dtype=dtype)
    assert same_bits(imported(tmp_path / "out", theirs, export_weights(LLAMA, weights)), weights)
    assert theirs["torch_dtype"] == str(dtype).removeprefix("torch.")


@EVERY_SHAPE
def test_the_architecture_goes_by_the_parts(config: GPTConfig, request: pytest.FixtureRequest) -> None:
    family = request.node.callspec.id.partition("-")[0]
    assert family_of(config).architecture.lower().startswith(family)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (replace(GPT2, activation="swiglu"), "nearest is GPT2LMHeadModel, but for activation swiglu (there: gelu)"),
        (replace(GPT2, num_kv_heads=2), "num_kv_heads 2 (there: the same as num_heads, 4)"),
        (replace(GPT2, bias=False, qkv_bias=False), "biases none (there: everywhere)"),
        (replace(LLAMA, norm="layernorm"), "LlamaForCausalLM, but for norm layernorm (there: rmsnorm)"),
        (replace(LLAMA, position="learned"), "position learned (there: rotary)"),
        (replace(LLAMA, bias=True, qkv_bias=False), "biases everywhere but on q, k, v (there: none or everywhere)"),
    ],
)
def test_another_mix_of_parts_is_refused_by_name(config: GPTConfig, told: str) -> None:
    for refused in (lambda: export_config(config), lambda: export_weights(config, GPT(config).state_dict())):
        with pytest.raises(ValueError, match="no model with these parts together") as error:
            refused()
        assert told in str(error.value)


def test_weights_of_another_model_are_not_exported() -> None:
    with pytest.raises(ValueError, match=r"1 missing: lm_head\.weight"):
        export_weights(replace(LLAMA, tie_head=False), GPT(LLAMA).state_dict())
    with pytest.raises(ValueError, match=r"size mismatch: token_embedding.weight is \(61, 48\), not \(62, 48\)"):
        export_weights(replace(LLAMA, vocab_size=62), GPT(LLAMA).state_dict())


# ---- folders of others


def test_the_released_gpt2_has_no_prefix_and_holds_masks(tmp_path: Path) -> None:
    theirs, tensors = write(tmp_path / "out", GPT2)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    del theirs["tie_word_embeddings"]
    assert same_bits(imported(tmp_path / "old", theirs, old), make(GPT2).state_dict())


def test_a_tied_head_may_be_stored_twice(tmp_path: Path) -> None:
    weights = make(LLAMA).state_dict()
    tensors = export_weights(LLAMA, weights)
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    assert same_bits(imported(tmp_path / "out", export_config(LLAMA), twice), weights)


def test_shards(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    _, tensors = write(folder, LLAMA)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"

    def write_index(weight_map: Any) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")

    for place in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == place}, folder / place)
    write_index(places)
    assert same_bits(load(folder)[1], make(LLAMA).state_dict())

    # The index and its files must agree, and stay in the folder.
    write_index(places | {"extra.weight": places[names[0]]})
    with pytest.raises(ValueError, match=r"does not hold the tensors of .*: extra\.weight"):
        load(folder)
    for place in ("../model.safetensors", "sub/model.safetensors", "model.bin"):
        write_index(places | {names[0]: place})
        with pytest.raises(ValueError, match="not the name of a safetensors file in this folder"):
            load(folder)
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe.safetensors")
        write_index(dict.fromkeys(places, "pipe.safetensors"))
        with pytest.raises(ValueError, match=r"pipe\.safetensors: not a file"):
            load(folder)
    write_index(places | {names[0]: "gone.safetensors"})
    with pytest.raises(ValueError, match=r"gone\.safetensors: not a readable safetensors file"):
        load(folder)
    write_index([])
    with pytest.raises(ValueError, match="weight_map is not a table"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "the architecture is MambaForCausalLM; known: GPT2LMHeadModel, Llama",
        ),
        ({"architectures": None}, "the architecture is not given"),
        ({"hidden_size": None}, "hidden_size is None, which is not a number"),
        ({"hidden_size": "48"}, "hidden_size is '48', which is not a number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, which is not a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, which is not true or false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported: only 'silu'"),
        ({"head_dim": 16}, "head_dim is 16, which is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling is"),
        ({"rope_scaling": "yes"}, "only plain rotary positions"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters is"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "without full attention"),
        ({"layer_types": 5}, "without full attention"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000, which no model has"),
        ({"vocab_size": 10**30}, "vocab_size is 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, which no model has"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf, which no model has"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, which no model has"),
        ({"num_attention_heads": 5}, "model_dim 48 is not divisible by num_heads 5"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 layers, but there are only 20 tensors"),
        ({"num_hidden_layers": 3}, "9 missing: model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "9 unexpected: model.layers.1."),
        ({"attention_bias": True, "mlp_bias": True}, "missing: model.layers.0.self_attn.q_proj.bias"),
        ({"intermediate_size": 81}, "model.layers.0.mlp.gate_proj.weight is (80, 48), not (81, 48)"),
        ({"tie_word_embeddings": False}, "1 missing: lm_head.weight"),
    ],
)
def test_what_cannot_be_read_is_told_by_name(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    theirs, _ = write(tmp_path / "out", LLAMA)
    config = {key: value for key, value in (theirs | change).items() if value is not None or key == "hidden_size"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        load(tmp_path / "out")
    assert told in str(error.value)
    assert str(tmp_path / "out") in str(error.value)


def test_more_layers_than_any_model_has_are_not_laid_out(tmp_path: Path) -> None:
    theirs, tensors = write(tmp_path / "out", LLAMA)
    count = MAX_LAYERS + 1
    (tmp_path / "out" / "config.json").write_text(json.dumps(theirs | {"num_hidden_layers": count}), encoding="utf-8")
    save_file(tensors | {f"x{n}": torch.zeros(1) for n in range(count)}, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ValueError, match=f"{count} layers; at most {MAX_LAYERS} are supported"):
        load(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.index_fill(0, torch.tensor([1]), math.nan), "contains NaN"),
        (lambda t: t.double().fill_(1e300), "values beyond the fp32 range"),
        (lambda t: t.to(torch.int32), "is int32; expected a floating-point dtype"),
        (lambda t: t > 0, "is bool; expected a floating-point dtype"),
    ],
    ids=["nan", "too large", "int", "bool"],
)
def test_weights_that_are_no_numbers_are_refused(change: Callable[[Tensor], Tensor], told: str, tmp_path: Path) -> None:
    weights = export_weights(LLAMA, make(LLAMA).state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=told):
        imported(tmp_path / "out", export_config(LLAMA), {**weights, name: change(weights[name])})


def test_every_weight_is_looked_at_also_in_large_tensors() -> None:
    tensor = torch.zeros(3, (1 << 20) - 1, dtype=torch.bfloat16)
    check_values("w", tensor)
    tensor[2, -1] = math.inf
    with pytest.raises(ValueError, match="w contains NaN"):
        check_values("w", tensor)


def test_weights_are_cast_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have room for its part once, and not in two types."""
    write(tmp_path / "out", LLAMA)
    stored: list[weakref.ref[Tensor]] = []
    most = 0

    def watched(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        nonlocal most
        stored.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in stored))
        return cast(name, tensor, dtype)

    monkeypatch.setattr(hugging_face, "cast", watched)
    found = Folder(tmp_path / "out").load(range(2), first=True, last=True, dtype=torch.bfloat16)
    assert len(stored) == len(found) > 10
    assert most == 1


def test_a_missing_key_and_the_keys_of_newer_files() -> None:
    theirs = export_config(SHAPES["llama-untied"])
    with pytest.raises(ValueError, match="vocab_size is missing"):
        import_config({key: value for key, value in theirs.items() if key != "vocab_size"})
    newer = {key: value for key, value in theirs.items() if key != "rope_theta"}
    newer["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    assert import_config(newer) == SHAPES["llama-untied"]


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(tmp_path)
    folder = tmp_path / "out"
    write(folder, GPT2)
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="weights in other formats are not read"):
        load(folder)
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load(folder)
    (folder / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match="holds a list, not an object"):
        load(folder)
    with (folder / "config.json").open("wb") as file:  # sparse: nothing of it is on the disk
        file.truncate((64 << 20) + 1)
    with pytest.raises(ValueError, match=r"config\.json: larger than 64 MiB"):
        load(folder)


def test_a_run_may_have_the_parts_of_qwen2() -> None:
    model = ModelConfig(position="rotary", norm="rmsnorm", activation="swiglu", qkv_bias=True)
    assert family_of(shape_of(model, vocab_size=VOCAB)).architecture == "Qwen2ForCausalLM"


def test_values_that_fp16_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = ModelConfig(model_dim=32, num_layers=1, num_heads=2, max_seq_len=8)
    weights = make(shape_of(model, vocab_size=VOCAB)).state_dict()
    weights["norm.weight"][3] = 1e5
    run = RunDir(tmp_path / "run")
    run.create(dump(Config(model=model)), resume=False)
    CheckpointStore(run.checkpoints, keep=1).save(Snapshot(step=1, weights=weights))
    with pytest.raises(
        UserError, match=r"norm\.weight has values that fp16 cannot represent; use --dtype bf16 or fp32"
    ):
        export_run(run.path, tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()
    assert export_run(run.path, tmp_path / "out", dtype="bf16").architecture == "GPT2LMHeadModel"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Full(Files):
        def fsync_folder(self, path: Path) -> None:
            if path.name.startswith(".tmp-"):
                raise OSError(28, "No space left on device")

    weights = make(GPT2).state_dict()
    with pytest.raises(UserError, match=r"cannot write .*out: No space left on device"):
        write_folder(tmp_path / "out", export_config(GPT2), export_weights(GPT2, weights), files=Full())
    assert list(tmp_path.iterdir()) == []


# ---- the same logits as transformers


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="pip install 'smolcluster[dev]'")


def check_logits(theirs: Any, ours: GPT) -> None:
    """Both compute in fp32; only the order of their sums differs."""
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(tokens()).logits, ours(tokens()), rtol=1e-5, atol=1e-5)


@EVERY_SHAPE
def test_transformers_loads_an_export(config: GPTConfig, tmp_path: Path, transformers: Any) -> None:
    write(tmp_path / "out", config)
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model).__name__ == family_of(config).architecture
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters
    check_logits(model, make(config))


@EVERY_SHAPE
def test_a_model_saved_by_transformers_is_read(config: GPTConfig, tmp_path: Path, transformers: Any) -> None:
    """Its own defaults and its own way to write config.json, shards included."""
    theirs = transformers.AutoConfig.for_model(**export_config(config))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for folder, options in ((tmp_path / "whole", {}), (tmp_path / "shards", {"max_shard_size": "40KB"})):
        model.save_pretrained(folder, safe_serialization=True, **options)
        found, weights = load(folder)
        assert found == config
        check_logits(model, ours_of(found, weights))
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
