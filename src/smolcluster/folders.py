"""This user's folders for our files, by the conventions of each system."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

_XDG = {"cache": ".cache", "config": ".config", "data": ".local/share", "state": ".local/state"}
_MACOS = {"cache": "Caches", "data": "Application Support"}


def user_folder(kind: Literal["cache", "config", "data", "state"], environ: Mapping[str, str] = os.environ) -> Path:
    """Return this package's folder below the user's."""
    if sys.platform == "win32":
        variable, default = ("APPDATA", "Roaming") if kind == "config" else ("LOCALAPPDATA", "Local")
        base = environ.get(variable) or Path.home() / "AppData" / default
    elif sys.platform == "darwin" and kind in _MACOS:
        base = Path.home() / "Library" / _MACOS[kind]
    else:
        base = environ.get(f"XDG_{kind.upper()}_HOME") or Path.home() / _XDG[kind]
    return Path(base, "smolcluster")
