"""Parsers for the files of a run directory. No file is trusted: invalid contents are left out."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from smolcluster.config.describe import hide_credentials
from smolcluster.dashboard.downsample import finite, moment
from smolcluster.dashboard.follow import lstat, read_file
from smolcluster.observe.jsonl import json_object

MAX_LOGS = 256
MAX_TEXT = 120
_MAX_BRACKETS = 5000  # of a configuration
_SECRET = re.compile(r"(?:^|_)(?:token|secret|password|passphrase|(?:api|access|private|secret)_?key)$", re.IGNORECASE)
_ADDRESS = re.compile(r"[a-z0-9+.-]{1,20}://[^\s\"',]+", re.IGNORECASE)


def flat_config(raw: bytes) -> dict[str, str]:
    """Return `{"training.batch_size": "32", ...}` without secrets and passwords in addresses; empty for an invalid file."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if raw.count(b"[") + raw.count(b"{") > _MAX_BRACKETS:  # deep nesting makes the parser very slow
        return {}
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(raw, Loader=loader)):
            return {}  # smolcluster writes none, and a few lines of them can expand to gigabytes
        tree = yaml.load(raw, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    flat: dict[str, str] = {}
    _flatten(tree, "", flat)
    return flat


def _flatten(value: Any, name: str, flat: dict[str, str]) -> None:
    if len(flat) >= 2000:
        return
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else str(key), flat)
    elif name:
        hidden = _SECRET.search(name.rpartition(".")[2]) and value is not None
        text = "(hidden)" if hidden else value if isinstance(value, str) else json.dumps(value, default=str)
        flat[name] = _ADDRESS.sub(lambda address: hide_credentials(address[0]), text)[:1000]


def log_names(run_dir: Path) -> list[str]:
    """Return the names of the logs of a run: plain files, not links."""
    folder = run_dir / "logs"
    if folder.is_symlink():
        return []
    try:
        found = [e.name for e in os.scandir(folder) if e.name.endswith(".log") and e.is_file(follow_symlinks=False)]
    except OSError:
        return []
    return sorted(found)[:MAX_LOGS]


def process_of_log(name: str) -> tuple[str, int, str] | None:
    """Return (worker, 1, pi5) for `worker-rank1-pi5.log`. The rank of a server is not in the name: -1."""
    if found := re.fullmatch(r"worker-rank(\d{1,4})-(.+)\.log", name):
        return "worker", int(found[1]), found[2][:MAX_TEXT]
    if found := re.fullmatch(r"server-(.+)\.log", name):
        return "server", -1, found[1][:MAX_TEXT]
    return None


def list_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Return the last 100 checkpoints of a run, by step."""
    names: list[str] = []
    if not folder.is_symlink():
        with contextlib.suppress(OSError):
            names = sorted(entry.name for entry in os.scandir(folder) if _is_checkpoint(entry))[-100:]
    best = (read_file(folder / "best", max_bytes=256) or b"").decode(errors="replace").strip()
    found = []
    for name in names:
        manifest = json_object(read_file(folder / name / "manifest.json", max_bytes=4 << 20) or b"")
        if manifest is not None:
            stat = lstat(folder / name)
            saved = 0.0 if stat is None else stat.st_mtime
            found.append(checkpoint_of(name, manifest, saved=saved) | {"best": name == best})
    return found


def checkpoint_of(name: str, manifest: Mapping[str, Any], *, saved: float = 0.0) -> dict[str, Any]:
    """Describe a checkpoint. `saved`: its time, if the manifest has none."""
    files = manifest.get("files")
    sizes = [f.get("size") for f in files.values() if isinstance(f, dict)] if isinstance(files, dict) else []
    metrics, step = manifest.get("metrics"), int(name.rpartition("-")[2])
    return {
        "name": name,
        "step": step,
        "text": f"checkpoint of step {step}" + (", the best so far" if manifest.get("best") else ""),
        "time": parse_time(manifest.get("created")) or saved,
        "bytes": int(sum(filter(None, map(finite, sizes)))),
        "val_loss": finite(metrics.get("val_loss")) if isinstance(metrics, dict) else None,
    }


def parse_count(text: str) -> int | None:
    """Parse a number of workers or steps of a configuration."""
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else None


def _is_checkpoint(entry: os.DirEntry[str]) -> bool:
    return re.fullmatch(r"step-\d{1,12}", entry.name) is not None and entry.is_dir(follow_symlinks=False)


def parse_time(text: Any) -> float | None:
    """Return the seconds since 1970 of an ISO date."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return moment(datetime.datetime.fromisoformat(str(text)).timestamp())
    return None


def truncated(text: str) -> str:
    return text if len(text) <= 300 else text[:299] + "…"
