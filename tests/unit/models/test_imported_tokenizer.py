"""A model that was imported reads text with its own tokenizer: in training, when it is served, and after an export."""

from __future__ import annotations

import io
import json
import math
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.gguf_files import write_gguf
from tests.world import run_elastic_world, run_world

from smolcluster.cli import main
from smolcluster.config import load_config
from smolcluster.data.tokenizers import printable_bytes
from smolcluster.engine.checkpoint.export_hf import export_run, write_folder
from smolcluster.engine.checkpoint.import_hf import import_model
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.errors import UserError
from smolcluster.launch.cluster.request import plan_deployment, read_cluster
from smolcluster.launch.prepare import prepare
from smolcluster.models import GPT, GPTConfig
from smolcluster.models.hugging_face import export_config, export_weights
from smolcluster.serve.engine.sources import find_source
from smolcluster.tasks.gpt import GPTTask

pytest.importorskip("tokenizers", reason="pip install 'smolcluster[data]'")

SHAPE = GPTConfig.llama(vocab_size=64, model_dim=16, num_layers=1, num_heads=2, ff_dim=32, max_seq_len=16)
WORDS = ["the", "sea", "is", "wide", "and", "blue"]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
CHAT = [{"role": "user", "content": "sea"}]
SMALL = {"training.steps": 1, "training.batch_size": 2, "training.eval_batches": 1, "training.device": "cpu"}


