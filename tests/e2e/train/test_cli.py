"""The command line as the contract gives it: help, configurations, a whole run directory, ranks, resuming."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.command import TINY, Beside, Ended, Smol, read_rows, read_summary
from tests.places import free_port
from tests.world import TASKS

STEPS = 8
COMMANDS = ["", "train", "strategies", "export", "config", "config check", "config show", "config schema"]
COMMANDS += ["bench", "bench scaling", "server", "worker", "slurm", "k8s", "compose"]
COMMANDS += ["token", *(f"token {name}" for name in ("new", "add", "show", "list", "rotate", "revoke"))]
ROW = (
    *("step", "rank", "role", "host", "time", "loss", "lr", "grad_norm", "samples", "tokens", "tokens_per_s"),
    *("step_time_s", "compute_s", "comm_s", "bytes_sent", "bytes_received", "staleness"),
)
SUMMARY = (
    *("status", "strategy", "workers", "world_size", "steps", "samples", "tokens", "wall_s", "tokens_per_s"),
    *("train_loss", "val_loss", "val_accuracy", "bytes_sent", "bytes_received", "staleness_mean", "staleness_max"),
    *("stale_rejected", "skipped", "restarts", "members_lost", "members_joined", "peak_memory_bytes"),
    *("weights_sha256", "checkpoint"),
)
# The same run in every test of this file, whoever starts its ranks.
SETTINGS = (*TINY, "training.checkpoint_steps=4", "training.eval_steps=4")


def is_plain(text: str) -> bool:
    """No escape codes, no carriage returns, no bar."""
    return not re.search("[\x1b\r\u2501\u2588]", text)


def read_config(run_dir: Path) -> Any:
    return yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def beside(
    smol: Smol, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, guard: dict[str, str]
) -> Iterator[Beside]:
    folder = tmp_path_factory.mktemp
    jobs: dict[str, Callable[[], Any]] = {
        "test_strategies": lambda: [
            smol.run("strategies", *more, cwd=folder("list"), env=guard) for more in ((), ("--json",))
        ],
        "test_a_dry_run_writes_nothing": lambda: (where := folder("dry"), dry_run(smol, where)),
        "test_a_terminal_gets_a_picture_unless_no_color_is_set": lambda: (
            (where := folder("terminal")),
            on_terminals(smol, where),
        ),
    }
    with Beside(request, jobs) as running:
        yield running


# Commands that train nothing


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_needs_no_torch(
    smol: Smol, tmp_path: Path, guard: dict[str, str], command: str
) -> None:
    ended = smol.run(*command.split(), "--help", cwd=tmp_path, env=guard).ok()
    assert "Example" in ended.out
    assert f"smolcluster {command}".strip() in " ".join(ended.out.split())
    assert is_plain(ended.out)
    assert ended.err == ""


def test_the_guard_would_notice(smol: Smol, tmp_path: Path, guard: dict[str, str]) -> None:
    ended = smol.run("plan", "--memory", "gpt", "--nodes", "2", cwd=tmp_path, env=guard)
    assert "the launcher imports torch" in ended.err


def test_a_command_reads_no_other_ones_options() -> None:
    """Those of all would take longer than what many commands do."""
    code = "import sys, smolcluster.cli as cli; cli.build_app(sys.argv[1]); print(*sys.modules)"
    read = subprocess.run([sys.executable, "-c", code, "status"], capture_output=True, text=True, check=True)
    assert {"smolcluster.cli.status", "smolcluster.cli.train"} & set(read.stdout.split()) == {"smolcluster.cli.status"}


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = """import sys
from smolcluster.cli import main
try:
    main(["--help"])
finally:
    print(*sys.modules, file=sys.stderr)"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert " import " in shown.stdout
    imported = set(shown.stderr.split())
    ours = {name for name in imported if name.startswith("smolcluster.")}
    assert ours == {f"smolcluster.{name}" for name in ("cli", "cli.ending", "cli.options", "errors", "version")}
    assert not {"torch", "pydantic", "yaml", "asyncio", "rich"} & imported


def test_a_shell_completes_the_options_of_a_command(tmp_path: Path) -> None:
    line = {"_SMOLCLUSTER_COMPLETE": "complete_bash", "COMP_WORDS": "smolcluster train --wor", "COMP_CWORD": "2"}
    command = [sys.executable, "-m", "smolcluster"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | line, cwd=tmp_path)
    assert "--workers" in shown.stdout.split()


