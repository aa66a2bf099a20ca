"""Write job files and submit them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from smolcluster.durable_files import write_private_text
from smolcluster.errors import SmolclusterError, UserError


def write(text: str, out: Path, *, private: bool = False) -> None:
    """Write a job file. `private`: readable by its owner only."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if private:
            write_private_text(out, text)
        else:
            out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from error


def call(command: Sequence[str], *, where: str, text: str | None = None) -> str:
    """Run a submit command and return its output. `text`: its input; `where`: the remedy if it is not installed."""
    if shutil.which(command[0]) is None:
        raise UserError(
            f"--submit: {command[0]} is not installed here; {where}, or remove --submit and copy the file there"
        )
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        problem = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise SmolclusterError(f"{command[0]} failed: {problem}")
    return done.stdout.strip()
