"""The preset of a strategy that is picked by the measured link between machines, where the options leave it open.

An exchange of dense int4 takes S/2 bits per parameter each way. From `LAN_MBIT_S` on that is a small share of a round of 30
steps for models that such machines train; below it costs more than computing, and blocktopk sends a fraction of it. Where all
workers are on one machine nothing is measured and no preset is used. On the elastic plane rounds keep the length that they have
without a preset: the coordinator is made before a worker can be measured.

The choice is recorded in `link.json` of the run directory: a resumed run keeps it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from smolcluster.comm.addresses import is_loopback
from smolcluster.comm.elastic.membership.link_probe import LinkProbe
from smolcluster.comm.elastic.membership.roster import Roster
from smolcluster.comm.elastic.transport.messages import Kind
from smolcluster.comm.link_speed import MAX_BYTES
from smolcluster.config import public_dict
from smolcluster.config.schema import Config
from smolcluster.durable_files import durable_write_text
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec

LAN_MBIT_S = 50.0
MEASURE_TIMEOUT_S = 60.0  # for the remaining workers, after the first was measured


@dataclass(frozen=True, slots=True)
class LinkPick:
    preset: str | None  # None: the defaults
    mbit_per_s: float | None  # None: one machine, not measured

    def describe(self, strategy: str) -> str:
        if self.mbit_per_s is None:
            return f"{strategy}: no preset, as all workers are on one machine; set strategy.preset for another choice"
        rule = f"lan from {LAN_MBIT_S:g} Mbit/s on, wan below"
        return (
            f"{strategy}: preset {self.preset}, as {self.mbit_per_s:.3g} Mbit/s were measured between the machines ({rule}); "
            "set strategy.preset for another choice"
        )


def pick_preset(mbit_per_s: float | None) -> LinkPick:
    if mbit_per_s is None:
        return LinkPick(None, None)
    return LinkPick("lan" if mbit_per_s >= LAN_MBIT_S else "wan", mbit_per_s)


def pick_by_workers(
    roster: Roster, found: LinkPick | None, *, host: str, expected: int, use: Callable[[LinkPick], Config]
) -> None:
    """Elastic plane: `use` the pick that was found, or measure the links of workers when they ask for the plan.

    `use` returns the configuration with the pick, for the plan.
    """

    def use_once(pick: LinkPick) -> None:
        roster.plan = {**roster.plan, "config": public_dict(use(pick))}

    if found is not None or is_loopback(host):  # only processes of this machine can connect
        use_once(found or pick_preset(None))
        return
    roster.allow(Kind.STATE, max_bytes=MAX_BYTES)
    roster.probe = LinkProbe(expected=expected, patience_s=MEASURE_TIMEOUT_S)
    roster.on_speed = lambda speed: use_once(pick_preset(speed))


def on_one_machine(spec: WorkerSpec) -> bool:
    """Return whether all ranks of the mesh plane are on this machine."""
    return spec.world_size == spec.local_world_size or is_loopback(spec.master_addr)


def recorded_pick(run_dir: RunDir, checkpoints: str | None) -> LinkPick | None:
    """Return the recorded pick of a run that is resumed. `checkpoints`: the folder of checkpoints, or the one checkpoint."""
    source = [] if checkpoints is None else [Path(checkpoints).parent, Path(checkpoints).parent.parent]
    for run in [*map(RunDir, source), run_dir]:
        with contextlib.suppress(OSError, ValueError, TypeError):
            found = LinkPick(**json.loads(run.link.read_text(encoding="utf-8")))
            if found.preset in (None, "lan", "wan"):
                return found
    return None


def record_pick(pick: LinkPick, file: Path) -> None:
    durable_write_text(file, json.dumps(asdict(pick)) + "\n")
