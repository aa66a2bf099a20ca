"""A model that others have saved becomes a run at step 0: `train --resume` goes on from its weights, with any strategy.

RUN/
    config.yaml                   the model's shape, as its config.json says; all else by default
    checkpoints/step-00000000/    its weights
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from smolcluster.config import dump
from smolcluster.config.schema import Config, ModelConfig
from smolcluster.engine.checkpoint import CheckpointStore, Snapshot
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import UserError
from smolcluster.models import GPTConfig
from smolcluster.models.hugging_face import load


def import_model(source: Path, run: Path) -> GPTConfig:
    """From a folder with config.json and model.safetensors to a run directory. Returns the model's shape."""
    place = RunDir(run)
    place.check_free(resume=False)
    try:
        shape, weights = load(source)
    except ValueError as error:
        raise UserError(f"cannot import: {error}") from error
    config = Config(task=None, model=ModelConfig(**dataclasses.asdict(shape)))
    snapshot = Snapshot(
        step=0,
        weights={name: tensor.to(torch.float32) for name, tensor in weights.items()},
        state={"strategy": {"updates": 0}, "sampler": None, "best_val_loss": None},  # no data was read yet
        info={"task": "gpt", "imported_from": source.name},
    )
    with place.opened(dump(config), resume=False):
        try:
            CheckpointStore(place.checkpoints, keep=1).save(snapshot)
        except OSError as error:
            raise UserError(f"cannot write {run}: {error.strerror or error}; choose another folder") from error
    return shape
