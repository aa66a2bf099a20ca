"""Import a saved model as a run at step 0, which `train --resume` continues with any strategy.

RUN/
    config.yaml                   the model's shape, from its config.json; all else by default
    tokenizer/                    its tokenizer and chat template, where it has them (tokenizer_files.py)
    checkpoints/step-00000000/    its weights
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from smolcluster.config import dump
from smolcluster.config.schema import Config
from smolcluster.config.shape import section_of
from smolcluster.data.tokenizers import load_tokenizer
from smolcluster.engine.checkpoint.snapshot import Snapshot
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.engine.checkpoint.tokenizer_files import read_tokenizer, with_stop_tokens
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import UserError
from smolcluster.models.gguf import GGUF
from smolcluster.models.hugging_face import CONFIG, load, read_json
from smolcluster.models.protocols import DecoderConfig


def import_model(source: Path, run: Path) -> tuple[DecoderConfig, str | None]:
    """Make a run directory from a folder with config.json and model.safetensors. Return the shape and the tokenizer's name."""
    RunDir(run).check_free(resume=False)
    try:
        shape, weights = load(source)
        tokenizer = with_stop_tokens(read_tokenizer(source), read_json(source / CONFIG))
    except ValueError as error:
        raise UserError(f"cannot import: {error}") from error
    return shape, _write_run(run, shape, weights, tokenizer, name=source.name)


def import_gguf(file: Path, run: Path, tokenizer: Mapping[str, bytes]) -> tuple[DecoderConfig, str | None]:
    """Make a run directory from a GGUF file. `tokenizer`: its files, converted from the header."""
    RunDir(run).check_free(resume=False)
    try:
        source = GGUF(file)
        weights = source.load(range(source.config.num_layers), first=True, last=True)
    except ValueError as error:
        raise UserError(f"cannot import: {error}") from error
    return source.config, _write_run(run, source.config, weights, tokenizer, name=file.name)


def _write_run(
    run: Path, shape: DecoderConfig, weights: Mapping[str, Tensor], files: Mapping[str, bytes], *, name: str
) -> str | None:
    place = RunDir(run)
    config = Config(task=None, model=section_of(shape))
    config.data.tokenizer = str(place.tokenizer.absolute()) if files else None
    with place.opened(dump(config), files, resume=False):
        try:
            info: dict[str, object] = {"task": config.model.type, "imported_from": name}
            if files:
                tokenizer = load_tokenizer(str(place.tokenizer), root=None)
                info["tokenizer"] = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}
            snapshot = Snapshot(
                step=0,
                weights={name: tensor.to(torch.float32) for name, tensor in weights.items()},
                state={"strategy": {"updates": 0}, "sampler": None, "best_val_loss": None},  # no data was read yet
                info=info,
            )
            CheckpointStore(place.checkpoints, keep=1).save(snapshot)
        except OSError as error:
            raise UserError(f"cannot write {run}: {error.strerror or error}; choose another folder") from error
        except BaseException:
            shutil.rmtree(place.tokenizer, ignore_errors=True)  # another model may be imported to this folder
            raise
    return tokenizer.name if files else None
