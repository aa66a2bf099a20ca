"""`smolcluster export`: from a trained run to a folder that other tools load, and every way to ask for it wrongly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.command import TINY, Ended, Smol, run_here

from smolcluster.engine.checkpoint.snapshot import read_checkpoint
from smolcluster.models.hugging_face import load

LLAMA = ("model.position=rotary", "model.norm=rmsnorm", "model.activation=swiglu", "model.num_kv_heads=1")
DOCS = Path(__file__).parents[3] / "docs" / "checkpoints.md"


@pytest.fixture(scope="module")
def folder(smol: Smol, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `runs/llama`: two steps, a checkpoint after each, the Llama shape with grouped heads."""
    where = tmp_path_factory.mktemp("export")
    settings = (*TINY, *LLAMA, "training.checkpoint_steps=1", "training.eval_steps=1")
    arguments = ("train", "gpt", "--strategy", "single", "--steps", "2", "--run-dir", "runs/llama")
    smol.run(*arguments, "--override", *settings, cwd=where).ok()
    return where


class Here:
    """The command in this process, in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.chdir(folder)
        self._capsys = capsys

    def export(self, *arguments: str | Path) -> Ended:
        return run_here(self._capsys, "export", *arguments)

    def refused(self, *arguments: str | Path) -> str:
        """The one line that a wrong input gets."""
        ended = self.export(*arguments)
        assert (ended.status, ended.out) == (2, "")
        (line,) = ended.err.splitlines()
        assert not list(Path.cwd().glob(".tmp-*"))
        return line


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(folder, monkeypatch, capsys)


def test_an_export_is_imported_and_trained_on(smol: Smol, folder: Path, tmp_path: Path) -> None:
    """There and back, bit for bit; then another strategy goes on from it."""
    smol.run("export", "runs/llama", tmp_path / "hf", cwd=folder).ok()
    done = smol.run("import", tmp_path / "hf", tmp_path / "run", cwd=tmp_path).ok()
    assert f"smolcluster train --resume {tmp_path / 'run'}" in done.out
    first = read_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000000").weights
    saved = read_checkpoint(folder / "runs" / "llama" / "checkpoints" / "step-00000002").weights
    assert first.keys() == saved.keys()
    assert all(torch.equal(first[name], saved[name]) for name in saved)
    arguments = ("train", "--resume", "run", "--strategy", "fsdp", "--workers", "2", "--steps", "2")
    smol.run(*arguments, "--override", "training.batch_size=2", "training.eval_samples=2", cwd=tmp_path).ok()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    again = smol.run("import", tmp_path / "hf", tmp_path / "run", cwd=tmp_path)
    assert again.status == 2
    assert "already holds a run" in again.err
    other = smol.run("import", tmp_path, tmp_path / "new", cwd=tmp_path)
    assert other.status == 2
    assert "has no config.json" in other.err
    assert not (tmp_path / "new").exists()


def test_a_run_is_exported(smol: Smol, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "hf"
    first, second, third = smol.run("export", "runs/llama", out, cwd=folder).ok().out.splitlines()
    config, weights = load(out)
    assert first == f"{out}: LlamaForCausalLM of step-00000002, {config.num_parameters:,} parameters, fp32"
    assert second == "tokenizer: bytes (token n is the byte n of UTF-8 text); it is not part of the folder"
    assert third.endswith(f"AutoModelForCausalLM.from_pretrained({str(out)!r})")
    compile(third.removeprefix("load it with: "), "printed", "exec")

    saved = read_checkpoint(folder / "runs" / "llama" / "checkpoints" / "step-00000002").weights
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    assert (config.num_kv_heads, config.vocab_size, config.max_seq_len) == (1, 256, 32)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in out.parent.iterdir()] == ["hf"]


def test_a_chosen_checkpoint_in_another_type(here: Here, folder: Path, tmp_path: Path) -> None:
    """By its name, as best, or as a folder; an empty folder may stand where the model goes."""
    checkpoints = folder / "runs" / "llama" / "checkpoints"
    best = (checkpoints / "best").read_text(encoding="utf-8").strip()
    for number, (arguments, step, dtype) in enumerate(
        [
            (("runs/llama", "--checkpoint", "step-00000001"), "step-00000001", torch.bfloat16),
            ((checkpoints, "--checkpoint", "best"), best, torch.float16),
            ((checkpoints / "step-00000001",), "step-00000001", torch.float32),
        ]
    ):
        out = tmp_path / str(number)
        out.mkdir()
        short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
        ended = here.export(arguments[0], out, *arguments[1:], "--dtype", short).ok()
        assert f"of {step}, " in ended.out
        saved = read_checkpoint(checkpoints / step).weights["norm.weight"]
        tensors = load_file(out / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}
        assert torch.equal(tensors["model.norm.weight"], saved.to(dtype))
        told = json.loads((out / "config.json").read_text(encoding="utf-8"))
        assert told["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_a_damaged_checkpoint_is_passed_over_with_a_word(here: Here, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "runs" / "llama", run)
    (run / "checkpoints" / "step-00000002" / "state.json").write_bytes(b"{}")
    ended = here.export(run, tmp_path / "out").ok()
    assert ended.out.startswith("note: step-00000002 is damaged; the newest good checkpoint is exported instead\n")
    assert "of step-00000001, " in ended.out
    asked = here.export(run, tmp_path / "out2", "--checkpoint", "step-00000002")
    assert asked.status == 1
    assert "state.json" in asked.err


def test_wrong_inputs_leave_with_2_and_one_line(
    here: Here, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no run at runs/lama" in here.refused("runs/lama", "out")
    assert "has no config.yaml" in here.refused(tmp_path, "out")

    line = here.refused("runs/llama", "out", "--checkpoint", "step-00000007")
    assert "no checkpoint 'step-00000007'" in line
    assert "best, latest, step-00000001, step-00000002" in line
    checkpoint = "runs/llama/checkpoints/step-00000001"
    assert "names another" in here.refused(checkpoint, "out", "--checkpoint", "best")
    assert "unknown dtype 'int4'" in here.refused("runs/llama", "out", "--dtype", "int4")

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine", encoding="utf-8")
    assert "is not empty; name a new one" in here.refused("runs/llama", tmp_path / "full")
    assert "is not a folder" in here.refused("runs/llama", tmp_path / "full" / "note.txt")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["note.txt"]
    assert not (folder / "out").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "is the current folder" in here.refused(folder / "runs" / "llama", ".")


def test_runs_without_a_model_to_export(here: Here, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = (folder / "runs" / "llama" / "config.yaml").read_text(encoding="utf-8")
    (run / "config.yaml").write_text(config, encoding="utf-8")
    assert "has no checkpoint yet" in here.refused(run, "out")
    shutil.copytree(folder / "runs" / "llama" / "checkpoints", run / "checkpoints")

    def with_change(old: str, new: str) -> str:
        assert old in config
        (run / "config.yaml").write_text(config.replace(old, new), encoding="utf-8")
        return here.refused(run, "out")

    assert "the nearest is LlamaForCausalLM, but for norm layernorm" in with_change("norm: rmsnorm", "norm: layernorm")
    assert "missing: blocks.1.attention_norm.weight" in with_change("num_layers: 1", "num_layers: 2")
    assert "a model of your own (my.py:Task)" in with_change("task: null", "task: my.py:Task")


def test_the_help_and_the_page_agree(smol: Smol, tmp_path: Path) -> None:
    ended = smol.run("export", "--help", cwd=tmp_path).ok()
    assert "smolcluster export runs/demo demo-hf" in ended.out
    assert "smolcluster export runs/demo demo-hf" in DOCS.read_text(encoding="utf-8")
