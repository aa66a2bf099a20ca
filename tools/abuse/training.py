"""Runs that train, compared with a run without attacks.

run                  workers   listening sockets
syncps               1         the server's
allreduce            2         the coordinator's, and one of each worker for the other
syncps-token, allreduce-token: the same behind TLS
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.faults.elastic_history import changes, lines_of
from tests.world import ElasticWorld, Who, run_elastic_world

from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.elastic.transport.security import Keyring, new_token
from smolcluster.engine.elastic import history
from tools.abuse.doors import Door, listening_ports
from tools.abuse.elastic import Abuse, Speech, harm
from tools.abuse.report import QUIET_S, Report, besiege, hold_times

RUNS = {"syncps": 1, "allreduce": 2, "syncps-token": 1, "allreduce-token": 2}  # workers
PACE_S = 0.02  # the least duration of a step
PARAMETERS = 1010  # of tests.tasks.Tiny: for a gradient of the right size
LARGE = {"count": 0, "meta": {"a": "x" * 500_000}}


def speech(canary: Path) -> Speech:
    """Return messages as the strategies send them."""
    push = Message(
        kind=Kind.PUSH, step=3, epoch=2, meta={"samples": 4, "loss": "0.1"}, payload=torch.ones(4 * PARAMETERS).byte()
    )
    done = {"mine": "0.1", "held": "0.2", "loss": "0.3", "compute_s": 0.1, "apply_s": 0.1}
    state = {"count": 1, "meta": {"epoch": 3, "numbers": {}}}
    command = harm(canary)
    honest = [
        Message(kind=Kind.BEAT),
        Message(kind=Kind.ASK),
        Message(kind=Kind.JOIN, meta={"batch_size": 4, "samples": 256, "layout": [["0.weight", "float32", [24, 12]]]}),
        Message(kind=Kind.EVENT, meta={"event": '{"event":"step"}', "x": "x" * 3000}),
        Message(kind=Kind.EVENT, meta={"event": command.decode(), "__reduce__": ["os.system", f"touch {canary}"]}),
        Message(kind=Kind.REPORT, meta={"bytes_sent": 2**63, "weights_sha256": "0" * 64}),
        push,
        Message(kind=Kind.DONE, step=4, epoch=3, meta=done),
        Message(kind=Kind.SUSPECT, epoch=3, meta={"rank": 1, "reason": "x"}),
        Message(kind=Kind.STATE, meta=state),
        Message(kind=Kind.STATE, payload=torch.frombuffer(bytearray(command), dtype=torch.uint8)),
        Message(kind=Kind.CHUNK, step=1, epoch=2, payload=torch.ones(900)),
        Message(kind=Kind.VIEW, epoch=99, meta={"view": {"epoch": 99, "step": 0, "members": []}}),
        Message(kind=Kind.STOP),
    ]
    return Speech(
        honest=honest,
        large=push,
        written=(Kind.EVENT, Kind.JOIN, Kind.STATE, Kind.ASK),
        tensors=(Kind.PUSH, Kind.STATE, Kind.CHUNK),
        hoards=(
            lambda n: Message(kind=Kind.CHUNK, epoch=2**32 - 1, step=n, payload=torch.zeros(100_000)),
            lambda _: Message(kind=Kind.STATE, meta=LARGE),
            lambda _: Message(kind=Kind.ASK),
        ),
    )


def attack(
    run: str,
    folder: Path,
    *,
    attacks: Sequence[str],
    frames_each: int,
    seed: int,
    quiet_s: float = QUIET_S,
    patient: bool = False,
) -> Report:
    """Attack a run that trains.

    `frames_each`: damaged frames at each listening socket. `quiet_s`: between attacks, for comparison. `patient`: see
    `run_elastic_world`; by default members are evicted after the product's own time limits.
    """
    strategy, _, behind_tls = run.partition("-")
    token = new_token() if behind_tls else ""
    keyring = Keyring([token]) if token else None
    report, canary = Report(run), folder / f"{run}-canary"
    abuse = Abuse(canary, speech(canary))
    quiet: list[tuple[float, float]] = []

    def script(world: ElasticWorld) -> None:
        seats: list[Who] = ["server", *range(RUNS[run])]
        world.wait_for_step(20, timeout_s=120.0)
        targets = [(abuse, door) for who in seats for door in _doors(world, who, keyring)]
        pids = {str(who): _pid(world, who) for who in seats}
        quiet.extend(
            besiege(report, targets, pids, attacks=attacks, frames_each=frames_each, seed=seed, quiet_s=quiet_s)
        )
        if not all(world.alive(who) for who in seats):
            report.wrong.append(world.story()[-2000:])
        world.ask_to_stop()

    world = _run(run, folder / run, token=token, steps=10**8, script=script, pace_s=PACE_S, patient=patient)
    if world.server.failed is not None:
        report.wrong.append(f"the server failed: {world.server.failed.message}\n{world.server.failed.traceback}")
        return report
    report.steps = int(world.summary["steps"])
    calm = _run(run, folder / f"{run}-calm", token=token, steps=report.steps, patient=patient)
    _judge(report, world, calm, strategy)
    hold_times(report, [row.time for row in world.server.rows()], quiet, what="training")
    return report


def _judge(report: Report, world: ElasticWorld, calm: ElasticWorld, strategy: str) -> None:
    """Compare the run with one without attacks."""
    lines, summary = lines_of(world), world.summary
    report.wrong += history.check(lines)
    workers = len(world.workers)
    if len(changes(lines, "joined")) != workers:
        report.wrong.append(f"{len(changes(lines, 'joined'))} joined, where {workers} workers took part")
    if summary["members_lost"] or summary["stale_rejected"]:
        report.wrong.append(f"{summary['members_lost']} members lost, {summary['stale_rejected']} gradients refused")
    if summary["weights_sha256"] != calm.summary["weights_sha256"]:
        report.wrong.append(f"the weights after {report.steps} steps are not those of a run without attacks")
    if strategy == "allreduce" and summary["replicas_agree"] is False:
        report.wrong.append("the replicas differ")


def _run(
    run: str,
    folder: Path,
    *,
    token: str,
    steps: int,
    script: Callable[[ElasticWorld], None] | None = None,
    pace_s: float = 0.0,
    patient: bool = False,
) -> ElasticWorld:
    strategy = run.partition("-")[0]
    config: dict[str, Any] = {
        "training.steps": steps,
        "training.batch_size": 8,
        "training.learning_rate": 1e-5,  # low, so that it does not overfit the few samples
        "lr_schedule.warmup_iters": 0,  # a constant rate: the weights after n steps do not depend on where the run ends
        "lr_schedule.min_lr": 1e-5,
        "training.eval_steps": 0,
        "training.checkpoint_steps": 0,
        "training.seed": 1,
        "cluster.plane": "elastic",
    }
    if strategy == "syncps":
        config["strategy.worker_update_interval"] = 1
    return run_elastic_world(
        RUNS[run],
        folder,
        config,
        task="Tiny",
        strategy=strategy,
        script=script,
        slow={0: pace_s},
        environ={"SMOLCLUSTER_TOKEN": token},
        patient=patient,
        timeout_s=120.0 + 0.2 * (0 if script else steps),
    )


def _pid(world: ElasticWorld, who: Who) -> int:
    pid = world.seat(who).lives[-1].process.pid
    assert pid is not None
    return pid


def _doors(world: ElasticWorld, who: Who, keyring: Keyring | None) -> list[Door]:
    pid = _pid(world, who)
    name = who if who == "server" else f"worker {who}"
    return [Door(name, pid, port, keyring) for port in listening_ports(pid)]
