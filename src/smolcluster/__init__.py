"""Train one model on every computer you own, and serve it from the same machines.

    import smolcluster
    summary = smolcluster.train("gpt", strategy="allreduce", workers=2, overrides={"training.steps": 50})

Importing the package imports neither torch nor anything else; names load when they are used. docs/architecture.md shows the
folders; beside them stand errors.py, durable_files.py (fsync, rename), folders.py, locks.py, stopping.py (signals), version.py.
"""

from typing import TYPE_CHECKING, Any

from smolcluster.version import __version__

__all__ = ["Task", "__version__", "train"]

if TYPE_CHECKING:
    from smolcluster.launch.api import train
    from smolcluster.tasks.base import Task


def __getattr__(name: str) -> Any:
    if name == "train":
        from smolcluster.launch.api import train

        return train
    if name == "Task":
        from smolcluster.tasks.base import Task

        return Task
    raise AttributeError(f"module 'smolcluster' has no attribute '{name}'")
