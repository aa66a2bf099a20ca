"""The specification of one process of a run, sent as JSON over a pipe. This module does not import torch."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

# Set before torch is imported: connection errors are reported by this package, once.
ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

SIGNALS_TOGETHER_S = 0.02  # stop signals this close count as one: `timeout` sends two


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    config: dict[str, Any]
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    run_dir: str
    resume: str | None = None
    backend: str | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: the launcher forwards the port that rank 0 chose
    watched: bool = True  # by a launcher; else the ranks watch each other
    first_rank: int | None = None  # of this machine's; None: its ranks are counted through as its local ranks are
    again: bool = False  # an automatic restart: perhaps only the end of the run is left

    # The elastic plane.
    plane: str = "mesh"
    role: str = "worker"
    server: str = ""  # host:port; for the server itself: where to listen, port 0 for any
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)  # of this host, by dotted name
    strategy: str = ""  # that a worker expects the server to run; empty: any

    @property
    def first_here(self) -> int:
        return max(0, self.rank - self.local_rank) if self.first_rank is None else self.first_rank

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        return cls(**json.loads(text))
