"""Read the tensors in a checkpoint's files on access.

A tensor is one entry of one file, or boxes in the files of several ranks that fill it exactly. That is checked by the headers
when the files are opened.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from smolcluster.comm.sharded import read_box_name
from smolcluster.errors import DamagedCheckpoint

Size = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FileEntry(BaseModel):
    sha256: Digest
    size: Size
    tensors: Size | None = None
    aliases: dict[str, str] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class _Box:
    """A part of a tensor, or all of it, in a file."""

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    same_as: str | None  # the tensor that has the same bytes (a tied weight)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.shape, strict=True))

    def overlaps(self, other: _Box) -> bool:
        sides = zip(self.slices, other.slices, strict=True)
        return all(a.start < b.stop and b.start < a.stop for a, b in sides)


class StoredTensors(Mapping[str, Tensor]):
    """Whole tensors by name; each access reads the files. `full_shapes`: their shapes, where the files hold boxes."""

    def __init__(
        self, folder: Path, entries: Mapping[str, FileEntry], full_shapes: Mapping[str, Sequence[int]] | None
    ) -> None:
        self._folder = folder
        self._boxes: dict[str, list[_Box]] = {} if full_shapes is None else {name: [] for name in full_shapes}
        self._files: dict[str, Any] = {}
        for file, entry in entries.items():
            try:
                found = list(self._contents(file, entry, in_parts=full_shapes is not None))
            except (SafetensorError, OSError, ValueError) as error:
                raise self._damaged(file, f"not a valid safetensors file: {error}") from error
            for name, box in found:
                if full_shapes is not None and name not in self._boxes:
                    raise self._damaged(file, f"'{name}' is not in the manifest")
                self._boxes.setdefault(name, []).append(box)
        self._shapes = {
            name: boxes[0].shape if full_shapes is None else tuple(full_shapes[name])
            for name, boxes in self._boxes.items()
        }
        for name, boxes in self._boxes.items():
            self._check_filled(name, boxes)

    def _contents(self, file: str, entry: FileEntry, *, in_parts: bool) -> Iterator[tuple[str, _Box]]:
        opened: Any = safe_open(self._folder / file, framework="pt")
        self._files[file] = opened
        keys = list(opened.keys())
        if len(keys) != entry.tensors:
            raise self._damaged(file, f"{len(keys)} tensors, the manifest says {entry.tensors}")
        for alias, target in entry.aliases.items():
            if alias in keys or target not in keys:
                raise DamagedCheckpoint(
                    f"{self._folder.name}/manifest.json: '{alias}' cannot be another name of '{target}'"
                )
        read = read_box_name if in_parts else None
        for called, key in [*((key, key) for key in keys), *entry.aliases.items()]:
            stored = opened.get_slice(key)
            shape = tuple(stored.get_shape())
            name, offsets = (called, (0,) * len(shape)) if read is None else read(called)
            same_as = None if called == key else key if read is None else read(key)[0]
            yield name, _Box(file, key, offsets, shape, stored.get_dtype(), same_as)

    def _check_filled(self, name: str, boxes: Sequence[_Box]) -> None:
        """Check that the boxes contain every element once."""
        shape = self._shapes[name]
        fits = all(
            len(box.offsets) == len(box.shape) == len(shape)
            and all(s.start >= 0 and s.stop <= size for s, size in zip(box.slices, shape, strict=True))
            for box in boxes
        )
        whole = sum(math.prod(box.shape) for box in boxes) == math.prod(shape)
        if not (fits and whole and len({box.dtype for box in boxes}) <= 1) or any(
            one.overlaps(other) for one, other in itertools.combinations(boxes, 2)
        ):
            raise DamagedCheckpoint(f"{self._folder.name}: the files do not contain '{name}' {shape} exactly once")

    def _damaged(self, file: str, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self._folder.name}/{file}: {what}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read_all(self) -> dict[str, Tensor]:
        """Read all tensors into memory and close the files; tied tensors stay tied."""
        result: dict[str, Tensor] = {}
        aliases = {}
        for name, boxes in self._boxes.items():
            same = {box.same_as for box in boxes}
            if len(same) == 1 and None not in same:
                aliases[name] = str(same.pop())
            else:
                result[name] = self[name]
        result.update({alias: result[target] if target in result else self[alias] for alias, target in aliases.items()})
        self.close()
        return result

    def close(self) -> None:
        """Close the files: some systems cannot remove or rename open ones."""
        self._files.clear()

    def __getitem__(self, name: str) -> Tensor:
        boxes, shape = self._boxes[name], self._shapes[name]
        if len(boxes) == 1:
            return self._read(boxes[0]).clone()  # safetensors maps the file, which may be removed
        parts = [self._read(box) for box in boxes]
        full = torch.empty(shape, dtype=parts[0].dtype) if parts else torch.empty(shape)
        for box, part in zip(boxes, parts, strict=True):
            full[box.slices] = part
        return full

    def _read(self, box: _Box) -> Tensor:
        tensor: Tensor = self._files[box.file].get_tensor(box.key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._boxes)

    def __len__(self) -> int:
        return len(self._boxes)
