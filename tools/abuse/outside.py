"""Rules that need no attack: no server listens beyond loopback without a secret, and nothing on the wire is decompressed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import smolcluster
from smolcluster.serve.http.server import HttpSettings

PACKING = frozenset({"zlib", "gzip", "bz2", "lzma", "zstandard", "lz4", "zipfile", "tarfile", "pickle", "marshal"})
OPEN = (
    ("server", "--bind", "0.0.0.0"),
    ("serve", "nothing", "--listen", "0.0.0.0:65433"),
    ("stage", "--server", "127.0.0.1:1", "--bind", "0.0.0.0"),
)


def opens_without_a_token(folder: Path, commands: Sequence[Sequence[str]] = OPEN) -> list[str]:
    """Check that commands refuse to listen on all addresses without a token. Return what is wrong."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SMOLCLUSTER_")}
    environ["XDG_CONFIG_HOME"] = str(folder / "no-token")
    found = []
    for arguments in commands:
        command, name = [sys.executable, "-m", "smolcluster", *arguments], " ".join(arguments)
        try:
            done = subprocess.run(
                command, env=environ, cwd=folder, capture_output=True, text=True, timeout=60, check=False
            )
        except subprocess.TimeoutExpired:
            found.append(f"`{name}` without a token listens")
            continue
        if done.returncode == 0 or "token" not in done.stderr + done.stdout:
            found.append(f"status {done.returncode} of `{name}` without a token: {done.stderr[-200:]}")
    if HttpSettings(bind="0.0.0.0").checked().key is None:
        found.append("a page on 0.0.0.0 has no key")
    return found


def unpacks_nothing() -> list[str]:
    """Check that no file of the folders on the wire imports a decompressor. Return the offenders."""
    found = []
    for path in sorted(file for name in ("comm", "web", "serve") for file in _sources(name)):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            roots = {name.partition(".")[0] for name in (names if not module else [module])}
            packing = roots & PACKING
            if packing and not (module == "zlib" and names == ["crc32"]):
                found.append(f"{path.name} imports {', '.join(sorted(packing))}")
    return found


def _sources(name: str) -> list[Path]:
    return list((Path(smolcluster.__file__).parent / name).rglob("*.py"))
