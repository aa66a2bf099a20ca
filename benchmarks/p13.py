"""P13: start-up.

Help: wall time of `smolcluster --help`, from the start of the process to its end, beside `python -c pass` (the lower bound) and
`python -c "import torch"` (what it must not do). The modules that it has loaded are checked not to include torch.
Target: at most 0.3 s.

First step: from the start of the command until its line about step 1 is read from its output. Ours is `smolcluster train`
on 2 workers, with its launcher, run directory, configuration, data and metrics; the peer is the smallest script that does
the same with torchrun, gloo and torch DDP (`peers/first_step.py`), on random tokens. Same model, one thread per
process. Ours takes 2 steps, because the last step of a run is evaluated before its line is printed; the rest of the run is not
counted. Caches (compiled Python files, tokens) are warm.
Target: at most 1.5 times the peer.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import Comparison, Session, Target, Variant, timed
from benchmarks.harness.processes import ROOT, child_environment, smolcluster_command, started, train_command
from benchmarks.harness.workload import SHAPES
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


def _help(session: Session) -> None:
    python = sys.executable
    output = _output([python, "-c", MODULES_AFTER_HELP])
    loaded = "torch is not loaded" not in output

    session.compare(
        Comparison(
            name="smolcluster --help: wall time",
            variants=[
                Variant(name="python -c pass", run=timed(partial(_output, [python, "-c", "pass"])), role="peer"),
                Variant(
                    name="smolcluster --help",
                    run=timed(partial(_output, [*smolcluster_command(), "--help"])),
                    target=Target(limit=0.3, of="median"),
                ),
                Variant(name="import torch", run=timed(partial(_output, [python, "-c", "import torch"])), role="extra"),
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
    peer = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    peer += ["-m", "benchmarks.peers.first_step", *SHAPE.arguments()]
    with tempfile.TemporaryDirectory() as folder:
        counter = itertools.count()

        def ours() -> list[str]:
            overrides = {
                **SHAPE.overrides(),
                "training.device": "cpu",
                "training.eval_samples": SHAPE.batch_size,
                "training.checkpoint_steps": 0,
                "data.cache_dir": Path(folder) / "cache",
            }
            options = ("--strategy", "allreduce", "--workers", "2", "--steps", "2")
            return train_command(Path(folder) / f"run{next(counter)}", overrides, *options)

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
    """Return the seconds until the process prints its line about step 1. Wait for its end."""
    began, seconds = time.perf_counter(), None
    with started(command, listen=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if seconds is None and line.startswith(b"step 1/"):
                seconds = time.perf_counter() - began
        if process.wait() != 0 or seconds is None:
            raise SmolclusterError(f"no first step; the process ended with status {process.returncode}")
    return seconds
