"""Tasks: a model, its loss and its data. A user's task is a subclass of `Task`.

base.py   the interface
gpt.py    next-token prediction
mnist.py  handwritten digits
find.py   finds the task that a configuration names
"""

from smolcluster.tasks.base import Task
from smolcluster.tasks.find import find_task

__all__ = ["Task", "find_task"]
