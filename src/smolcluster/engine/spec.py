"""What one process of a run is told at its start. Crosses a pipe as JSON; nothing here imports torch."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


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
    master_port: int = 0  # 0: the launcher passes on the one that rank 0 found

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        return cls(**json.loads(text))