def definition() -> dict[str, Any]:
    """Whole words, and one marker: no other tokenizer here gives these numbers."""
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 40, "content": "<|user|>", **options}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: 7 + n for n, word in enumerate(WORDS)} | {"?": 0},
            "unk_token": "?",
        },
    }


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(" ".join(WORDS * 80), encoding="utf-8")
    return path


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "hub"
    config = export_config(SHAPE) | {"eos_token_id": 12}
    write_folder(folder, config, export_weights(SHAPE, GPT(SHAPE).state_dict()))
    (folder / "tokenizer.json").write_text(json.dumps(definition()), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture
def run(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    command("import", hub, tmp_path / "run")
    assert "no tokenizer" not in capsys.readouterr().out
    shutil.rmtree(hub)  # the run has all it needs
    return tmp_path / "run"


def command(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    assert ended.value.code == 0


def settings(book: Path) -> list[str]:
    return ["data.name=text", f"data.root={book}", f"data.cache_dir={book.parent / 'cache'}"]


@pytest.mark.parametrize("sources", [[], ["gpt"]], ids=["its own configuration", "another one"])
def test_training_reads_with_the_models_tokenizer(run: Path, book: Path, sources: list[str], tmp_path: Path) -> None:
    moved = run.rename(tmp_path / "moved")
    prepared = prepare(sources, resume=str(moved), overrides=[*settings(book), "model.max_seq_len=16"])
    tokens, _ = GPTTask(prepared.config).train_data().batch(np.array([0]))
    assert tokens[0].tolist() == [7 + n % len(WORDS) for n in range(16)]


def flat(book: Path) -> dict[str, Any]:
    return SMALL | {"model.model_dim": 16, "model.num_layers": 1, "model.num_heads": 2, "model.ff_dim": 32} | {
        "model.max_seq_len": 16, "model.vocab_size": 64, "model.position": "rotary", "model.norm": "rmsnorm",
        "model.activation": "swiglu", "model.bias": False, "data.name": "text", "data.root": str(book),
        "data.cache_dir": str(book.parent / "cache"),
    }  # fmt: skip


@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_another_tokenizer_is_refused_with_both_names(run: Path, book: Path, tmp_path: Path, plane: str) -> None:
    other = tmp_path / "other.txt"
    other.write_text("abc " * 200, encoding="utf-8")
    config = flat(book) | {"data.root": str(other), "data.tokenizer": "chars"}
    if plane == "mesh":
        place = run_world(1, tmp_path / plane, config, strategy="single", resume=run / "checkpoints").ranks[0]
    else:
        place = run_elastic_world(1, tmp_path / plane, config, start=[], resume=run / "checkpoints").server
    assert place.status == 2
    message = place.failed.message
    assert f"the tokenizer {run / 'tokenizer' / 'tokenizer.json'}, and data.tokenizer is now chars" in message
    assert "or leave it out" in message


@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_a_run_remembers_the_tokenizer_that_it_was_trained_with(
    run: Path, book: Path, tmp_path: Path, plane: str
) -> None:
    """Characters of another text are other tokens, also where there are as many of them."""
    config = flat(book) | {"data.tokenizer": str(run / "tokenizer")}
    if plane == "mesh":
        world = run_world(1, tmp_path / "on", config, strategy="single", resume=run / "checkpoints")
        assert world.ranks[0].losses()[0] == pytest.approx(math.log(64), abs=0.3)
    else:
        elastic = run_elastic_world(1, tmp_path / "on", config, resume=run / "checkpoints")
        assert elastic.statuses == {"server": 0, 0: 0}
    again = flat(book) | {"data.tokenizer": "chars", "training.steps": 2}
    refused = run_world(1, tmp_path / "again", again, strategy="single", resume=tmp_path / "on" / "checkpoints")
    assert "data.tokenizer is now chars" in refused.ranks[0].failed.message


@pytest.mark.parametrize(
    "options", [("--strategy", "single"), ("--strategy", "edp", "--workers", "1")], ids=["mesh", "elastic"]
)
def test_a_new_run_has_a_tokenizer_of_its_own(run: Path, book: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    new = tmp_path / "new"
    small = [f"{key}={value}" for key, value in SMALL.items()]
    command("train", "--resume", run, "--run-dir", new, *options, "--override", *settings(book), *small)
    shutil.rmtree(run)
    assert load_config([new / "config.yaml"]).data.tokenizer == str(new / "tokenizer")
    assert find_source(str(new)).text().chat(CHAT) == [40, 8]
    moved = new.rename(tmp_path / "moved")
    assert prepare([], resume=str(moved)).config.data.tokenizer == str(moved / "tokenizer")


def test_a_cluster_is_sent_the_tokenizer(run: Path, tmp_path: Path) -> None:
    """A path of this machine means nothing on another one."""
    file = tmp_path / "cluster.yaml"
    file.write_text("hosts: {here: {address: local, workers: 2}}\nstrategy: edp\n", encoding="utf-8")
    order = plan_deployment(read_cluster(file, train=[str(run / "config.yaml")]))
    with tarfile.open(fileobj=io.BytesIO(order.files.data)) as archive:
        archive.extractall(tmp_path / "there", filter="data")
    assert load_config([tmp_path / "there" / "config.yaml"]).data.tokenizer == "tokenizer"
    for path in (run / "tokenizer").iterdir():
        assert (tmp_path / "there" / "tokenizer" / path.name).read_bytes() == path.read_bytes()
    workers = [process for process in order.layout.processes if process.name.startswith("worker")]
    assert all('data.tokenizer="tokenizer"' in seat.arguments for seat in workers)


def test_served_and_exported_with_tokenizer_and_template(run: Path, tmp_path: Path) -> None:
    run = run.rename(tmp_path / "moved")  # the path in its config.yaml is of where it was
    done = export_run(run, tmp_path / "out")
    assert done.has_tokenizer
    command("import", tmp_path / "out", tmp_path / "again")
    for model in (run, tmp_path / "out", tmp_path / "again"):
        text = find_source(str(model)).text()
        assert text.prompt("the wide sea") == [7, 10, 8]
        assert text.chat(CHAT) == [40, 8]
        assert text.stop_tokens == {12}


def test_a_folder_without_a_tokenizer_says_so(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (hub / "tokenizer.json").unlink()
    command("import", hub, tmp_path / "bare")
    assert "hub has no tokenizer: name the model's own with data.tokenizer=PATH" in capsys.readouterr().out
    assert not (tmp_path / "bare" / "tokenizer").exists()


def test_a_damaged_tokenizer_leaves_no_run(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (hub / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["import", str(hub), str(tmp_path / "bad")])
    assert ended.value.code == 2
    assert "is not a tokenizer.json" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()


def test_an_import_that_is_stopped_leaves_no_tokenizer(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", stopped)
        with pytest.raises(KeyboardInterrupt):
            import_model(hub, tmp_path / "run")
    assert not (tmp_path / "run" / "tokenizer").exists()
    (tmp_path / "run" / "tokenizer").mkdir()  # as after kill -9
    shutil.copy(hub / "tokenizer.json", tmp_path / "run" / "tokenizer")
    (hub / "tokenizer.json").unlink()
    import_model(hub, tmp_path / "run")
    assert not (tmp_path / "run" / "tokenizer").exists()


def test_a_gguf_file_is_imported_with_its_tokenizer(tmp_path: Path, book: Path) -> None:
    pytest.importorskip("gguf")
    torch.manual_seed(0)
    shape = GPTConfig.llama(vocab_size=260, model_dim=16, num_layers=1, num_heads=2, ff_dim=32, max_seq_len=16)
    weights = GPT(shape).state_dict()
    tokens = ["<|user|>", "<|im_end|>", *printable_bytes(), "se", "sea"]

    def header(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
        writer.add_token_merges(["s e", "se a"])
        writer.add_eos_token_id(1)
        writer.add_chat_template(TEMPLATE)

    file = write_gguf(tmp_path / "model.gguf", shape, weights, change=header)
    command("import", file, tmp_path / "run")
    before, after = find_source(str(file)), find_source(str(tmp_path / "run"))
    for ask in (lambda text: text.prompt("the sea"), lambda text: text.chat(CHAT), lambda text: text.stop_tokens):
        assert ask(after.text()) == ask(before.text())
    assert 259 in after.text().prompt("the sea")
    prepared = prepare([], resume=str(tmp_path / "run"), overrides=settings(book))
    tokens_BT, _ = GPTTask(prepared.config).train_data().batch(np.array([0]))
    assert tokens_BT[0].tolist() == before.text().encode(" ".join(WORDS))[:16]
    with pytest.raises(UserError, match="cannot import"):
        find_source(str(file)).open(book)  # type: ignore[attr-defined]


def test_a_model_that_does_not_exist_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["import", str(tmp_path / "nothing"), str(tmp_path / "run")])
    assert ended.value.code == 2
    assert f"there is no model at {tmp_path / 'nothing'}" in capsys.readouterr().err.replace("\n", "")
    assert not (tmp_path / "run").exists()
