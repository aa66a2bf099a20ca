"""Checksummed downloads with the standard library only.

Mirrors are tried in order. A file is hashed while it is read, written to a temporary file, and renamed if the checksum matches.
"""

from __future__ import annotations

import hashlib
import http.client
import shutil
import ssl
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from smolcluster.data.cache import Progress, remove_abandoned
from smolcluster.durable_files import atomic_write
from smolcluster.errors import UserError
from smolcluster.locks import run_once

BLOCK_BYTES = 256 * 1024
MAX_BYTES = 2 * 1024**3
TIMEOUT_S = 30.0


class _BadMirror(Exception):
    """A mirror's response is invalid."""


# Errors of a mirror, after which the next one is tried. Other OSErrors are local, such as a full disk.
NETWORK_ERRORS = (
    _BadMirror,
    urllib.error.URLError,
    http.client.HTTPException,
    TimeoutError,
    ConnectionError,
    ssl.SSLError,
)


def fetch(
    urls: Sequence[str],
    target: Path,
    *,
    sha256: str,
    progress: Progress | None = None,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """Download `target` unless it is there with this checksum."""

    def ready() -> Path | None:
        if not target.is_file():
            return None
        with target.open("rb") as file:
            return target if hashlib.file_digest(file, "sha256").hexdigest() == sha256 else None

    def download() -> Path:
        remove_abandoned(target.parent)
        reasons = []
        for url in urls:
            try:
                _fetch_one(url, target, sha256=sha256, progress=progress, max_bytes=max_bytes)
                return target
            except NETWORK_ERRORS as error:
                reasons.append(f"  {url}: {error or type(error).__name__}")
        listed = "\n".join(reasons)
        raise UserError(
            f"could not download {target.name}:\n{listed}\n"
            f"Put the file (sha256 {sha256}) at {target} yourself, or name a folder that has it as data.root, then start again."
        )

    try:
        return run_once(target.with_name(target.name + ".lock"), ready=ready, produce=download)
    except OSError as error:
        raise UserError(
            f"cannot write {target}: {error}; set data.root or data.cache_dir to a writable folder"
        ) from error


def _fetch_one(url: str, target: Path, *, sha256: str, progress: Progress | None, max_bytes: int) -> None:
    report = progress or (lambda *_: None)
    request = urllib.request.Request(url, headers={"User-Agent": "smolcluster"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response, atomic_write(target) as file:
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdigit() else None
        digest, done = hashlib.sha256(), 0
        while block := response.read(BLOCK_BYTES):
            done += len(block)
            if done > max_bytes:
                raise _BadMirror(f"sends more than {max_bytes} bytes")
            digest.update(block)
            file.write(block)
            if done != total:
                report(target.name, done, total)
        # An exception here removes the temporary file.
        if total is not None and done != total:
            raise _BadMirror(f"ended after {done} of {total} bytes")
        if digest.hexdigest() != sha256:
            raise _BadMirror(f"has the checksum {digest.hexdigest()}, not {sha256}")
    report(target.name, done, done)


@dataclass(frozen=True)
class Archive:
    """A zip file with a known checksum, and the members to extract."""

    urls: tuple[str, ...]
    sha256: str
    members: tuple[str, ...]

    @property
    def filename(self) -> str:
        return self.urls[0].rsplit("/", 1)[-1]


def fetch_members(archive: Archive, folder: Path, *, progress: Progress | None = None) -> list[Path]:
    """Download and extract the members into `folder`, without the archive's folders, unless they are there."""
    files = [folder / member.rsplit("/", 1)[-1] for member in archive.members]

    def ready() -> list[Path] | None:
        return files if all(f.is_file() for f in files) else None

    def unpack() -> list[Path]:
        put_by_user = (folder / archive.filename).is_file()
        downloaded = fetch(archive.urls, folder / archive.filename, sha256=archive.sha256, progress=progress)
        with zipfile.ZipFile(downloaded) as opened:
            for member, file in zip(archive.members, files, strict=True):
                with opened.open(member) as packed, atomic_write(file) as unpacked:
                    shutil.copyfileobj(packed, unpacked, BLOCK_BYTES)
        if not put_by_user:
            downloaded.unlink()
        return files

    try:
        return run_once(folder / (archive.filename + ".unpack.lock"), ready=ready, produce=unpack)
    except OSError as error:
        raise UserError(
            f"cannot unpack {archive.filename} in {folder}: {error}; "
            "set data.root or data.cache_dir to a writable folder"
        ) from error


def missing_files(what: str, folder: Path, names: Iterable[str]) -> UserError:
    """Return the error for missing files that may not be downloaded."""
    return UserError(
        f"{what} is not in {folder} (looked for {', '.join(names)}) and data.download is false: put the files there, "
        "set data.root to their folder, or set data.download=true"
    )
