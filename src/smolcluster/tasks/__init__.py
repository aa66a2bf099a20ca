"""Tasks: a model, its loss and its data. A user's own task is a subclass of `Task`."""

from smolcluster.tasks.base import Task
from smolcluster.tasks.find import find_task

__all__ = ["Task", "find_task"]
