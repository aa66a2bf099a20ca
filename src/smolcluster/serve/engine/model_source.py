"""A model in files: its tokenizer, and the parameters of any range of its layers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from smolcluster.errors import DamagedCheckpoint, UserError
from smolcluster.models.parts import part_of
from smolcluster.models.protocols import DecoderConfig
from smolcluster.serve.engine.layout import WeightSizes
from smolcluster.serve.text.conversation import ChatTokenizer

_SAMPLES, _SAMPLE_BYTES = 64, 4096


class ModelSource(ABC):
    name: str  # for messages
    config: DecoderConfig
    fingerprint: str  # identifies these weights on every machine
    reference: dict[str, str]  # for `open_source` on another machine
    _load: Callable[..., dict[str, Tensor]]  # as `load`
    _files: Mapping[Path, tuple[int, ...] | None] | None = None  # their identities when opened

    @abstractmethod
    def text(self) -> ChatTokenizer:
        """Return tokenizer, chat template and stop tokens. Raises UserError if they are missing or do not match the model."""

    def example_prompts(self) -> list[str]:
        """Return prompts from the training text, if it is on this machine."""
        return []

    def load(
        self, layers: range, *, first: bool, last: bool, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        """Read only the parameters of one part (models/parts.py). Raises UserError with file and tensor."""
        try:
            self._check_unchanged()
            return self._load(layers, first=first, last=last, dtype=dtype, device=device)
        except (ValueError, DamagedCheckpoint, OSError, RuntimeError) as error:  # RuntimeError: out of memory
            raise UserError(f"{self.name} cannot be loaded: {error}") from error

    def _note_files(self, files: Iterable[Path]) -> None:
        """Record the identity of the files with the weights."""
        self._files = {file: identity_of(file) for file in files}

    def _check_unchanged(self) -> None:
        """Raise UserError if the files were replaced: layers of two models must not mix."""
        for file, identity in (self._files or {}).items():
            if identity_of(file) not in (identity, None):
                raise UserError(f"{file} has changed since it was opened; start the server again")

    def layer_bytes(self, dtype: torch.dtype) -> WeightSizes:
        """Return the bytes of each layer, the embedding and the head, from the shapes."""
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in self.config.shapes().items()}
        none = range(0)

        def total(layers: range, *, first: bool, last: bool) -> int:
            return sum(sizes[name] for name in part_of(sizes, self.config, layers, first=first, last=last))

        embedding, head = total(none, first=True, last=False), total(none, first=False, last=True)
        return WeightSizes(
            layers=tuple(total(range(n, n + 1), first=False, last=False) for n in range(self.config.num_layers)),
            embedding=embedding,
            head=head,
            tied=embedding + head - total(none, first=True, last=True),
            weight_bytes=dtype.itemsize,
        )

    def _checked(self, text: ChatTokenizer) -> ChatTokenizer:
        if text.vocab_size > self.config.vocab_size:
            raise UserError(
                f"the tokenizer of {self.name} has {text.vocab_size} tokens, the model only {self.config.vocab_size}; "
                "use the tokenizer of this model"
            )
        return text


def fingerprint_of(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def identity_of(path: Path) -> tuple[int, ...] | None:
    """Return inode, size and time of a file; None if it is missing: opening it will raise."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def sampled_hash(path: Path) -> list[str]:
    """Return the size of a file and a hash of samples from all of it."""
    size = path.stat().st_size
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            sha256.update(file.read())
        else:
            for number in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                sha256.update(file.read(_SAMPLE_BYTES))
    return [str(size), sha256.hexdigest()]
