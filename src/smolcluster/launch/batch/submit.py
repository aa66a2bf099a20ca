"""Job files written and handed over. Only what is here leaves the process."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from smolcluster.engine.durable_files import write_private_text
from smolcluster.errors import SmolclusterError, UserError


def write(text: str, out: Path, *, private: bool = False) -> None:
    """`private`: only its owner may read it."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if private:
            write_private_text(out, text)
        else:
            out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from error


def call(command: Sequence[str], *, where: str, text: str | None = None) -> str:
    """What the program says. `text` is its input; `where` says on which machine it is to be had."""
    if shutil.which(command[0]) is None:
        raise UserError(
            f"--submit: there is no {command[0]} here; {where}, or leave out --submit and take the file there"
        )
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise SmolclusterError(f"{command[0]} refuses: {said}")
    return done.stdout.strip()
