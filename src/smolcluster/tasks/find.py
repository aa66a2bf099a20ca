"""Find the `Task` of a configuration."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

from smolcluster.config.schema import Config
from smolcluster.data.cache import Progress
from smolcluster.errors import UserError, unknown_name
from smolcluster.tasks.base import Task


def find_task(config: Config, *, progress: Progress | None = None) -> Task:
    """Return the user's task if one is named; otherwise by the data: classification of MNIST, or language modelling."""
    if config.task is not None:
        return load_task_class(config.task)(config)
    if config.data.name == "mnist":
        if config.model.type != "simplenn":
            raise UserError("data.name 'mnist' needs model.type SimpleNN; the built-in config `mnist` has both")
        from smolcluster.tasks.mnist import MnistTask

        return MnistTask(config, progress=progress)
    if config.model.type == "simplenn":
        raise UserError(
            f"model.type SimpleNN cannot learn from data.name '{config.data.name}'; use gpt, or data.name mnist"
        )
    from smolcluster.tasks.gpt import GPTTask

    return GPTTask(config, progress=progress)


def load_task_class(spec: str) -> type[Task]:
    """Import `path/to/file.py:ClassName`; the class may be omitted if the file has only one task."""
    path_text, _, name = spec.rpartition(":") if ".py:" in spec else (spec, "", "")
    path = Path(path_text)
    if not path.is_file():
        raise UserError(f"task '{spec}': there is no file {path}; use path/to/file.py:ClassName")
    sys.path.insert(0, str(path.parent.resolve()))
    module_spec = importlib.util.spec_from_file_location(f"smolcluster_task_{path.stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # code of the user: it may raise anything
        frames = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1] if frames else None
        place = f"{path}, line {line}" if line else str(path)
        raise UserError(f"{place}: {type(error).__name__}: {error}") from error
    found = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    }
    if name:
        if name not in found:
            raise unknown_name(f"task in {path}", name, found)
        return found[name]
    if len(found) != 1:
        raise UserError(f"{path} has {len(found)} tasks ({', '.join(found) or 'none'}); name one as {path}:ClassName")
    return next(iter(found.values()))
