"""P13: start-up.

Help: wall time of `smolcluster --help`, from the start of the process to its end, beside `python -c pass` (the floor) and
`python -c "import torch"` (what it must not do). It is also checked that torch is not among the modules loaded.
Target: at most 0.3 s.

First step: from the start of the command until its line about step 1 is read from its output. Ours is `smolcluster train`
on 2 workers, with its launcher, run directory, configuration, data and metrics; the peer is the smallest script that does
the same with torchrun, gloo and torch DDP (`benchmarks/peers/first_step.py`), on random tokens. Same model, one thread per
process. Ours is asked for 2 steps, because the last step of a run is evaluated before its line is printed; the rest of the
run is waited for, and not counted. Caches (compiled Python files, tokens) are warm.
Target: at most 1.5 times the peer.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import Comparison, Session, Target, Variant
from benchmarks.harness.workload import ROOT, SHAPES, child_environment
from smolcluster.errors import SmolclusterError

EXAMPLE = "python -m benchmarks p13 --only help"
SHAPE = SHAPES["0.8m"]
MODULES_AFTER_HELP = """
import sys
from smolcluster.cli import main
try:
    main(["--help"])
except SystemExit:
    print("torch is loaded" if "torch" in sys.modules else "torch is not loaded")
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=["help", "first-step"], help="one of the two (default: both)")


def run(session: Session, arguments: argparse.Namespace) -> None:
    if arguments.only != "first-step":
        _help(session)
    if arguments.only != "help":
        _first_step(session)


def smolcluster_command() -> list[str]:
    """The installed command, or the module where there is none."""
    script = Path(sys.executable).parent / "smolcluster"
    return [str(script)] if script.is_file() else [sys.executable, "-m", "smolcluster"]


def _help(session: Session) -> None:
    python = sys.executable
    output = _output([python, "-c", MODULES_AFTER_HELP])
    loaded = "torch is not loaded" not in output

    def timed(command: Sequence[str]) -> Callable[[], float]:
        def sample() -> float:
            started = time.perf_counter()
            _output(command)
            return time.perf_counter() - started

        return sample

    session.compare(
        Comparison(
            name="smolcluster --help: wall time",
            variants=[
                Variant(name="python -c pass", run=timed([python, "-c", "pass"]), role="peer"),
                Variant(
                    name="smolcluster --help",
                    run=timed([*smolcluster_command(), "--help"]),
                    target=Target(limit=0.3, of="median"),
                ),
                Variant(name="import torch", run=timed([python, "-c", "import torch"]), role="extra"),
            ],
            rounds=1 if session.quick else 5,
            parameters={"torch_imported_by_help": loaded},
        )
    )
    if loaded:
        raise SmolclusterError("`smolcluster --help` imports torch")
    print("torch is not imported by `smolcluster --help`\n")


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, env=child_environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SmolclusterError(f"`{command[0]}` ended with status {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _first_step(session: Session) -> None:
    numbers = (SHAPE.model_dim, SHAPE.num_layers, SHAPE.num_heads, SHAPE.max_seq_len, SHAPE.batch_size)
    peer = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    peer += ["-m", "benchmarks.peers.first_step", *map(str, numbers)]
    with tempfile.TemporaryDirectory() as folder:
        counter = itertools.count()

        def ours() -> list[str]:
            overrides = {
                **{key: value for key, value in SHAPE.overrides().items() if value is not None},
                "training.device": "cpu",
                "training.eval_samples": SHAPE.batch_size,
                "training.checkpoint_steps": 0,
                "data.cache_dir": Path(folder) / "cache",
            }
            run_dir = Path(folder) / f"run{next(counter)}"
            command = [*smolcluster_command(), "train", "gpt", "--strategy", "allreduce", "--workers", "2"]
            command += ["--steps", "2", "--run-dir", str(run_dir)]
            return [*command, "--override", *(f"{key}={value}" for key, value in overrides.items())]

        session.compare(
            Comparison(
                name="2 workers: time from the command to the end of the first training step",
                variants=[
                    Variant(name="torchrun, DDP", run=lambda: _until_first_step(peer), role="peer"),
                    Variant(
                        name="smolcluster train",
                        run=lambda: _until_first_step(ours()),
                        target=Target(limit=1.5),
                    ),
                    Variant(name="torchrun again", run=lambda: _until_first_step(peer), role="noise"),
                ],
                rounds=1 if session.quick else 3,
                parameters=SHAPE.overrides(),
            )
        )


def _until_first_step(command: Sequence[str]) -> float:
    """Seconds until the process prints its line about step 1."""
    with tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env=child_environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        seconds = None
        try:
            for line in process.stdout:
                if seconds is None and line.startswith("step 1/"):
                    seconds = time.perf_counter() - started
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if seconds is None or status != 0:
            errors.seek(0)
            words = errors.read().decode(errors="replace").strip()[-2000:]
            raise SmolclusterError(f"`{' '.join(command[:4])} ...` took no step and ended with {status}: {words}")
    return seconds
