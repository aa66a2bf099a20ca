"""Parse `--elastic MIN:MAX` and plan the world sizes it allows. Nothing here imports torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from smolcluster.comm.addresses import split_address
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch.local.processes import NEW_GROUP

MAX_RESTARTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRange:
    """World sizes of an elastic run. `endpoint`: the launchers' --rdzv-endpoint; None: one machine."""

    min_workers: int
    max_workers: int
    local_workers: int  # offered by this machine
    endpoint: tuple[str, int] | None = None
    max_restarts: int = MAX_RESTARTS

    def __str__(self) -> str:
        return f"{self.min_workers}:{self.max_workers}"


def elastic_from_flags(
    text: str | None, *, workers: int | None, endpoint: str | None, max_restarts: int | None, started_by: object = None
) -> ElasticRange | None:
    """Return what --elastic and its companion flags ask for; None without --elastic.

    `started_by`: the rank that another launcher assigned to this process; --elastic starts its ranks itself.
    """
    if text is None:
        needs = "--rdzv-endpoint" if endpoint is not None else "--max-restarts" if max_restarts is not None else None
        if needs is not None:
            raise UserError(f"{needs} needs --elastic MIN:MAX, the fewest and the most workers of the run")
        return None
    if started_by is not None:
        raise UserError("--elastic starts the ranks itself: leave out --rank, or start it without torchrun")
    restarts = MAX_RESTARTS if max_restarts is None else max_restarts
    return parse_elastic(text, workers=workers, endpoint=endpoint, max_restarts=restarts)


def parse_elastic(
    text: str, *, workers: int | None = None, endpoint: str | None = None, max_restarts: int = MAX_RESTARTS
) -> ElasticRange:
    """Parse `2:4`, or `4` for 4:4. `workers` of this machine default to all without an endpoint, to one with it."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
    if not 1 <= fewest <= most:
        raise UserError(
            f"--elastic {text}: write MIN:MAX, the fewest and the most workers of the run, such as --elastic 2:4"
        )
    local = workers if workers is not None else most if endpoint is None else 1
    if endpoint is None and most > local:
        raise UserError(
            f"--elastic {text} --workers {local}: only {local} workers on this machine; use --elastic "
            f"{min(fewest, local)}:{local}, or --rdzv-endpoint HOST:PORT for workers on several machines"
        )
    if local > most:
        raise UserError(f"--elastic {text} --workers {local}: at most {most} workers take part; use --workers {most}")
    if max_restarts < 0:
        raise UserError(f"--max-restarts {max_restarts}: 0 or more")
    where = None if endpoint is None else _endpoint(endpoint)
    return ElasticRange(
        min_workers=fewest, max_workers=most, local_workers=local, endpoint=where, max_restarts=max_restarts
    )


def _endpoint(text: str) -> tuple[str, int]:
    try:
        return split_address(text)
    except UserError:
        raise UserError(
            f"--rdzv-endpoint '{text}' is not HOST:PORT, such as 192.168.1.10:29400; it is the same on every machine"
        ) from None


def check_restartable(config: Config, plane: str) -> None:
    """Raise UserError for a run that --elastic cannot or need not restart."""
    name = config.strategy.name
    if plane == "elastic":
        raise UserError(
            f"--elastic restarts workers of the mesh plane; {name} runs on the elastic plane, where workers join and die "
            "without a restart: leave out --elastic"
        )
    if not config.training.checkpoint_steps:
        raise UserError(
            "--elastic restarts from the last checkpoint and this run saves none before its end; set "
            "training.checkpoint_steps, e.g. --save-interval 100"
        )


def plan_world_sizes(config: Config, elastic: ElasticRange) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Return the configuration for each world size that can run, and why the others cannot, from a process with torch."""
    sizes = range(elastic.min_workers, elastic.max_workers + 1)
    question = json.dumps({"config": config.model_dump(mode="json"), "sizes": list(sizes)})
    command = [sys.executable, "-m", "smolcluster.planner.world_sizes"]
    done = subprocess.run(command, input=f"{question}\n", capture_output=True, text=True, check=False, **NEW_GROUP)
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise SmolclusterError(f"planning the world sizes failed: {done.stderr.strip()[-2000:]}") from None
    if "error" in result:
        raise UserError(result["error"])
    found = {int(size): plan for size, plan in result["plans"].items()}
    refused = {size: plan["error"] for size, plan in found.items() if "error" in plan}
    return {size: plan["config"] for size, plan in found.items() if "config" in plan}, refused
