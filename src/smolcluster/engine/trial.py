"""A trial of the user's code before step 1: one training batch, one validation batch and the sample.

An error in `metrics` would otherwise show only at the first evaluation, one in `sample` at the end of the run. The code runs
on a copy of the task and of the model, and random states are restored. Code of this package is not tried.

    parameters of more than 2 GiB                          no check: the copy may not fit
    more than BACKWARD_BYTES, or `training.compile`        no backward pass: it would take long
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from smolcluster.compute.precision import autocast
from smolcluster.compute.replica import check_loss, to_device
from smolcluster.config.options import Options
from smolcluster.data.dataset import Dataset
from smolcluster.engine.best import Best
from smolcluster.engine.evaluate import check_metrics
from smolcluster.errors import SmolclusterError, UserError, suggest
from smolcluster.strategies.base import Strategy
from smolcluster.tasks.base import Task, count_of

log = logging.getLogger(__name__)

SAMPLE_TOKENS = 2  # of the text generated in a trial
TRIAL_BYTES = 2**31  # a model larger than this is not copied to try the task's code on

BACKWARD_BYTES = 256 << 20  # of parameters

_TRAINING = ("model", "train_data", "loss", "count", "targets")
_EVALUATION = ("model", "val_data", "metrics", "loss", "count", "targets")


class _NoRoom(Exception):
    """There is not enough memory for a trial."""


def needs_trial(task: Task) -> bool:
    """Return whether the task has code of the user, or `training.best` names a metric to check."""
    return task.quick_check and (
        _own(task, *_TRAINING, *_EVALUATION, "sample") or task.config.training.best != "loss, min"
    )


def try_task(
    task: Task, strategy: Strategy[Options], *, train_data: Dataset, val_data: Dataset | None, batch_size: int
) -> str | None:
    """Run the task's code once. Raises UserError for an error in it; returns a warning or None."""
    device, training = strategy.context.device, task.config.training
    with unchanged_random_states(device):
        if 4 * strategy.replica.num_parameters > TRIAL_BYTES:
            return None
        replica = strategy.replica
        model = copy.deepcopy(replica.model) if replica.whole else task.model().to(device)
        task = _with_a_short_sample(copy.copy(task))  # so that its methods do not change the task of the run
        warning = None
        try:
            if _own(task, *_TRAINING):
                _train(task, model, train_data, batch_size, device)
            if val_data is not None and (_own(task, *_EVALUATION) or training.best != "loss, min"):
                warning = _evaluate(task, model, val_data, min(batch_size, training.eval_samples or batch_size), device)
            if _own(task, "model", "sample") and type(task).sample is not Task.sample:
                _sample(task, model)
        except _NoRoom as error:  # step 1 reports it
            log.info("not enough memory to try %s before the first step", error)
        return warning


def _with_a_short_sample(task: Task) -> Task:
    logging = task.config.logging
    short = logging.model_copy(update={"sample_tokens": min(logging.sample_tokens, SAMPLE_TOKENS)})
    task.config = task.config.model_copy(update={"logging": short})
    return task


def _first_batch(task: Task, name: str, data: Dataset, size: int) -> Any:
    with _named(task, name):
        part = data.batch(np.arange(min(len(data), size)))
    with _named(task, "count"):
        count_of(task, part)
    return part


def _train(task: Task, model: nn.Module, data: Dataset, batch_size: int, device: torch.device) -> None:
    part = _first_batch(task, "train_data", data, batch_size)
    model.train()
    with _named(task, "loss"), autocast(task.config.training.precision, device):
        loss = task.loss(model, to_device(part, device))
        check_loss(loss)
    if sum(p.nbytes for p in model.parameters()) <= BACKWARD_BYTES and not task.config.training.compile:
        with _named(task, "the backward pass of loss"):
            loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()


@torch.no_grad()
def _evaluate(task: Task, model: nn.Module, data: Dataset, batch_size: int, device: torch.device) -> str | None:
    part = _first_batch(task, "val_data", data, batch_size)
    model.eval()
    with _named(task, "metrics"), autocast(task.config.training.precision, device):
        found = check_metrics(task, task.metrics(model, to_device(part, device)))
        return _check_best(task, list(found))


@torch.no_grad()
def _sample(task: Task, model: nn.Module) -> None:
    model.eval()
    with _named(task, "sample"):
        sample = task.sample(model)
    texts = isinstance(sample, tuple) and len(sample) == 2 and all(isinstance(text, str) for text in sample)
    if sample is not None and not texts:
        raise UserError(f"sample() of {task.name} must return a prompt and a text, or None, not {sample!r:.80}")


def _check_best(task: Task, names: list[str]) -> str | None:
    training = task.config.training
    name = Best(training.best).name
    names = [*names, "ppl"] if task.perplexity else names
    if name in names:
        return None
    if training.best == "loss, min":
        known = ", ".join(names) or "none"
        return (
            f"metrics() of {task.name} has no 'loss': no checkpoint is the best; name one with training.best ({known})"
        )
    what = f"training.best = '{training.best}': metrics() of {task.name} has no '{name}'"
    raise UserError(f"{what}; {suggest(name, names)}")


def _own(task: Task, *methods: str) -> bool:
    """Return whether the user defines one of these methods."""
    return any(not getattr(type(task), name).__module__.startswith("smolcluster.") for name in methods)


@contextlib.contextmanager
def _named(task: Task, method: str) -> Iterator[None]:
    """Raise errors of the user's code as UserError, with the method and the line."""
    try:
        yield
    except SmolclusterError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _NoRoom(f"{method}() of {task.name}") from error
    except Exception as error:  # the user's own code: it may raise anything
        log.info("%s() of %s failed", method, task.name, exc_info=error)
        spec = task.config.task or ""
        file = spec.rpartition(":")[0] if ".py:" in spec else spec
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if file and Path(f.filename) == Path(file)]
        place = f"{file}, line {lines[-1]}: " if lines else ""
        raise UserError(f"{place}{method}() of {task.name} failed: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def unchanged_random_states(device: torch.device) -> Iterator[None]:
    """Restore all random states afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
