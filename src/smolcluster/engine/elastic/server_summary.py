"""The end of a server's run: its summary, and whether all replicas hold the same weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from smolcluster.comm.elastic.membership.roster import Member, Roster
from smolcluster.config.options import Options
from smolcluster.engine.checkpoint.safetensors_writer import weights_sha256
from smolcluster.engine.summary import evaluation_summary, join_ranks
from smolcluster.strategies.base import Strategy

log = logging.getLogger(__name__)


def server_summary(
    strategy: Strategy[Options],
    roster: Roster,
    *,
    report: dict[str, Any],
    evaluation: Mapping[str, float],
    workers: int,
    **fields: Any,
) -> dict[str, Any]:
    """Return the summary of a run. `report`: of this process; traffic is summed over it and the workers that stayed."""
    reports = (report, *roster.reports)
    traffic = {
        name: sum(value for each in reports if isinstance(value := each.get(name), int))
        for name in ("bytes_sent", "bytes_received")
    }
    return join_ranks(
        [report],
        strategy=strategy.context.config.strategy.name,
        workers=workers,
        world_size=workers + 1,
        **traffic,
        refused=dict(roster.refused),
        clipped=dict(roster.clipped),
        members_lost=roster.lost,
        members_joined=roster.joined,
        **evaluation_summary(evaluation),
        weights_sha256=weights_sha256(strategy.state().weights),
        **fields,
    )


def replicas_agree(strategy: Strategy[Options], members: Sequence[Member]) -> bool:
    """Return whether the members that reported a hash of their weights have those of this process."""
    ours = replica_sha256(strategy)
    reported = {m.name: m.report["weights_sha256"] for m in members if m.report.get("weights_sha256")}
    different = sorted(name for name, theirs in reported.items() if theirs != ours)
    if different:
        log.error(
            "the replicas differ at the end: %s, and the run's weights are %s; machines of different kinds may round "
            "differently, but those of one kind must agree: please report it",
            ", ".join(f"{name} has {str(reported[name])[:16]}" for name in different),
            ours[:16],
        )
    return not different


def replica_sha256(strategy: Strategy[Options]) -> str:
    """Hash the weights that all replicas share: not the buffers, since each worker has its own running means."""
    own = {name for name, _ in strategy.replica.model.named_buffers()}
    return weights_sha256({n: t.cpu() for n, t in strategy.state().weights.items() if n not in own})
