"""Token files on disk: built once, then memory-mapped by every process that reads them.

    <cache>/tokens/<key>.bin    the tokens, raw little-endian integers
    <cache>/tokens/<key>.json   the sidecar: format, dtype, count, vocabulary, tokenizer, source, hash of the head

The key is a hash of the source's content, the tokenizer and the format version, so a changed text or tokenizer gets a
new file. Both files are written to temporary files and renamed, the sidecar last: a matching sidecar means that the file is
complete. A file that does not match its sidecar (truncated by a full disk, say) is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from smolcluster.durable_files import atomic_write
from smolcluster.errors import UserError
from smolcluster.folders import user_folder
from smolcluster.locks import run_once

FORMAT_VERSION = 1
HEAD_BYTES = 65536
ABANDONED_S = 24 * 3600.0
Tokens = npt.NDArray[Any]
Progress = Callable[[str, int, int | None], None]
"""Called with (name, done, total); total is None if unknown, and done == total at the end."""


class Encoder(Protocol):
    """The part of a tokenizer that the cache uses."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...

    def encode(self, text: str) -> Tokens: ...


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return `data.cache_dir`, else $SMOLCLUSTER_CACHE, else the platform's cache folder."""
    chosen = cache_dir or os.environ.get("SMOLCLUSTER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return user_folder("cache") / ("cache" if sys.platform == "win32" else "")


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files of killed processes: those not written to for a day."""
    for path in folder.glob("*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()
        except OSError:
            pass  # removed by another process, or still open there


def cached_tokens(
    root: Path,
    *,
    source_hash: str,
    tokenizer: Encoder,
    chunks: Callable[[], Iterable[str]],
) -> Tokens:
    """Return the tokens of a text, from the cache or built now. One process builds while others wait."""
    key = hashlib.sha256(json.dumps([FORMAT_VERSION, source_hash, tokenizer.fingerprint]).encode()).hexdigest()[:32]
    path = root / "tokens" / f"{key}.bin"

    def build() -> Tokens:
        remove_abandoned(path.parent)
        facts = {"source": source_hash, "tokenizer": tokenizer.fingerprint, "tokenizer_name": tokenizer.name}
        _write(path, tokenizer=tokenizer, chunks=chunks(), facts=facts)
        tokens = _read(path)
        if tokens is None:
            raise UserError(
                f"the token file {path} does not read back as written; check the disk, or set data.cache_dir"
            )
        return tokens

    try:
        return run_once(path.with_suffix(".lock"), ready=lambda: _read(path), produce=build)
    except OSError as error:
        raise UserError(
            f"cannot write the token cache in {path.parent}: {error}; "
            "set data.cache_dir or SMOLCLUSTER_CACHE to a writable folder"
        ) from error


def _write(path: Path, *, tokenizer: Encoder, chunks: Iterable[str], facts: dict[str, Any]) -> None:
    dtype = np.dtype(tokenizer.dtype).newbyteorder("<")
    count, head = 0, b""
    try:
        with atomic_write(path) as file:
            for text in chunks:
                raw = tokenizer.encode(text).astype(dtype, copy=False).tobytes()
                head += raw[: HEAD_BYTES - len(head)]
                file.write(raw)
                count += len(raw) // dtype.itemsize
        sidecar = {
            "format": FORMAT_VERSION,
            "dtype": dtype.str,
            "count": count,
            "vocab_size": tokenizer.vocab_size,
            "head_sha256": hashlib.sha256(head).hexdigest(),
            **facts,
        }
        with atomic_write(path.with_suffix(".json")) as file:
            file.write(json.dumps(sidecar, indent=1).encode())
    except PermissionError:
        # Windows does not replace a file that another process has mapped. It is fine if it is valid.
        if _read(path) is None:
            raise


def _read(path: Path) -> Tokens | None:
    """Map the tokens, or return None if the file is missing, truncated or does not match its sidecar."""
    try:
        sidecar = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        dtype, count = np.dtype(sidecar["dtype"]), int(sidecar["count"])
        if sidecar["format"] != FORMAT_VERSION or path.stat().st_size != count * dtype.itemsize:
            return None
        with path.open("rb") as file:
            if hashlib.sha256(file.read(HEAD_BYTES)).hexdigest() != sidecar["head_sha256"]:
                return None
        # An empty file cannot be mapped.
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype=dtype)
    except (OSError, ValueError, KeyError, TypeError):
        return None
