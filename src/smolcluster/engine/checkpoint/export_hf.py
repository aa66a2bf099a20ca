"""Export a run's weights as a folder that Hugging Face's `transformers` loads.

    OUT/
        config.json          the shape, with their keys
        model.safetensors    the weights, with their names (models/hugging_face.py)
        tokenizer.json, ...  tokenizer and chat template, where the run has them as files (tokenizer_files.py)

All are written and flushed in a `.tmp-` folder next to OUT, which is then renamed: OUT is complete or does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smolcluster.compute.precision import DTYPES
from smolcluster.config import load_config
from smolcluster.config.schema import Config
from smolcluster.config.shape import shape_of
from smolcluster.data.names import default_tokenizer
from smolcluster.durable_files import Files, ensure_folder, temporary_name
from smolcluster.engine.checkpoint.safetensors_writer import HashedFile, TensorFile
from smolcluster.engine.checkpoint.snapshot import MANIFEST, Snapshot
from smolcluster.engine.checkpoint.store import CheckpointStore, folder_name
from smolcluster.engine.checkpoint.tokenizer_files import tokenizer_of
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import UserError, suggest, unknown_name
from smolcluster.models.hugging_face import CONFIG, WEIGHTS, export_config, export_weights
from smolcluster.models.parts import vocabulary
from smolcluster.models.protocols import DecoderConfig
from smolcluster.models.registry import ARCHITECTURES


@dataclass(frozen=True, kw_only=True)
class Exported:
    architecture: str
    checkpoint: str
    damaged: list[str]  # newer checkpoints that could not be read
    num_parameters: int
    tokenizer: str
    has_tokenizer: bool  # its files are in the folder


def export_run(run: Path, out: Path, *, checkpoint: str | None = None, dtype: str = "fp32") -> Exported:
    """Write a checkpoint of a run (default: the latest) as a Hugging Face folder `out`.

    `run` is a run directory, its folder of checkpoints, or one checkpoint in it.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    check_free(out)
    place, which = _find(run, checkpoint)
    config = _read_config(place)
    snapshot, damaged = _load(place, which)
    shape = _shape(config, snapshot, place)
    weights = {name: _cast(name, tensor, dtype) for name, tensor in snapshot.weights.items()}
    try:
        hf_config, tensors = export_config(shape, dtype=DTYPES[dtype]), export_weights(shape, weights)
    except ValueError as error:
        raise UserError(f"{place.path} cannot be exported: {error}") from error
    files = tokenizer_of(place, config.data)
    write_folder(out, hf_config, tensors, extra=files)
    return Exported(
        architecture=hf_config["architectures"][0],
        checkpoint=folder_name(snapshot.step),
        damaged=damaged,
        num_parameters=shape.num_parameters,
        tokenizer=config.data.tokenizer or default_tokenizer(config.data.name),
        has_tokenizer=bool(files),
    )


def check_free(out: Path) -> None:
    """Refuse a folder that is not empty, and the current one."""
    try:
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise UserError(f"{out} is not a folder; name a new one")
        if out.is_dir() and next(out.iterdir(), None) is not None:
            raise UserError(f"the folder {out} is not empty; name a new one, or empty it first")
        if out.resolve() == Path.cwd():
            raise UserError("OUT is the current folder; name a new one inside it")
    except OSError as error:
        raise UserError(f"cannot read {out}: {error.strerror or error}; name another folder") from error


def write_folder(
    out: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    *,
    extra: Mapping[str, bytes] | None = None,
    files: Files | None = None,
) -> None:
    """Write the folder atomically: the shape, the weights, and the files in `extra`."""
    files = files or Files()
    temporary = out.parent / temporary_name(out.name)
    try:
        ensure_folder(out.parent, files=files)
        files.mkdir(temporary)
        with files.create(temporary / WEIGHTS) as raw:
            TensorFile.plan(tensors).write_to(HashedFile(raw))
            raw.fsync()
        for name, content in {**(extra or {}), CONFIG: f"{json.dumps(config, indent=2)}\n".encode()}.items():
            with files.create(temporary / name) as raw:
                raw.write(content)
                raw.fsync()
        files.fsync_folder(temporary)
        if out.is_dir():
            out.rmdir()  # empty, or this fails
        files.rename(temporary, out)
        files.fsync_folder(out.parent)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}; name another folder") from error
    finally:
        if temporary.is_dir():
            files.remove(temporary)


def _find(run: Path, checkpoint: str | None) -> tuple[RunDir, str]:
    if not run.is_dir():
        raise UserError(f"there is no run at {run}; name a run directory, or a checkpoint folder inside one")
    run = run.resolve()
    if (run / MANIFEST).is_file() or run.parent.name == "checkpoints":
        if checkpoint not in (None, run.name):
            raise UserError(f"{run} is one checkpoint, and --checkpoint {checkpoint} names another; give one of them")
        return RunDir(run.parent.parent), run.name
    return RunDir(run.parent if run.name == "checkpoints" else run), checkpoint or "latest"


def _read_config(place: RunDir) -> Config:
    if not place.config.is_file():
        raise UserError(f"{place.path} has no config.yaml, which has the model's shape; name the directory of a run")
    config = load_config([place.config])
    if config.task is not None:
        raise UserError(
            f"{place.path} trained a model of your own ({config.task}), which has no name at Hugging Face; "
            "its weights are in weights.safetensors of each checkpoint"
        )
    if config.model.type not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise UserError(
            f"{place.path} trained a {config.model.type}, which has no name at Hugging Face; only {known} has"
        )
    return config


def _load(place: RunDir, which: str) -> tuple[Snapshot, list[str]]:
    store = CheckpointStore(place.checkpoints, keep=1)
    names = [path.name for path in store.list()]
    if not names:
        raise UserError(f"{place.path} has no checkpoint yet; train it with training.checkpoint_steps above 0")
    if which != "latest":
        if which not in ("best", *names):
            raise UserError(f"no checkpoint '{which}' in {place.path}; {suggest(which, ('latest', 'best', *names))}")
        return store.load(which, optimizer=False), []
    found = store.load_latest(optimizer=False)
    assert found is not None
    path, snapshot = found
    return snapshot, names[names.index(path.name) + 1 :]


def _shape(config: Config, snapshot: Snapshot, place: RunDir) -> DecoderConfig:
    """Return the shape in config.yaml, with the size of the vocabulary from the weights where it is automatic."""
    found = vocabulary({name: tuple(tensor.shape) for name, tensor in snapshot.weights.items()})
    if found is None:
        raise UserError(
            f"{place.path}: the checkpoint of step {snapshot.step} is not of a {config.model.type}: "
            "it has no token_embedding.weight"
        )
    return shape_of(config.model, vocab_size=config.model.vocab_size or found)


def _cast(name: str, tensor: Tensor, dtype: str) -> Tensor:
    result = tensor.to(DTYPES[dtype])
    if not bool(torch.isfinite(result).all()) and bool(torch.isfinite(tensor).all()):
        raise UserError(f"{name} has values that {dtype} cannot represent; use --dtype bf16 or fp32")
    return result
