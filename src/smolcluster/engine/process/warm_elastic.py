"""A warm process: the modules of a server or worker are imported, nothing is opened. Its first input line is its spec.

`python -m smolcluster.engine.process.warm_elastic` is `main.py` for the elastic plane. The launcher starts workers
before it knows where their server listens, and keeps a second server ready to take the place of one that dies.
"""

import smolcluster.engine.elastic.server
import smolcluster.engine.elastic.worker
import smolcluster.tasks.gpt  # noqa: F401
from smolcluster.config.strategies import BUILT_IN
from smolcluster.engine.process.main import main
from smolcluster.strategies.registry import find_strategy

for _record in BUILT_IN.values():
    if _record.planes == ("elastic",):
        find_strategy(_record.name)

if __name__ == "__main__":
    main()
