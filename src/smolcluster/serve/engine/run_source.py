"""A model in a checkpoint of one of our runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from smolcluster.config import load_config
from smolcluster.config.schema import Config, DataConfig
from smolcluster.config.shape import shape_of
from smolcluster.data.example_prompts import example_prompts
from smolcluster.data.names import default_tokenizer
from smolcluster.data.sources import find_sources
from smolcluster.data.tokenizers import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from smolcluster.engine.checkpoint.lazy_tensors import StoredTensors
from smolcluster.engine.checkpoint.snapshot import Manifest, open_checkpoint
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import UserError
from smolcluster.models.parts import cast, check_depth, check_shapes, check_values, part_of, vocabulary
from smolcluster.models.registry import ARCHITECTURES
from smolcluster.serve.engine.folder_source import bytewise_tokenizer, folder_tokenizer
from smolcluster.serve.engine.model_source import ModelSource, fingerprint_of
from smolcluster.serve.text.conversation import ChatTokenizer


class RunSource(ModelSource):
    """One checkpoint, with its manifest."""

    def __init__(self, path: Path, *, manifest: Manifest) -> None:
        run = RunDir(path.parent.parent)
        self._settings = _read_config(run)
        if run.tokenizer.is_dir():  # the copy in the run, wherever that is now
            self._settings.data.tokenizer = str(run.tokenizer)
        weights = open_checkpoint(path, manifest, optimizer=False, lazily=True).weights
        assert isinstance(weights, StoredTensors)
        self._weights = weights
        found = weights.shapes()
        model, rows = self._settings.model, vocabulary(found)
        if rows is None:
            raise UserError(f"{path}: not a checkpoint of a {model.type}: it has no token_embedding.weight")
        self.config = shape_of(model, vocab_size=model.vocab_size or rows)
        check_depth(self.config.num_layers, len(found), where="config.yaml")
        check_shapes(found, self.config.shapes())
        self.name = f"{_short(run.path)} (step {manifest.step})"
        self._step = manifest.step
        self.reference = {"kind": "run", "path": str(path)}
        files = {name: entry.sha256 for name, entry in sorted(manifest.files.items()) if name.startswith("weights")}
        self.fingerprint = fingerprint_of([json.dumps([asdict(self.config), files], sort_keys=True)])
        self._load = self._load_part

    def _load_part(
        self, layers: range, *, first: bool, last: bool, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        result = {}
        for name in part_of(self.config.shapes(), self.config, layers, first=first, last=last):
            tensor = self._weights[name]
            check_values(name, tensor)
            result[name] = cast(name, tensor, dtype).to(device)
        return result

    def text(self) -> ChatTokenizer:
        tokenizer = _run_tokenizer(self._settings.data)
        explicit_vocab = self._settings.model.vocab_size is not None
        if not explicit_vocab and tokenizer.vocab_size != self.config.vocab_size:
            raise UserError(
                f"{self.name} was trained with a vocabulary of {self.config.vocab_size} tokens, but its tokenizer "
                f"({tokenizer.name}) now has {tokenizer.vocab_size}: its text or files have changed since the training"
            )
        if isinstance(tokenizer, HuggingFaceTokenizer):
            return self._checked(folder_tokenizer(Path(tokenizer.name)))
        return self._checked(bytewise_tokenizer(tokenizer))

    def example_prompts(self) -> list[str]:
        if self._step == 0:  # an imported model was not trained on this run's data
            return []
        return example_prompts(self._settings.data)


def _read_config(run: RunDir) -> Config:
    if not run.config.is_file():
        raise UserError(f"{run.path} has no config.yaml, which defines the model; give the directory of a run")
    config = load_config([run.config])
    if config.task is not None or config.model.type not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise UserError(f"{run.path} trained a {config.task or config.model.type}; only a {known} can be served")
    return config


def _run_tokenizer(data: DataConfig) -> Tokenizer:
    place = data.tokenizer_root or data.root
    return load_tokenizer(
        data.tokenizer or default_tokenizer(data.name),
        root=Path(place).expanduser() if place is not None else None,
        text=lambda: find_sources(data).whole_text(),
        cache_dir=data.cache_dir,
    )


def _short(path: Path) -> str:
    """Return the path relative to the working directory, if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
