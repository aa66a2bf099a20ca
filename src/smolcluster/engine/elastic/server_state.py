"""The state of a server that its journal and its checkpoints hold: as metadata of records and snapshots, and restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smolcluster.config.options import Options
from smolcluster.data.leases import Leases
from smolcluster.engine.elastic.server_side import ServerSide
from smolcluster.engine.elastic.wal.log_files import JournalRecord
from smolcluster.engine.record import RunRecord
from smolcluster.strategies.base import Commit, State, Strategy


class ServerState:
    def __init__(
        self,
        strategy: Strategy[Options],
        server_side: ServerSide,
        record: RunRecord,
    ) -> None:
        self._strategy, self._server_side, self._record = strategy, server_side, record
        self._context = server_side.server_context

    def snapshot_meta(self, step: int, numbers: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Return the metadata of a journal snapshot: what `restore` reads."""
        context = self._context
        return {
            "strategy": self._strategy.context.config.strategy.name,
            "numbers": numbers,
            "step": step,
            "samples": self._record.samples,
            "tokens": self._record.tokens,
            "epoch": context.roster.epoch,
            "leases": context.leases.state_dict(),
            "recent": {str(step): list(value) for step, value in context.recent.items()},
            "established": list(context.established),
            "counted": context.counted,
            **self._common_meta(),
            **self._record.best.state_dict(),
            **fields,
        }

    def record_meta(self, commit: Commit, line: dict[str, Any]) -> dict[str, Any]:
        """Return the metadata of a committed step: what `replay` reads."""
        return {"line": line, **commit.numbers, **self._common_meta()}

    def restore(self, state: State | None, meta: Mapping[str, Any]) -> int:
        """Load the state of a snapshot; return its step."""
        if state is not None:
            self._strategy.load_state(state)
            self._server_side.load_shared(state.shared)
        self._record.samples, self._record.tokens = int(meta["samples"]), int(meta["tokens"])
        self._context.roster.epoch = int(meta["epoch"])
        self._context.leases = Leases.from_state(meta["leases"])
        self._restore_common(meta)
        self._record.best.load_state_dict(meta)
        return int(meta["step"])

    def replay(self, record: JournalRecord) -> int:
        """Apply a committed step again; return its number."""
        meta, line = record.meta, record.meta["line"]
        contributors, step = line["contributors"], int(line["step"])
        self._server_side.replay(
            Commit(step=step, contributors=contributors, gradient=record.payload, numbers=dict(meta))
        )
        samples = sum(int(c["samples"]) for c in contributors)
        self._record.samples += samples
        self._record.tokens += samples * self._server_side.tokens_per_sample
        self._context.roster.epoch = max(self._context.roster.epoch, int(line["epoch"]))
        self._context.leases = Leases.from_state(line["data"])
        self._restore_common(meta)
        return step

    def set_agreement(self, meta: Mapping[str, Any]) -> None:
        """Load the last commits, the members of their view, and the last counted step of each rank."""
        self._context.recent = {int(step): tuple(value) for step, value in meta.get("recent", {}).items()}
        self._context.established = meta.get("established", [])
        self._context.counted = meta.get("counted", {})

    def _common_meta(self) -> dict[str, Any]:
        roster = self._context.roster
        return {
            "members": {"joined": roster.joined, "lost": roster.lost},
            "loss_scale": self._context.scale.state_dict(),
        }

    def _restore_common(self, meta: Mapping[str, Any]) -> None:
        self.set_agreement(meta)
        if "loss_scale" in meta:
            self._context.scale.load_state_dict(meta["loss_scale"])
        members, roster = meta.get("members", {}), self._context.roster
        roster.joined, roster.lost = int(members.get("joined", 0)), int(members.get("lost", 0))