def test_version_by_every_name(smol: Smol, tmp_path: Path) -> None:
    expected = "smolcluster 0.1.0\n"
    assert smol.run("--version", cwd=tmp_path).ok().out == expected
    scripts = Path(sysconfig.get_path("scripts"))
    for name in ("smolcluster", "smol"):
        if (scripts / name).is_file():
            out = subprocess.run([scripts / name, "--version"], capture_output=True, text=True, check=True).stdout
            assert out == expected


def test_config_check_show_and_schema(smol: Smol, tmp_path: Path, guard: dict[str, str]) -> None:
    (tmp_path / "mine.yaml").write_text("training:\n  batch_size: 3\n  steps: 7\n", encoding="utf-8")
    (tmp_path / "yours.yaml").write_text("training:\n  steps: 9\n", encoding="utf-8")
    ended = smol.run("config", "check", "gpt", "mine.yaml", cwd=tmp_path, env=guard).ok()
    assert ended.out == "gpt, mine.yaml: ok\n"

    # Later ones win, then overrides: several in one go and again.
    overrides = ("--override", "model.num_layers=2", "seed=5", "--override", "model.dropout=0.3")
    ended = smol.run("config", "show", "gpt", "mine.yaml", "yours.yaml", *overrides, cwd=tmp_path, env=guard).ok()
    shown = yaml.safe_load(ended.out)
    assert (shown["training"]["batch_size"], shown["training"]["steps"], shown["training"]["seed"]) == (3, 9, 5)
    assert (shown["model"]["num_layers"], shown["model"]["dropout"], shown["model"]["model_dim"]) == (2, 0.3, 256)

    default = yaml.safe_load(smol.run("config", "show", cwd=tmp_path, env=guard).ok().out)
    assert (default["data"]["name"], default["cluster"]["num_workers"]) == ("embedded", 2)

    schema = json.loads(smol.run("config", "schema", cwd=tmp_path, env=guard).ok().out)
    assert set(schema["properties"]) == set(shown)


# A run and its directory


@dataclass(frozen=True)
class Run:
    folder: Path
    ended: Ended

    @property
    def path(self) -> Path:
        return self.folder / "runs" / "base"

    @property
    def sha256(self) -> str:
        return str(read_summary(self.path)["weights_sha256"])


