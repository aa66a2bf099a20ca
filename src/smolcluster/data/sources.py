"""Text sources: one for training and, if the dataset has a validation split, one for validation.

A `TextSource` can be read repeatedly, in pieces, and has a content hash, by which the tokens of an unchanged text are found
in the cache.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolcluster.config.schema import DataConfig
from smolcluster.data.cache import Progress, cache_root
from smolcluster.data.chunks import file_chunks, hash_files, text_chunks
from smolcluster.data.download import Archive, fetch_members, missing_files
from smolcluster.data.names import HF_PREFIX, TEXT_DATASETS, is_text
from smolcluster.errors import MissingExtra, UserError

TEXT_SUFFIXES = frozenset(
    (".txt", ".text", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".go", ".rs")
)
BETWEEN_FILES = "\n\n"

WIKITEXT_TRAIN = ("wiki.train.raw", "wiki.train.tokens", "wiki.train.txt", "train.txt")
WIKITEXT_VAL = ("wiki.valid.raw", "wiki.valid.tokens", "wiki.valid.txt", "valid.txt", "validation.txt", "val.txt")
SNLI_TRAIN = ("snli_1.0_train.jsonl", "snli_1.0_train.txt")
SNLI_VAL = ("snli_1.0_dev.jsonl", "snli_1.0_dev.txt")
ARCHIVES = {
    "wikitext-2": Archive(
        urls=(
            "https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
            "https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
        ),
        sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
        members=("wikitext-2-raw/wiki.train.raw", "wikitext-2-raw/wiki.valid.raw"),
    ),
    "wikitext-103": Archive(
        urls=(
            "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
            "https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip",
        ),
        sha256="91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
        members=("wikitext-103-raw/wiki.train.raw", "wikitext-103-raw/wiki.valid.raw"),
    ),
    "snli": Archive(
        urls=("https://nlp.stanford.edu/projects/snli/snli_1.0.zip",),
        sha256="afb3d70a5af5d8de0d9d81e2637e0fb8c22d1235c2749d83125ca43dab0dbd3e",
        members=("snli_1.0/snli_1.0_train.jsonl", "snli_1.0/snli_1.0_dev.jsonl"),
    ),
}


@dataclass(frozen=True)
class TextSource:
    """One text. `total_bytes`: its size, for progress; None if unknown."""

    name: str
    chunks: Callable[[], Iterator[str]]
    content_hash: Callable[[], str]
    total_bytes: int | None


@dataclass(frozen=True)
class Sources:
    """`validation` None: hold out a part of the training text."""

    train: TextSource
    validation: TextSource | None

    def whole_text(self) -> str:
        """Return all text, for a tokenizer that is made from it."""
        parts = [self.train] if self.validation is None else [self.train, self.validation]
        return "".join(piece for source in parts for piece in source.chunks())


def find_sources(config: DataConfig, *, progress: Progress | None = None) -> Sources:
    """Return the text of `config.name`; downloads it if it is missing and `config.download` is true."""
    if not is_text(config.name):
        raise UserError(
            f"data.name: '{config.name}' is not text; text datasets: {', '.join(TEXT_DATASETS)}, hf:OWNER/NAME"
        )
    if config.name.startswith(HF_PREFIX):
        return _hugging_face(config)
    if config.name == "embedded":
        return Sources(_embedded(), None)
    if config.name == "text":
        return Sources(_files("text", _text_files(config.root)), None)
    if config.name == "snli":
        train, val = _find_split(config, "snli", SNLI_TRAIN, SNLI_VAL, progress=progress)
        return _splits(train, val, lambda part, file: _snli(f"snli {part}", file))
    corpus = "wikitext-103" if config.name == "wikitext-103" else "wikitext-2"
    train, val = _find_split(config, corpus, WIKITEXT_TRAIN, WIKITEXT_VAL, progress=progress)
    return _splits(train, val, lambda part, file: _files(f"{corpus} {part}", [file]))


def _splits(train: Path | None, val: Path | None, source: Callable[[str, Path], TextSource]) -> Sources:
    """Return the sources of both files; if there is only one, a part of it is held out."""
    if train is not None and val is not None:
        return Sources(source("train", train), source("validation", val))
    alone = train if train is not None else val
    assert alone is not None
    return Sources(source("train", alone), None)


# -- Text that every Python carries


def _embedded() -> TextSource:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError(
            "this Python comes without pydoc_data, the embedded text; set data.name=text and data.root to a text file"
        ) from error
    text = BETWEEN_FILES.join(topics[name] for name in sorted(topics)).encode()
    return TextSource(
        name="embedded text",
        chunks=lambda: text_chunks([text], place="pydoc_data.topics"),
        content_hash=lambda: hashlib.sha256(text).hexdigest(),
        total_bytes=len(text),
    )


# -- Files


def _text_files(root: str | None) -> list[Path]:
    """Return the file, or all text files below the folder sorted by name, except hidden ones."""
    if root is None:
        raise UserError("data.name 'text' needs data.root: a text file, or a folder of text files")
    path = Path(root)
    with contextlib.suppress(RuntimeError):  # `~` of an unknown user: no such folder
        path = path.expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"data.root: there is no file or folder {path}")
    names = {f.relative_to(path): f for f in path.rglob("*") if f.suffix.lower() in TEXT_SUFFIXES and f.is_file()}
    visible = {name.as_posix(): f for name, f in names.items() if not any(part.startswith(".") for part in name.parts)}
    if not visible:
        raise UserError(
            f"data.root: the folder {path} has no text files; known endings: {' '.join(sorted(TEXT_SUFFIXES))}"
        )
    return [visible[name] for name in sorted(visible)]


def _files(name: str, files: list[Path]) -> TextSource:
    def chunks() -> Iterator[str]:
        for number, file in enumerate(files):
            if number:
                yield BETWEEN_FILES
            yield from file_chunks(file)

    size = sum(f.stat().st_size for f in files) + len(BETWEEN_FILES) * (len(files) - 1)
    return TextSource(name=name, chunks=chunks, content_hash=lambda: hash_files(*files), total_bytes=size)


def _find_split(
    config: DataConfig, corpus: str, train: tuple[str, ...], val: tuple[str, ...], *, progress: Progress | None
) -> tuple[Path | None, Path | None]:
    """Return the training and validation file of a corpus; one of them may be missing, not both."""
    folder = Path(config.root).expanduser() if config.root is not None else cache_root(config.cache_dir) / corpus
    if config.root is not None and not folder.is_dir():
        raise UserError(f"data.root: there is no folder {folder}; it should hold {corpus}, or be null for a download")
    archive = ARCHIVES[corpus]
    inner = archive.members[0].split("/", 1)[0]
    places = [folder, *(folder / name for name in dict.fromkeys((corpus, inner)))]
    found = [next((p / n for p in places for n in names if (p / n).is_file()), None) for names in (train, val)]
    if found == [None, None]:
        if not config.download:
            raise missing_files(corpus, folder, (*train, *val))
        found = [*fetch_members(archive, folder, progress=progress)]
    return found[0], found[1]


# -- SNLI: pairs of sentences


def _snli(name: str, file: Path) -> TextSource:
    return TextSource(
        name=name,
        chunks=lambda: text_chunks(_snli_lines(file), place=str(file)),
        content_hash=lambda: f"snli-lines-{hash_files(file)}",
        total_bytes=None,
    )


def _snli_lines(file: Path) -> Iterator[bytes]:
    """Format each pair as a line that a language model can complete; pairs without a gold label are left out.

    premise: A man inspects a uniform. hypothesis: The man is sleeping. label: contradiction
    """
    lines: list[str] = []
    with file.open(encoding="utf-8", newline="\n") as rows:
        table = csv.DictReader(rows, delimiter="\t", quoting=csv.QUOTE_NONE)
        pairs: Iterable[dict[str, str]] = map(json.loads, rows) if file.suffix == ".jsonl" else table
        try:
            for pair in pairs:
                premise, hypothesis, label = (pair[key].strip() for key in ("sentence1", "sentence2", "gold_label"))
                if label != "-":
                    lines.append(f"premise: {premise} hypothesis: {hypothesis} label: {label}\n")
                if len(lines) == 8192:
                    yield "".join(lines).encode()
                    lines = []
        except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
            raise UserError(f"{file} is not an SNLI file ({type(error).__name__}: {error}); fetch it again") from error
    yield "".join(lines).encode()


# -- Hugging Face datasets


def _hugging_face(config: DataConfig) -> Sources:
    """`hf:OWNER/NAME` or `hf:OWNER/NAME:CONFIG`; the splits train and validation, or train alone."""
    name, _, subset = config.name.removeprefix(HF_PREFIX).partition(":")
    if not name:
        raise UserError(f"data.name: '{config.name}' names no dataset; write hf:OWNER/NAME or hf:OWNER/NAME:CONFIG")
    if not config.download:
        os.environ["HF_HUB_OFFLINE"] = "1"  # the package reads it once, when it is imported
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("datasets", extra="data", purpose=f"the dataset {config.name}") from error
    try:
        splits = datasets.load_dataset(
            name, subset or None, cache_dir=str(cache_root(config.cache_dir) / "huggingface")
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"cannot load the Hugging Face dataset {name}: {error}") from error
    if "train" not in splits:
        raise UserError(f"the Hugging Face dataset {name} has no split 'train', only: {', '.join(splits)}")
    validation = next((splits[s] for s in ("validation", "valid", "dev") if s in splits), None)
    return Sources(
        _hugging_face_split(f"{name} train", splits["train"]),
        None if validation is None else _hugging_face_split(f"{name} validation", validation),
    )


def _hugging_face_split(name: str, rows: Any) -> TextSource:
    strings = [
        column
        for column, feature in rows.features.items()
        if getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    if not strings:
        raise UserError(f"the Hugging Face dataset {name} has no column of text, only: {', '.join(rows.features)}")
    column = "text" if "text" in strings else strings[0]

    def blocks() -> Iterator[bytes]:
        for batch in rows.select_columns([column]).iter(batch_size=1000):
            yield "".join(f"{text}{BETWEEN_FILES}" for text in batch[column] if text).encode()

    # The package keeps a fingerprint of a dataset's content for its own cache.
    identity = f"{column} {rows.num_rows} {rows._fingerprint}"
    return TextSource(
        name=name,
        chunks=lambda: text_chunks(blocks(), place=name),
        content_hash=lambda: f"hf-{identity}",
        total_bytes=None,
    )
