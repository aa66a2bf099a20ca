"""Handwritten digits from IDX files: 60,000 for training, 10,000 for validation.

An IDX file is a big-endian header (two zero bytes, the element type, the number of dimensions, each dimension) and
then raw elements. The files may be gzipped or not. Pixels stay bytes in memory; a batch is made float and normalised
when it is read.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from smolcluster.config.schema import DataConfig
from smolcluster.data.cache import Progress, cache_root
from smolcluster.data.dataset import ArrayDataset
from smolcluster.data.download import fetch, missing_files
from smolcluster.errors import UserError

MEAN, STD = 0.1307, 0.3081
UNSIGNED_BYTE = 8
MAX_FILE_BYTES = 256 * 1024**2
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")
SPLITS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
# Of the gzipped files as first published.
SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


def open_mnist(config: DataConfig, *, progress: Progress | None = None) -> tuple[ArrayDataset, ArrayDataset]:
    """Return training and validation data. A batch is (images, labels): float32 (B, 784) and int64 (B,)."""
    if config.root is not None and not Path(config.root).expanduser().is_dir():
        raise UserError(
            f"data.root: there is no folder {config.root}; it should hold the MNIST files, or be null for a download"
        )
    folder = Path(config.root).expanduser() if config.root is not None else cache_root(config.cache_dir) / "mnist"
    train, validation = (
        _open_split(images, labels, folder, config=config, progress=progress) for images, labels in SPLITS.values()
    )
    return train, validation


def _open_split(
    images_name: str, labels_name: str, folder: Path, *, config: DataConfig, progress: Progress | None
) -> ArrayDataset:
    images_file, labels_file = (
        _locate(name, folder, config=config, progress=progress) for name in (images_name, labels_name)
    )
    images, labels = read_idx(images_file, ndim=3), read_idx(labels_file, ndim=1)
    if len(images) != len(labels):
        raise UserError(
            f"{images_file} has {len(images)} images but {labels_file} has {len(labels)} labels; they are not a pair"
        )
    return ArrayDataset(images.reshape(len(images), -1), labels, transform=_normalise)


def _locate(name: str, folder: Path, *, config: DataConfig, progress: Progress | None) -> Path:
    # Kaggle's copy writes a dot where the others have a dash.
    names = [stem + suffix for stem in (name, name.replace("-idx", ".idx")) for suffix in ("", ".gz")]
    for place in (folder, folder / "raw", folder / "MNIST" / "raw"):
        for candidate in names:
            if (place / candidate).is_file():
                return place / candidate
    if not config.download:
        raise missing_files("MNIST", folder, [name, name + ".gz"])
    return fetch(
        [f"{mirror}/{name}.gz" for mirror in MIRRORS],
        folder / f"{name}.gz",
        sha256=SHA256[name],
        progress=progress,
        max_bytes=MAX_FILE_BYTES,
    )


def read_idx(path: Path, *, ndim: int) -> npt.NDArray[np.uint8]:
    data, whole = _read_bytes(path)
    header_bytes = 4 + 4 * ndim
    magic = bytes((0, 0, UNSIGNED_BYTE, ndim))
    if data[:4] != magic:
        raise UserError(
            f"{path} starts with {data[:4].hex(' ') or 'nothing'}, not {magic.hex(' ')}: "
            f"it is not an IDX file of {ndim}-dimensional bytes"
        )
    shape = tuple(int(n) for n in np.frombuffer(data[4:header_bytes].ljust(4 * ndim, b"\0"), dtype=">u4"))
    expected_bytes = header_bytes + math.prod(shape)
    if len(data) != expected_bytes:
        raise UserError(
            f"{path} holds {len(data)} bytes, but its header says {expected_bytes}: it is damaged; "
            "delete it and fetch it again"
        )
    if not whole:
        raise UserError(f"{path} lacks the end of its gzip stream: it is damaged; delete it and fetch it again")
    return np.frombuffer(data, dtype=np.uint8, offset=header_bytes).reshape(shape)


def _read_bytes(path: Path) -> tuple[bytes, bool]:
    """Return the uncompressed contents, and whether they are complete."""
    try:
        packed = path.read_bytes()
        if path.suffix != ".gz":
            return packed, True
        unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        data = unpacker.decompress(packed, MAX_FILE_BYTES)
        return data, unpacker.eof
    except (OSError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}; delete it and fetch it again") from error


def _normalise(images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Scale pixels to mean 0 and variance 1 over the training set."""
    return images.to(torch.float32).div_(255).sub_(MEAN).div_(STD), labels.to(torch.int64)
