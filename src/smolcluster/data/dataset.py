"""Datasets: make a batch of tensors from sample indices.

A dataset has a length and makes a batch for any array of indices. Order and position belong to the sampler. Batches are CPU
tensors, ready for the task's loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from smolcluster.data.sampler import Indices
from smolcluster.errors import UserError

Array = npt.NDArray[Any] | Tensor


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> Any: ...


class TokenDataset:
    """Windows of `seq_len` tokens, each with the same window shifted by one as its targets.

    Sample i reads tokens[i*T : i*T + T + 1]. Windows share only that one token: an epoch predicts each token once.
    """

    def __init__(self, tokens: npt.NDArray[Any], seq_len: int, *, what: str = "the text") -> None:
        num_samples = (len(tokens) - 1) // seq_len
        if num_samples < 1:
            raise UserError(
                f"{what} has {len(tokens)} tokens, but one window of length {seq_len} needs {seq_len + 1}: "
                "give more text, lower model.max_seq_len, or change data.val_fraction"
            )
        # Two views of the file as rows: a batch then copies whole rows, not single tokens.
        tokens = np.asarray(tokens)
        self._inputs = tokens[: num_samples * seq_len].reshape(num_samples, seq_len)
        self._targets = tokens[1 : num_samples * seq_len + 1].reshape(num_samples, seq_len)

    def __len__(self) -> int:
        return len(self._inputs)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each int64 of shape (len(indices), seq_len)."""
        inputs = self._inputs[indices].astype(np.int64)
        targets = self._targets[indices].astype(np.int64)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class ArrayDataset:
    """Arrays of equal length; a batch is a tuple of their rows, passed through `transform` if there is one."""

    def __init__(self, *arrays: Array, transform: Callable[..., tuple[Tensor, ...]] | None = None) -> None:
        lengths = [len(a) for a in arrays]
        if len(set(lengths)) != 1:
            raise UserError(f"a dataset needs arrays of one length, but these have {lengths or 'none'}")
        self.arrays = arrays
        self.transform = transform

    def __len__(self) -> int:
        return len(self.arrays[0])

    def batch(self, indices: Indices) -> tuple[Tensor, ...]:
        rows = tuple(_rows(a, indices) for a in self.arrays)
        return rows if self.transform is None else self.transform(*rows)


def _rows(array: Array, indices: Indices) -> Tensor:
    if isinstance(array, Tensor):
        return array.index_select(0, torch.from_numpy(np.array(indices, dtype=np.int64)))
    return torch.from_numpy(np.asarray(array[indices]))


class MapDataset:
    """Any map-style torch dataset: samples are fetched one by one (or by `__getitems__`) and collated as torch does."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Indices) -> Any:
        wanted = indices.tolist()
        fetch_many = getattr(self.dataset, "__getitems__", None)
        samples = fetch_many(wanted) if fetch_many else [self.dataset[i] for i in wanted]
        batch = default_collate(samples)
        return tuple(batch) if isinstance(samples[0], tuple) and isinstance(batch, list) else batch


def as_dataset(obj: Any) -> Dataset:
    """Wrap the data that a task returned as a Dataset."""
    if callable(getattr(obj, "batch", None)) and hasattr(obj, "__len__"):
        dataset: Dataset = obj
        return dataset
    if isinstance(obj, tuple):
        if obj and all(isinstance(a, np.ndarray | Tensor) and a.ndim > 0 for a in obj):
            return ArrayDataset(*obj)
    elif type(obj) is TensorDataset:
        return ArrayDataset(*obj.tensors)
    elif isinstance(obj, IterableDataset):
        raise UserError(
            f"{type(obj).__name__} is an iterable dataset, but samples are read by index: "
            "return one with __getitem__ and __len__"
        )
    elif hasattr(obj, "__getitem__") and hasattr(obj, "__len__") and not isinstance(obj, str | bytes | dict):
        return MapDataset(obj)
    raise UserError(
        f"cannot read samples from {type(obj).__name__}: return an object with batch(indices) and __len__, a map-style "
        "torch dataset (__getitem__ and __len__), or a tuple of tensors or arrays of one length"
    )