@pytest.fixture(scope="module")
def base(smol: Smol, guard: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Eight steps on two workers, by our launcher, in runs/base. The launcher itself may not import torch."""
    folder = tmp_path_factory.mktemp("base")
    command = ("train", "--workers", "2", "--steps", str(STEPS), "--run-dir", "runs/base", "--override", *SETTINGS)
    return Run(folder, smol.run(*command, cwd=folder, env=guard).ok())


def test_the_run_directory_is_complete(base: Run) -> None:
    assert {path.name for path in base.path.iterdir() if not path.name.startswith(".")} == {
        *("config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "logs"),
    }
    checkpoints = base.path / "checkpoints"
    steps = sorted(path.name for path in checkpoints.glob("step-*"))
    assert steps == [f"step-{step:08d}" for step in (4, 8)]
    for name in steps:
        manifest = json.loads((checkpoints / name / "manifest.json").read_text(encoding="utf-8"))
        assert manifest["step"] == int(name.removeprefix("step-"))
        assert set(manifest["files"]) == {"weights.safetensors", "optimizer.safetensors", "state.json"}
    assert (checkpoints / "latest").read_text(encoding="utf-8") == "step-00000008\n"
    assert (checkpoints / "best").read_text(encoding="utf-8").strip() in steps


def test_the_configuration_is_kept_resolved(smol: Smol, base: Run) -> None:
    config = read_config(base.path)
    assert config["training"]["steps"] == STEPS
    assert config["training"]["seed"] == 42
    assert config["model"]["ff_dim"] == 128
    assert config["cluster"]["num_workers"] == 2
    smol.run("config", "check", base.path / "config.yaml", cwd=base.folder).ok()


def test_metrics_have_a_row_per_step_and_rank(base: Run) -> None:
    rows = read_rows(base.path)
    assert sorted((row["step"], row["rank"]) for row in rows) == [(s, r) for s in range(1, STEPS + 1) for r in (0, 1)]
    for row in rows:
        assert set(ROW) <= set(row)
        assert row["role"] == "worker"
        assert row["samples"] == 4 * row["step"]
        assert row["tokens"] == 32 * row["samples"]
    assert {row["step"] for row in rows if "val_loss" in row} == {4, 8}
    assert all("val_ppl" in row for row in rows if "val_loss" in row)


def test_the_summary_adds_up(base: Run) -> None:
    summary, rows = read_summary(base.path), read_rows(base.path)
    assert set(SUMMARY) <= set(summary)
    assert (summary["status"], summary["strategy"]) == ("finished", "allreduce")
    assert (summary["workers"], summary["world_size"], summary["steps"]) == (2, 2, STEPS)
    assert (summary["samples"], summary["tokens"]) == (2 * 4 * STEPS, 2 * 4 * STEPS * 32)
    last = [row for row in rows if row["step"] == STEPS]
    assert summary["train_loss"] == pytest.approx(sum(row["loss"] for row in last) / 2)
    assert summary["val_loss"] == pytest.approx(last[0]["val_loss"])
    assert summary["bytes_sent"] == summary["bytes_received"] > 0
    assert re.fullmatch("[0-9a-f]{64}", summary["weights_sha256"])
    assert (base.folder / summary["checkpoint"]).name == "step-00000008"


def test_logs_are_json_lines_by_rank(base: Run) -> None:
    host = socket.gethostname()
    files = {path.name: path for path in (base.path / "logs").iterdir()}
    assert set(files) == {f"worker-rank{rank}-{host}.log" for rank in (0, 1)}
    for rank in (0, 1):
        lines = files[f"worker-rank{rank}-{host}.log"].read_text(encoding="utf-8").splitlines()
        assert lines
        for line in map(json.loads, lines):
            assert {"time", "level", "message"} <= set(line)
            assert (line["role"], line["rank"], line["host"]) == ("worker", rank, host)


def test_a_pipe_gets_plain_lines(base: Run) -> None:
    assert is_plain(base.ended.out)
    assert base.ended.err == ""
    assert "gpt | allreduce | 2 workers" in base.ended.out
    for step in range(1, STEPS + 1):
        assert len(re.findall(rf"^step {step}/{STEPS}  loss \d", base.ended.out, flags=re.MULTILINE)) == 1


# Ranks that somebody else starts


def test_ranks_started_by_hand_train_the_same_weights(smol: Smol, base: Run, tmp_path: Path) -> None:
    """With the flags of the multi-node guide, which are other names for the keys that `base` was given."""
    guide = (
        *("--hidden-size", "32", "--layers", "1", "--attention-heads", "2", "--max-seq-length", "32"),
        *("--batch-size", "4", "--learning-rate", "0.003", "--gradient-clip-norm", "1.0", "--save-interval", "4"),
        *("--steps", str(STEPS), "--use-gradient-checkpointing", "--no-nccl"),
        *("--override", "training.eval_samples=8", "training.eval_steps=4", "training.device=cpu"),
        *("logging.log_interval=1", "logging.sample_tokens=8"),
    )
    place = ("--world-size", "2", "--master-port", str(free_port()), "--run-dir", "run")
    ranks = [smol.start("train", *place, "--rank", str(rank), *guide, cwd=tmp_path) for rank in (0, 1)]
    ended = [rank.end(timeout_s=300).ok() for rank in ranks]
    assert f"step {STEPS}/{STEPS}" in ended[0].out
    assert [each.err for each in ended] == ["", ""]

    config, expected = read_config(tmp_path / "run"), read_config(base.path)
    assert config["training"].pop("gradient_checkpointing") is True
    assert expected["training"].pop("gradient_checkpointing") is False
    assert config == expected
    assert read_summary(tmp_path / "run")["weights_sha256"] == base.sha256
    assert len(read_rows(tmp_path / "run")) == 2 * STEPS


def test_torchrun_trains_the_same_weights(smol: Smol, base: Run, tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "smolcluster")
    command = ("train", "--steps", str(STEPS), "--run-dir", "run", "--override", *SETTINGS)
    smol.run(*command, cwd=tmp_path, python=torchrun).ok()
    assert read_summary(tmp_path / "run")["weights_sha256"] == base.sha256
    assert sorted({row["rank"] for row in read_rows(tmp_path / "run")}) == [0, 1]


def test_a_rank_that_died_before_it_saved_anything_begins_anew(smol: Smol, tmp_path: Path) -> None:
    place = f"--world-size 1 --rank 0 --master-port {free_port()} --run-dir run --resume auto".split()
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 7, "rank": 0}\n')
    smol.run("train", *place, "--steps", "1", "--override", *TINY, cwd=tmp_path).ok()
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [1]


def test_ranks_that_differ_are_told_apart(smol: Smol, tmp_path: Path) -> None:
    port = str(free_port())
    command = ("train", "--world-size", "2", "--master-port", port, "--steps", "2", "--run-dir", "run")
    # A rank that is refused must not run the destructors of its backend, which abort now and then: here they always would.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    ranks = [
        smol.start(
            *(*command, "--rank", str(rank), "--override", *TINY, f"training.learning_rate=0.{rank + 1}"),
            cwd=tmp_path,
            env={"PYTHONPATH": path},
        )
        for rank in (0, 1)
    ]
    ended = [rank.end(timeout_s=300) for rank in ranks]
    expected = "training.learning_rate is 0.2 on rank 1 and 0.1 on rank 0; start all ranks with the same settings"
    for rank in ended:
        assert (rank.status, rank.err) == (2, f"smolcluster: {expected}\n")
    assert not (tmp_path / "run").exists()


def test_the_file_of_a_task_may_be_in_another_folder_on_each_machine(smol: Smol, tmp_path: Path) -> None:
    def train(*, alike: bool) -> list[Ended]:
        port, ranks = str(free_port()), []
        for rank in (0, 1):
            folder = tmp_path / f"host-{rank}"
            folder.mkdir(exist_ok=True)
            extra = "" if alike or rank == 0 else "# another\n"
            (folder / "my_task.py").write_text(TASKS.read_text(encoding="utf-8") + extra, encoding="utf-8")
            command = ["train", "my_task.py:Tiny", "--world-size", "2", "--rank", str(rank), "--master-port", port]
            command += ["--steps", "2", "--run-dir", "same" if alike else "other", "--override", "training.device=cpu"]
            command += [f"data.tokenizer_root={folder}", "training.batch_size=4"]
            ranks.append(smol.start(*command, cwd=folder))
        return [rank.end(timeout_s=120) for rank in ranks]

    for ended in train(alike=True):
        ended.ok()
    here, there = (tmp_path / f"host-{rank}" / "my_task.py" for rank in (0, 1))
    for ended in train(alike=False):
        assert ended.status == 2, ended.err
        assert f"in {there}:Tiny on rank 1 and in {here}:Tiny on rank 0, and these files differ" in ended.err


# Resuming


def test_resume_latest_replaces_later_rows(smol: Smol, base: Run, tmp_path: Path) -> None:
    """A copy of the run as a crash after step 4 might have left it: later rows are there, later checkpoints are not."""
    run_dir = tmp_path / "runs" / "copy"
    shutil.copytree(base.path, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000008")
    (run_dir / "summary.json").unlink()
    ended = smol.run("train", "--resume", "latest", cwd=tmp_path).ok()
    assert "resumed at step 4; 8 rows logged after it are dropped\n" in ended.out

    def losses(path: Path) -> list[tuple[int, int, float, float, int]]:
        return sorted((row["step"], row["rank"], row["loss"], row["lr"], row["samples"]) for row in read_rows(path))

    assert losses(run_dir) == losses(base.path)
    assert read_summary(run_dir)["weights_sha256"] == base.sha256
    assert (run_dir / "checkpoints" / "step-00000008").is_dir()


def test_resume_elsewhere_with_another_number_of_workers(smol: Smol, base: Run) -> None:
    """From a checkpoint into a new directory. One worker with the whole batch reads what two would have read."""
    before = {path: path.stat().st_mtime_ns for path in base.path.rglob("*")}
    alone = ("--workers", "1", "--batch-size", "8", "--run-dir", "elsewhere")
    ended = smol.run("train", "--resume", "runs/base/checkpoints/step-00000004", *alone, cwd=base.folder).ok()
    assert "resumed at step 4; not as in the checkpoint: training.batch_size 8 (was 4)\n" in ended.out
    run_dir = base.folder / "elsewhere"
    assert {path: path.stat().st_mtime_ns for path in base.path.rglob("*")} == before

    together: dict[int, list[float]] = {}
    for row in read_rows(base.path):
        together.setdefault(row["step"], []).append(row["loss"])
    losses = {row["step"]: row["loss"] for row in read_rows(run_dir)}
    # The same curve, but for sums taken in another order in fp32.
    assert losses == pytest.approx({step: sum(together[step]) / 2 for step in (5, 6, 7, 8)}, rel=1e-5)
    states = [path / "checkpoints" / "step-00000008" / "state.json" for path in (run_dir, base.path)]
    positions = [json.loads(state.read_text(encoding="utf-8"))["sampler"]["position"] for state in states]
    assert positions == [8 * STEPS, 8 * STEPS]
    assert read_summary(run_dir)["workers"] == 1


# Done beside the tests above


def test_strategies(beside: Beside) -> None:
    text, as_json = beside["test_strategies"]
    listed = json.loads(as_json.ok().out)
    by_name = {strategy["name"]: strategy for strategy in listed}
    assert {"single", "allreduce"} <= set(by_name)
    assert "classicdp" in by_name["allreduce"]["aliases"]
    assert "staleness_bound" in by_name["allreduce"]["options"]
    for strategy in listed:
        assert strategy["summary"] in text.ok().out
        assert set(strategy) == {"name", "algorithm", "aliases", "planes", "summary", "use_when", "options"}
    stage = by_name["fsdp"]["options"]["fsdp_stage"]
    assert (stage["default"], stage["planes"]["mesh"]["default"], stage["planes"]["elastic"]["default"]) == (3, 3, 1)
    assert set(by_name["fsdp"]["options"]["staleness_bound"]["planes"]) == {"elastic"}
    assert "    fsdp_stage (elastic) = 1: " in text.out


def dry_run(smol: Smol, folder: Path) -> Ended:
    (folder / "small.yaml").write_text("model: {model_dim: 16, num_heads: 2, max_seq_len: 16}\n", encoding="utf-8")
    flags = ("--world-size", "3", "--mixed-precision", "--vocab-size", "300", "--epochs", "2", "--seed", "7")
    return smol.run("train", "gpt", "small.yaml", *flags, "--dry-run", cwd=folder)


def test_a_dry_run_writes_nothing(beside: Beside) -> None:
    """It prints the configuration and the plan. --world-size without --rank is --workers."""
    folder, ended = beside["test_a_dry_run_writes_nothing"]
    plan = ended.ok().out
    config = yaml.safe_load(plan)
    assert (config["model"]["model_dim"], config["model"]["vocab_size"]) == (16, 300)
    assert (config["training"]["precision"], config["training"]["epochs"]) == ("bf16", 2)
    assert (config["training"]["seed"], config["cluster"]["num_workers"]) == (7, 3)
    assert "strategy allreduce on 3 worker(s)" in plan
    assert "rank 2: worker" in plan
    assert re.search(r"# run directory: runs.gpt-allreduce-\d{8}-\d{6}\n", plan)
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]


def on_a_terminal(smol: Smol, *arguments: str, cwd: Path, **env: str) -> str:
    """The command with a terminal for its output; returns all that it wrote there."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "smolcluster", *arguments],
            cwd=cwd,
            env=smol.env | {"TERM": "xterm-256color", **env},
            stdin=subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        written = b""
        with contextlib.suppress(OSError):  # how Linux says that nobody has the other end any more
            while block := os.read(master, 65536):
                written += block
        assert process.wait(300) == 0, written.decode()
    finally:
        os.close(master)
    return written.decode(errors="replace")


def on_terminals(smol: Smol, folder: Path) -> tuple[str, str]:
    """One run with NO_COLOR; then, without it, the same run continued with more steps than it had."""
    settings = ("--override", *TINY)
    plain = on_a_terminal(smol, "train", "--workers", "1", "--steps", "2", *settings, cwd=folder, NO_COLOR="1")
    return plain, on_a_terminal(smol, "train", "--resume", "latest", "--steps", "5", cwd=folder)


def test_a_terminal_gets_a_picture_unless_no_color_is_set(beside: Beside) -> None:
    folder, (plain, live) = beside["test_a_terminal_gets_a_picture_unless_no_color_is_set"]
    assert "\x1b" not in plain
    assert "step 2/2  loss" in plain
    assert "\x1b[" in live

    (run_dir,) = (folder / "runs").iterdir()
    assert re.fullmatch(r"gpt-single-\d{8}-\d{6}", run_dir.name)
    assert [row["step"] for row in read_rows(run_dir)] == [1, 2, 3, 4, 5]
    assert read_summary(run_dir)["steps"] == 5
    assert read_config(run_dir)["training"]["steps"] == 5


def test_help_in_a_terminal_that_has_few_letters() -> None:
    command = [sys.executable, "-c", "from smolcluster.cli import main; main(['train', '--help'])"]
    few = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}  # words are cut off there, with an ellipsis
    ended = subprocess.run(command, env=few, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Usage" in ended.stdout
