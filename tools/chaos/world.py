"""Run a world with the faults of a plan."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.network import Network
from tests.faults.elastic_history import instance_of
from tests.world import ElasticWorld, Who, run_elastic_world

from smolcluster.comm.elastic.transport.security import new_token
from tools.chaos.plan import BATCH, LEAVE_S, METHODS, PACE_S, RESTART_S, SLOW_RATE, Fault, Plan, Victim


class Chaos:
    """Runs the faults of a plan against a world."""

    def __init__(self, plan: Plan, network: Network | None) -> None:
        self.plan, self.network = plan, network
        self.victims: list[Victim] = []

    def script(self, world: ElasticWorld) -> None:
        world.wait_for_step(1, timeout_s=120.0)
        began = time.monotonic()
        for fault in self.plan.faults:
            if not self._rest(world, until=began + fault.at_s):
                break
            self._commit(world, fault)
        # As a launcher does: kill workers that have not left after the server ended.
        self._rest(world, until=began + 10 * self.plan.steps)
        for rank in range(self.plan.workers):
            with contextlib.suppress(AssertionError):
                world.wait_for_exit(rank, timeout_s=LEAVE_S)
            if world.alive(rank):
                world.kill(rank)

    def _commit(self, world: ElasticWorld, fault: Fault) -> None:
        who, kind = fault.worker, fault.kind
        victim = Victim(fault, time.time(), "" if kind == "server" else instance_of(world, who))
        self.victims.append(victim)
        if kind == "server":
            world.restart("server")
        elif kind == "kill":
            world.kill(who)
            if self._rest(world, until=time.monotonic() + RESTART_S):
                world.start(who)
        elif kind == "join":
            world.ask_to_stop(who)
            world.wait_for_exit(who)
            if self._rest(world, until=time.monotonic() + RESTART_S):
                world.start(who)
        else:
            self._away(world, victim)

    def _away(self, world: ElasticWorld, victim: Victim) -> None:
        who, kind = victim.fault.worker, victim.fault.kind
        if kind == "freeze":
            world.freeze(who)
        else:
            self._spoil_link(who + 1, kind, mend=False)
        self._rest(world, until=time.monotonic() + victim.fault.lasts_s)
        if kind == "freeze":
            world.thaw(who)
        else:
            self._spoil_link(who + 1, kind, mend=True)
        victim.away.append((who, victim.time, time.time()))

    def _spoil_link(self, host: int, kind: str, *, mend: bool) -> None:
        """Break the link of a worker's host, or mend it. Host 0 is the server's."""
        network = self.network
        assert network is not None
        if kind == "cut":
            (network.mend if mend else network.cut)(host)
        elif kind == "slow" and mend:
            network.mend_rate(host)
        elif kind == "slow":
            network.slow(host, SLOW_RATE)
        else:
            for other in range(1, network.count):
                if other != host:
                    change = network.unblock if mend else network.block
                    change(host, other)
                    if kind == "partial":
                        change(other, host)

    @staticmethod
    def _rest(world: ElasticWorld, *, until: float) -> bool:
        """Wait until that time. Return False when the run has ended before."""
        left = until - time.monotonic()
        with contextlib.suppress(AssertionError):
            world.wait(lambda: not world.alive("server"), what="the end", timeout_s=max(0.0, left))
        return world.alive("server")


def run(
    strategy: str,
    run_dir: Path,
    *,
    workers: int,
    steps: int,
    staleness_bound: int,
    network: Network | None,
    chaos: Chaos | None = None,
) -> ElasticWorld:
    shape = {"model_dim": 32, "num_layers": 2, "num_heads": 2, "max_seq_len": 32, "ff_dim": 64}
    config: dict[str, Any] = {f"model.{key}": value for key, value in shape.items()}
    config |= {
        "training.steps": steps,
        "training.batch_size": BATCH,
        "training.learning_rate": 0.003,
        "training.eval_steps": 0,
        "training.eval_samples": None,  # all: on a part of them clean runs differ by more than the margin
        "training.checkpoint_steps": 0,
        "training.seed": 1,
        "cluster.plane": "elastic",
    }
    method = METHODS[strategy]
    config |= method.options
    if strategy == "allreduce":
        config["strategy.staleness_bound"] = staleness_bound
    places: dict[Who, tuple[str, str]] = {}
    if network is not None:
        seats: list[Who] = ["server", *range(workers)]
        places = {who: (network.namespace(host), network.address(host)) for host, who in enumerate(seats)}
    return run_elastic_world(
        workers,
        run_dir,
        config,
        task="Paced",
        strategy=method.strategy,
        script=chaos.script if chaos is not None else None,
        environ={"PACE_S": str(PACE_S), "SMOLCLUSTER_TOKEN": new_token()},
        places=places,
        patient=False,
        timeout_s=120.0 + 10 * steps * PACE_S,
    )
