"""summary.json: the results of a run. Nothing here imports torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smolcluster.durable_files import durable_write_text
from smolcluster.observe.events import plain

FIELDS = (
    *("status", "strategy", "workers", "world_size", "steps", "samples", "tokens", "wall_s", "tokens_per_s"),
    *("train_loss", "val_loss", "val_accuracy", "bytes_sent", "bytes_received"),
    *("staleness_mean", "staleness_max", "stale_rejected", "skipped", "restarts", "members_lost", "members_joined"),
    *("peak_memory_bytes", "weights_sha256", "checkpoint"),
)


def join_ranks(ranks: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Join the reports of all ranks: counts are summed, the loss is weighted by samples."""
    steps = sum(r["own_steps"] for r in ranks)
    with_loss = [r for r in ranks if r["own_steps"]]
    weight = sum(r["batch_samples"] for r in with_loss)
    busy_s = max(r["busy_s"] for r in ranks)
    summary: dict[str, Any] = dict.fromkeys(FIELDS)
    totals = ("samples", "tokens", "bytes_sent", "bytes_received", "stale_rejected")
    summary |= {name: sum(r[name] for r in ranks) for name in totals}
    most = ("staleness_max", "skipped", "peak_memory_bytes")  # all ranks skip the same steps
    summary |= {name: max(r[name] for r in ranks) for name in most}
    summary |= {
        "workers": sum(r["role"] == "worker" for r in ranks),
        "world_size": len(ranks),
        "steps": max(r["step"] for r in ranks),
        "tokens_per_s": sum(r["own_tokens"] for r in ranks) / busy_s if busy_s else 0.0,
        "samples_per_s": sum(r["own_samples"] for r in ranks) / busy_s if busy_s else 0.0,
        "train_loss": sum(r["loss"] * r["batch_samples"] for r in with_loss) / weight if weight else None,
        "staleness_mean": sum(r["staleness_sum"] for r in ranks) / steps if steps else 0.0,
        "restarts": 0,
        "members_lost": 0,
        "members_joined": 0,
        "finished": time.time(),
    }
    return summary | fields


def evaluation_summary(evaluation: Mapping[str, float]) -> dict[str, float | None]:
    """Return the metrics of the last evaluation, with None for missing common ones."""
    return {**dict.fromkeys(("val_loss", "val_accuracy", "val_ppl")), **evaluation}


def last_known(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers that were logged at the last step, for processes that took no step themselves."""
    end = max((row["step"] for row in rows), default=None)
    last = list({row["rank"]: row for row in rows if row["step"] == end}.values())
    samples = sum(row["samples"] for row in last)
    return {
        "train_loss": sum(row["loss"] * row["samples"] for row in last) / samples if samples else None,
        "tokens_per_s": sum(row["tokens_per_s"] for row in last) if last else None,
        "samples_per_s": sum(row["samples_per_s"] for row in last) if last else None,
    }


def failed_summary(
    *,
    strategy: str,
    world_size: int,
    last_row: Mapping[str, Any] | None,
    evaluation: Mapping[str, float],
    **fields: Any,
) -> dict[str, Any]:
    """Return the summary of a run that failed: the last logged row, joined over ranks, and the last evaluation."""
    row = last_row or {}
    summary: dict[str, Any] = dict.fromkeys(FIELDS)
    counted = ("samples", "tokens", "bytes_sent", "bytes_received", "staleness_max", "stale_rejected", "skipped")
    summary |= {name: row.get(name, 0) for name in counted}
    summary |= dict.fromkeys(("staleness_mean", "restarts", "members_joined"), 0)
    summary |= {
        "status": "failed",
        "strategy": strategy,
        "workers": world_size,
        "world_size": world_size,
        "steps": row.get("step", 0),
        "train_loss": row.get("loss"),
        "tokens_per_s": row.get("tokens_per_s"),
        "samples_per_s": row.get("samples_per_s"),
        "members_lost": 1,
        "finished": time.time(),
    }
    return summary | evaluation_summary(evaluation) | fields


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    durable_write_text(path, json.dumps(plain(summary), indent=2, allow_nan=False) + "\n")
