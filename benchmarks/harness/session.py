"""One run of one benchmark: what it measured, printed as it is made, and its JSON file with all raw samples."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.comparison import Comparison, Measured, aligned, measure, table


def machine() -> dict[str, Any]:
    """Return what the figures depend on: no host names, no paths."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "gpu": _gpu_model(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _gpu_model() -> str | None:
    """Return the name of the first GPU; None if there is none, or if this benchmark has not imported torch."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name(0)) if torch is not None and torch.cuda.is_available() else None


class Session:
    """Prints comparisons and tables as they are made; writes them together."""

    def __init__(self, name: str, *, repeats: int, quick: bool = False) -> None:
        self.name, self.repeats, self.quick = name, repeats, quick
        self.results: list[Measured] = []
        self.parameters: dict[str, Any] = {}
        self.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def compare(self, comparison: Comparison) -> Measured:
        measured = measure(comparison, repeats=self.repeats)
        self.results.append(measured)
        print(table(measured, repeats=self.repeats), flush=True)
        return measured

    def show(self, title: str, rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> None:
        """Print these columns of figures that are not times (bytes, losses), and keep all of the rows."""
        self.parameters.setdefault("tables", {})[title] = [dict(row) for row in rows]
        head = list(columns)
        cells = [[_text(row.get(column)) for column in head] for row in rows]
        print("\n".join([title, *aligned([head, *cells]), ""]), flush=True)

    def conclude(self, target: str, missed: Sequence[str]) -> None:
        print(f"target, {target}: {'missed by ' + ', '.join(missed) if missed else 'met by all'}\n", flush=True)

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "date": self.date,
            "quick": self.quick,
            "repeats": self.repeats,
            "machine": machine(),
            "parameters": self.parameters,
            "comparisons": [measured.to_dict() for measured in self.results],
        }

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return path


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)
