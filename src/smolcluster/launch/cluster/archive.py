"""Pack what is sent to a machine: this package, the user's files, the configuration.

So every machine runs the same code as this one, whatever version is installed there; only the package's requirements must be
there, or are installed. The same files give the same archive, byte for byte, so it is sent only once.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from smolcluster.config import builtin_configs, dump
from smolcluster.config.schema import Config
from smolcluster.errors import UserError
from smolcluster.launch.cluster.layout import CONFIG, TOKENIZER
from smolcluster.launch.prepare import split_task

PACKAGE = Path(__file__).resolve().parents[2]
MAX_BYTES = 256 << 20  # of the user's files
_LEFT_OUT = {"__pycache__", ".git", ".venv", "venv", "env", "node_modules", "runs", ".mypy_cache", ".ruff_cache"}


@dataclass(frozen=True, slots=True)
class PackedFiles:
    data: bytes

    @property
    def key(self) -> str:
        return hashlib.sha256(self.data).hexdigest()[:16]


def pack_package() -> PackedFiles:
    files = {f"smolcluster/{path.relative_to(PACKAGE).as_posix()}": path for path in _below(PACKAGE)}
    files |= {f"smolcluster/configs/{path.name}": path for path in builtin_configs().values()}
    return PackedFiles(_pack((name, path.read_bytes()) for name, path in sorted(files.items())))


def pack_user_files(config: Config, base: Path, tokenizer: Mapping[str, bytes] | None = None) -> PackedFiles:
    """Pack the configuration, the Python files in the task's folder, and `run.files`, relative to `base`.

    `tokenizer`: files for the folder TOKENIZER.
    """
    found: dict[str, Path] = {}
    config = config.model_copy(deep=True)
    if config.task is not None and ".py" in config.task:
        file, name = split_task(config.task)
        task = Path(file).resolve()
        if not task.is_file():
            raise UserError(f"{file}: no such file; a task is path/to/file.py:ClassName")
        inside = base if task.is_relative_to(base) else task.parent
        found |= {path.relative_to(inside).as_posix(): path for path in _below(task.parent) if path.suffix == ".py"}
        config.task = f"{task.relative_to(inside).as_posix()}{name}"
    for name in config.run.files:
        found |= dict(_user_files(name, base))
    total = sum(path.stat().st_size for path in found.values())
    if total > MAX_BYTES:
        raise UserError(
            f"run.files: {total / 2**20:.0f} MiB exceed the limit of {MAX_BYTES >> 20} MiB: copy large data to the machines "
            "yourself, and set data.root"
        )
    contents = {name: path.read_bytes() for name, path in found.items()}
    contents |= {f"{TOKENIZER}/{name}": data for name, data in (tokenizer or {}).items()}
    contents[CONFIG] = dump(config).encode("utf-8")
    return PackedFiles(_pack(sorted(contents.items())))


def _user_files(name: str, base: Path) -> Iterator[tuple[str, Path]]:
    path = (base / name).resolve()
    if not path.is_relative_to(base):
        raise UserError(f"run.files: {name} is not below {base}, the folder of the cluster file")
    if path.is_file():
        yield path.relative_to(base).as_posix(), path
    elif path.is_dir():
        yield from ((file.relative_to(base).as_posix(), file) for file in _below(path))
    else:
        raise UserError(f"run.files: {name}: no such file or folder in {base}")


def _below(folder: Path) -> Iterator[Path]:
    """Yield plain files, except caches, environments, runs and hidden files."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _LEFT_OUT and not (name.startswith(".") or name.endswith(".egg-info"))
        )
        for name in sorted(files):
            path = Path(root) / name
            if not name.startswith(".") and not name.endswith((".pyc", ".pyo")) and not path.is_symlink():
                yield path


def _pack(contents: Iterable[tuple[str, bytes]]) -> bytes:
    """Return a reproducible archive: without times and owners."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in contents:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)


def requirements(*, extras: Iterable[str]) -> list[str]:
    """Return the package's requirements with these extras, for pip."""
    wanted = []
    for line in importlib.metadata.requires("smolcluster") or []:
        text, _, marker = (part.strip() for part in line.partition(";"))
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        if extra is not None and extra[1] not in extras:
            continue
        rest = re.sub(r"\s*(and\s+)?\(?extra\s*==\s*['\"][\w-]+['\"]\)?\s*", "", marker).strip()
        wanted.append(f"{text}; {rest}" if rest else text)
    return wanted


def requirements_key(wanted: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(wanted)).encode()).hexdigest()[:16]
