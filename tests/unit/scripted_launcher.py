"""A launcher of `train --elastic` with scripted workers (scripted_process.py): no torch, fast to start, on any host.

python -m tests.unit.scripted_launcher RUN_DIR MIN:MAX WORKERS HOST:PORT SILENT_S
"""

import sys
from pathlib import Path
from typing import Any

from smolcluster.cli.ending import tell
from smolcluster.config import load_config, resolve
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import SmolclusterError
from smolcluster.launch.prepare import Prepared
from smolcluster.launch.restart import endpoint, rendezvous
from smolcluster.launch.restart import launcher as restart
from smolcluster.launch.restart.plan import ElasticRange, parse_elastic
from smolcluster.observe.console import ConsoleSink


def plans(_: Any, elastic: ElasticRange) -> Any:
    return {size: {"size": size} for size in range(elastic.min_workers, elastic.max_workers + 1)}, {}


def main() -> None:
    folder, size, workers, address, silent_s = sys.argv[1:]
    endpoint.SILENT_S = rendezvous.SILENT_S = float(silent_s)
    restart._PROCESS, restart.plan_world_sizes = "tests.unit.scripted_process", plans  # type: ignore[assignment]
    wish = parse_elastic(size, workers=int(workers), endpoint=address)
    overrides = {"strategy.name": "allreduce", "cluster.num_workers": wish.max_workers, "cluster.standby": False}
    config = resolve(load_config([], overrides=overrides))
    run = Prepared(config=config, workers=wish.max_workers, run_dir=RunDir(Path(folder)))
    try:
        restart.run_restarting(run, wish, sinks=[ConsoleSink()])
    except SmolclusterError as error:
        sys.exit(tell(error))


if __name__ == "__main__":
    main()
