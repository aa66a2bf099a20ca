"""Turn the state of a reader into plain values for JSON: a snapshot, then changes.

    snapshot    the state, of bounded size: the first event of a viewer
    changes     the changed fields, new events, and of each curve the points from the first changed one on

A snapshot plus all later changes equals a later snapshot.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from smolcluster.dashboard.downsample import Curve, finite, moment, tidy
from smolcluster.dashboard.links import links_of, shape_of
from smolcluster.dashboard.ranks import RankRecord, state_of, waiting_s
from smolcluster.dashboard.run_curve import MAX_METRICS, task_metrics
from smolcluster.dashboard.run_files import MAX_TEXT, truncated
from smolcluster.dashboard.run_reader import RunEvent, RunReader
from smolcluster.observe.events import VAL_FIELDS
from smolcluster.observe.run_state import counts_own_steps, remaining_s

RATES_S = 5.0  # window of tokens per second
_PARTICIPATING = ("starting", "training", "silent", "finished", "stopped")
_ROW = ("loss", "step_time_s", "compute_s", "comm_s", "staleness", "tokens_per_s", "samples_per_s")

Row = dict[str, Any]


class SnapshotStream:
    """Snapshots and changes of one run. `changes` is relative to its last call, so it has one caller."""

    def __init__(self, run: RunReader) -> None:
        self.run = run
        self._sent: Row = {}
        self._sent_events = 0
        self._beginning = 0  # `run.beginnings` at the last `changes`

    def snapshot(self) -> Row:
        run = self.run
        return {
            "name": run.path.name,
            "time": round(run.now(), 2),
            **self._state(),
            "curves": {name: _plain_curve(curve, 0) for name, curve in self._curves()},
            "events": [_plain_event(event) for event in run.events_by_time()],
            "num_events": run.num_events,
        }

    def changes(self) -> Row | None:
        """Return the changes since the last call, or None. The first time, and when the run is read again from its start:
        a snapshot, marked as `whole`."""
        run, state = self.run, self._state()
        if self._beginning != run.beginnings:
            changed = self.snapshot() | {"whole": True}
        else:
            changed = {name: value for name, value in state.items() if self._sent.get(name) != value}
            if not self._has_news(changed):
                del changed["numbers"]
            if curves := {n: _plain_curve(c, c.changed) for n, c in self._curves() if c.changed < len(c.points)}:
                changed["curves"] = curves
            if fresh := run.num_events - self._sent_events:
                changed["events"] = [_plain_event(event) for event in list(run.events)[-fresh:]]
                changed["num_events"] = run.num_events
            if not changed:
                return None
            changed |= {"numbers": state["numbers"], "time": round(run.now(), 2)}
        self._beginning, self._sent, self._sent_events = run.beginnings, state, run.num_events
        for _, curve in self._curves():
            curve.forget_changes()
        return changed

    def _has_news(self, changed: Row) -> bool:
        """Return False if only times have changed: the page counts them itself."""
        if "numbers" not in changed:
            return True
        before: Row = self._sent.get("numbers", {})
        return any(before.get(k) != v for k, v in changed["numbers"].items() if k not in ("elapsed_s", "eta_s"))

    def _state(self) -> Row:
        """Return everything but curves and events. A field that changes is sent completely."""
        run = self.run
        machines = self.machines()
        shape, links = self.links(machines)
        return {
            "status": run.status(),
            "error": truncated(str(run.summary.get("error", ""))) if run.ended else "",
            "strategy": run.strategy,
            "numbers": self.numbers(machines),
            "machines": machines,
            "shape": shape,
            "links": links,
            "checkpoints": run.checkpoints,
            "config": run.config,
            "summary": plain_summary(run.summary) if run.ended else {},
            "log_bytes": run.log_bytes(),
            "reading": run.has_more,
        }

    def _curves(self) -> Iterator[tuple[str, Curve]]:
        run = self.run
        yield "joined", run.run_curve.curve
        yield "val", run.run_curve.val
        for name, curve in run.run_curve.metrics.items():
            yield f"val_{name}", curve
        yield "workers", run.workers.curve
        for rank, record in sorted(run.ranks.items()):
            if record.role != "server":
                yield f"rank{rank}", record.curve

    # Machines and links

    def machines(self) -> list[Row]:
        run = self.run
        status, error, ranks = run.status(), str(run.summary.get("error", "")), run.all_ranks()
        alone = not any(m.role != "server" and m.member == "joined" for m in ranks)
        rows = []
        for record in ranks:
            server = record.role == "server"
            state = state_of(
                record,
                status=status,
                age_s=run.age_s(record),
                log_interval=run.log_interval,
                alone=server and alone,
                named=is_named(record, error),
            )
            if status == "silent" and state in ("training", "starting"):
                state = "silent"
            rows.append(self._rank_row(record, state))
        return rows

    def _rank_row(self, record: RankRecord, state: str) -> Row:
        last, count, moving = record.last or {}, record.count(), state == "training"
        local = self.run.local_facts if record.host and record.host == self.run.host else {}
        facts = record.facts or local
        device = self.run.config.get("training.device", "null")
        finished = self.run.finished  # ends the open span
        return {
            "rank": record.rank,
            "role": record.role,
            "name": record.name,
            "host": record.host,
            "state": state,
            "reason": record.reason if state in ("lost", "evicted", "waiting") else "",
            "device": facts.get("device") or ("" if device == "null" else device),
            "facts": facts,
            "step": last.get("step"),
            "own_steps": record.role != "server" and counts_own_steps(self.run.strategy),
            **{name: tidy(finite(last.get(name))) for name in _ROW},
            "wait_s": tidy(waiting_s(last)),
            **{name: int(finite(last.get(name)) or 0) for name in ("stale_rejected", "skipped")},
            "sent": round(count.sent),
            "received": round(count.received),
            "sent_per_s": round(count.sent_per_s) if moving else 0,
            "received_per_s": round(count.received_per_s) if moving else 0,
            "losses": record.losses,
            "last_seen": _rounded(last.get("time")),
            "spans": [[_rounded(start), _rounded(end if end is not None else finished)] for start, end in record.spans],
        }

    def links(self, machines: list[Row]) -> tuple[str, list[Row]]:
        """Return the shape of the network and its links. Links of ranks that do not train have no rate."""
        run = self.run
        server = next((row["rank"] for row in machines if row["role"] == "server"), None)
        workers = [row["rank"] for row in machines if row["role"] != "server"]
        shape = shape_of(run.strategy, served=server is not None, num_workers=len(workers))
        if shape != "star":  # a ring is formed without lost members
            workers = [r["rank"] for r in machines if r["role"] != "server" and r["state"] in _PARTICIPATING]
        moving = {row["rank"] for row in machines if row["state"] == "training"}
        counts = {rank: record.count() for rank, record in run.ranks.items()}
        rows = []
        for link in links_of(shape, counts, workers=workers, server=server):
            moves = bool(moving) and {link.source, link.target} - {server} <= moving
            per_s = round(link.per_s) if moves else 0
            rows.append(dataclasses.asdict(link) | {"bytes": round(link.bytes), "per_s": per_s})
        return shape, rows

    # Numbers

    def numbers(self, machines: list[Row]) -> Row:
        run, joined = self.run, self.run.run_curve
        status = run.status()
        counted = [row for row in machines if (row["role"] == "server") == joined.served]
        split = run.workers.latest
        return {
            "step": max((row["step"] for row in counted if row["step"] is not None), default=None),
            "steps": run.total_steps,
            # Not rounded: the console and the list of runs show the same numbers.
            **{name: finite(joined.last.get(name)) for name in ("loss", "lr", "grad_norm")},
            **{name: finite(joined.last_val.get(name)) for name in VAL_FIELDS},
            "metrics": _extra(joined.last_val),
            "best_val_loss": min((p.lowest for p in joined.val.points if p.lowest is not None), default=None),
            **{name: tidy(value) for name, value in self._rates().items()},
            **{name: tidy(split.get(name)) for name in ("step_time_s", "compute_s", "comm_s", "wait_s", "staleness")},
            "stale_rejected": sum(row["stale_rejected"] for row in counted),
            "skipped": max((row["skipped"] for row in counted), default=0),  # all ranks skip the same steps
            "bytes_per_s": sum(row["sent_per_s"] for row in machines),  # received bytes are the same bytes
            "bytes": self._bytes(machines),
            "started": _rounded(run.first_time),
            "elapsed_s": self._elapsed_s(),
            "eta_s": tidy(self._eta_s()) if status == "training" else None,
        }

    def _bytes(self, machines: list[Row]) -> int:
        """Return the bytes sent. The summary includes bytes after the last rows; the rows include bytes before a restart."""
        counted = (finite(self.run.summary.get("bytes_sent")) if self.run.ended else None) or 0.0
        sent: int = sum(row["sent"] for row in machines)
        return max(round(counted), sent)

    def _elapsed_s(self) -> float | None:
        """Return the duration of the run; once it has ended, the one in its summary, which console and list show too."""
        run = self.run
        if run.ended and (wall_s := finite(run.summary.get("wall_s"))) is not None:
            return round(max(0.0, wall_s), 1)
        if run.status() == "training":
            end: float | None = run.now()
        else:
            end = moment(run.summary.get("finished")) if run.ended else run.last_row_time
        return None if run.started is None or end is None else round(max(0.0, end - run.started), 1)

    def _rates(self) -> dict[str, float | None]:
        """Return tokens and samples per second of the last few rows; once the run has ended, its mean rates."""
        names, recent = ("tokens_per_s", "samples_per_s"), self.run.run_curve.recent
        if self.run.ended:
            return {name: finite(self.run.summary.get(name)) for name in names}
        newest = max((row["time"] for row in recent), default=0.0)
        rows = [row for row in recent if row["time"] > newest - RATES_S]
        found = {name: [value for row in rows if (value := finite(row.get(name))) is not None] for name in names}
        return {name: statistics.fmean(values) if values else None for name, values in found.items()}

    def _eta_s(self) -> float | None:
        """Return the ETA of the slowest rank, as on the console."""
        run, etas = self.run, []
        for record in run.ranks.values():
            if (record.role == "server") == run.run_curve.served and record.first and record.last:
                first, last = ((row["step"], row["time"]) for row in (record.first, record.last))
                step_s = finite(record.last.get("step_time_s")) or 0.0
                etas.append(remaining_s(run.total_steps, first=first, last=last, step_s=step_s))
        return max((eta for eta in etas if eta is not None), default=None)


def is_named(record: RankRecord, error: str) -> bool:
    """Return whether the error of a run names this rank: `worker rank 1 failed: killed by SIGKILL`."""
    if record.role == "server":
        return "the server" in error
    return re.search(rf"\b(?:worker|rank) {record.rank}\b", error) is not None


def plain_summary(summary: Mapping[str, Any]) -> Row:
    """Return the summary with numbers unchanged and other values as short text."""
    return {str(name)[:MAX_TEXT]: _plain(value) for name, value in list(summary.items())[:100]}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool) or (isinstance(value, int | float) and finite(value) is not None):
        return value
    return truncated(value if isinstance(value, str) else json.dumps(value, default=str))


def _plain_curve(curve: Curve, start: int) -> Row:
    return {"from": start, "stride": curve.stride, "rows": curve.num_rows, "columns": curve.columns(start)}


def _plain_event(event: RunEvent) -> Row:
    fields = dataclasses.asdict(event) | {"time": _rounded(event.time)}
    return {name: value for name, value in fields.items() if value is not None}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _extra(row: Row) -> dict[str, float | None]:
    """Return the metrics of an evaluation that only this task has, by name."""
    return {name.removeprefix("val_"): finite(row[name]) for name in task_metrics(row)[:MAX_METRICS]}
