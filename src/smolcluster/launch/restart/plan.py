"""What `--elastic MIN:MAX` asks for, and the worlds it allows. Nothing here imports torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from smolcluster.comm.elastic.transport.sockets import split_address
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch.local.processes import APART

MAX_RESTARTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """From `fewest` to `most` workers in all, `here` of them on this machine; `endpoint` is where machines meet."""

    fewest: int
    most: int
    here: int
    endpoint: tuple[str, int] | None = None
    max_restarts: int = MAX_RESTARTS

    def __str__(self) -> str:
        return f"{self.fewest}:{self.most}"


def elastic_wish(
    text: str | None, *, workers: int | None, endpoint: str | None, max_restarts: int | None, by_hand: object = None
) -> Elastic | None:
    """What the user asks for by --elastic and its companions; None without. `by_hand`: another launcher starts the ranks."""
    if text is None:
        needs = "--rdzv-endpoint" if endpoint is not None else "--max-restarts" if max_restarts is not None else None
        if needs is not None:
            raise UserError(f"{needs} needs --elastic MIN:MAX: how many workers has the run at least, and at most?")
        return None
    if by_hand is not None:
        raise UserError("--elastic starts the ranks itself: leave out --rank, or start it without torchrun")
    most = MAX_RESTARTS if max_restarts is None else max_restarts
    return parse_elastic(text, workers=workers, endpoint=endpoint, max_restarts=most)


def parse_elastic(
    text: str, *, workers: int | None = None, endpoint: str | None = None, max_restarts: int = MAX_RESTARTS
) -> Elastic:
    """`2:4`, or `4` for 4:4. `workers` are those of this machine: all of them by default, or one where machines meet."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
    if not 1 <= fewest <= most:
        raise UserError(
            f"--elastic {text}: write MIN:MAX, the fewest and the most workers of the run, such as --elastic 2:4"
        )
    here = workers if workers is not None else most if endpoint is None else 1
    if endpoint is None and most > here:
        raise UserError(
            f"--elastic {text} --workers {here}: there are only {here} workers; use --elastic {min(fewest, here)}:{here}, "
            "or --rdzv-endpoint HOST:PORT for workers on several machines"
        )
    if here > most:
        raise UserError(
            f"--elastic {text} --workers {here}: more than {most} workers never take part; use --workers {most}"
        )
    if max_restarts < 0:
        raise UserError(f"--max-restarts {max_restarts}: 0 or more")
    where = None if endpoint is None else _endpoint(endpoint)
    return Elastic(fewest=fewest, most=most, here=here, endpoint=where, max_restarts=max_restarts)


def _endpoint(text: str) -> tuple[str, int]:
    try:
        return split_address(text)
    except UserError:
        raise UserError(
            f"--rdzv-endpoint '{text}' is not HOST:PORT, such as 192.168.1.10:29400; it is the same on every machine"
        ) from None


def check_restartable(config: Config, plane: str) -> None:
    """Whether starting again makes sense for this run."""
    name = config.strategy.name
    if plane == "elastic":
        raise UserError(
            f"--elastic restarts workers of the mesh plane; {name} runs on the elastic plane, where the others go on without "
            "a restart when one dies, and workers may join at any time: leave out --elastic"
        )
    if not config.training.checkpoint_steps:
        raise UserError(
            "--elastic goes on from the last checkpoint and this run saves none between its beginning and its end; "
            "set training.checkpoint_steps, e.g. --save-interval 100"
        )


def ask_for_plans(config: Config, elastic: Elastic) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """The configuration for each size that can run, and why the others cannot. A process that has torch is asked."""
    sizes = range(elastic.fewest, elastic.most + 1)
    question = json.dumps({"config": config.model_dump(mode="json"), "sizes": list(sizes)})
    command = [sys.executable, "-m", "smolcluster.planner.world_sizes"]
    done = subprocess.run(command, input=f"{question}\n", capture_output=True, text=True, check=False, **APART)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise SmolclusterError(f"the sizes could not be planned: {done.stderr.strip()[-2000:]}") from None
    if "error" in answer:
        raise UserError(answer["error"])
    found = {int(size): plan for size, plan in answer["plans"].items()}
    refused = {size: plan["error"] for size, plan in found.items() if "error" in plan}
    return {size: plan["config"] for size, plan in found.items() if "config" in plan}, refused
