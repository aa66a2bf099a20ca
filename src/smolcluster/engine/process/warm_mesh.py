"""A warm worker of the mesh plane: its modules are imported while the launcher waits for other machines.

`python -m smolcluster.engine.process.warm_mesh` is `main.py` for runs that are started again (launch/restart/launcher.py).
"""

import torch._dynamo  # noqa: F401 - FSDP and pipelines import it: a second, or several on a busy machine

import smolcluster.engine.worker
import smolcluster.tasks.gpt  # noqa: F401
from smolcluster.engine.process.main import main

if __name__ == "__main__":
    main()
