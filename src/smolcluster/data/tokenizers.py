"""Tokenizers: bytes, characters, GPT-2's BPE, or any Hugging Face tokenizer.json.

`encode` returns an array of the smallest dtype that holds the vocabulary; token files have the same dtype.
`fingerprint` identifies the exact mapping and is part of cache keys. Ids outside the vocabulary (a model's output layer may
be padded) decode to the replacement character; Hugging Face's tokenizers skip them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from smolcluster.data.cache import Encoder, cache_root
from smolcluster.data.chunks import hash_files
from smolcluster.errors import MissingExtra, UserError, unknown_name

TOKENIZERS = ("bytes", "chars", "gpt2")
GPT2_NAMES = ("gpt2", "openai-community/gpt2")
# OpenAI's names, and Hugging Face's for the same two.
GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# GPT-2's pre-tokenization: contractions, words with their leading space, numbers, punctuation, and runs of blanks (without
# the last one if a word follows, which it belongs to).
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer(Encoder, Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class BytewiseTokenizer(Encoder, Protocol):
    """A tokenizer whose tokens are the same bytes in any context: all here but Hugging Face's."""

    def token_bytes(self, token: int) -> bytes: ...


def _dtype_for(vocab_size: int) -> np.dtype[Any]:
    return np.min_scalar_type(max(vocab_size - 1, 0))


class ByteTokenizer:
    """The 256 values of a UTF-8 byte: no files, no unknown text."""

    name = "bytes"
    vocab_size = 256
    fingerprint = "bytes"
    dtype: np.dtype[Any] = np.dtype(np.uint8)

    def encode(self, text: str) -> npt.NDArray[Any]:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if 0 <= token < 256 else UNKNOWN.encode()


class CharTokenizer:
    """The characters of one text, sorted. Text with any other character cannot be encoded."""

    name = "chars"

    def __init__(self, chars: str) -> None:
        self.chars = "".join(sorted(set(chars)))
        if not self.chars:
            raise UserError("a tokenizer of characters needs a text that is not empty")
        self.vocab_size = len(self.chars)
        self.dtype = _dtype_for(self.vocab_size)
        self.fingerprint = "chars-" + hashlib.sha256(self.chars.encode("utf-8", "surrogatepass")).hexdigest()
        self._codes = _code_points(self.chars)

    def encode(self, text: str) -> npt.NDArray[Any]:
        codes = _code_points(text)
        ids = np.minimum(np.searchsorted(self._codes, codes), self.vocab_size - 1)
        unknown = np.flatnonzero(self._codes[ids] != codes)
        if len(unknown):
            place = int(unknown[0])
            raise UserError(
                f"the character {text[place]!r} at position {place} is not among the {self.vocab_size} characters "
                "this tokenizer was made from; "
                "leave it out, or train with data.tokenizer=bytes"
            )
        return ids.astype(self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.chars[i] if 0 <= i < self.vocab_size else UNKNOWN for i in ids)

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode("utf-8", errors="replace")

    def to_json(self) -> str:
        return json.dumps({"type": "smolcluster-chars", "chars": self.chars})

    @classmethod
    def from_json(cls, text: str) -> CharTokenizer:
        """Restore from `to_json`. Raises ValueError for invalid input."""
        stored = json.loads(text)
        if (
            not isinstance(stored, dict)
            or stored.get("type") != "smolcluster-chars"
            or not isinstance(stored.get("chars"), str)
        ):
            raise ValueError("not a stored tokenizer of characters")
        return cls(stored["chars"])


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


class Gpt2Tokenizer:
    """Byte-level BPE in GPT-2's format, encoded by tiktoken. `<|endoftext|>` in a text is ordinary text."""

    name = "gpt2"

    def __init__(self, encoder_file: Path, merges_file: Path) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise MissingExtra("tiktoken", extra="data", purpose="the gpt2 tokenizer") from error
        ranks, special = _gpt2_ranks(encoder_file, merges_file)
        self._encoding = tiktoken.Encoding(
            name="gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self._bytes = {rank: token for token, rank in ranks.items()} | {
            rank: token.encode() for token, rank in special.items()
        }
        self.vocab_size = max(self._bytes) + 1
        self.dtype = _dtype_for(self.vocab_size)
        self.fingerprint = "gpt2-" + hash_files(encoder_file, merges_file)

    def encode(self, text: str) -> npt.NDArray[Any]:
        return np.array(self._encoding.encode_ordinary(text), dtype=self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return self._bytes.get(token, UNKNOWN.encode())

    @property
    def end_of_text(self) -> int | None:
        """The end-of-text token, or None."""
        return next((token for token, spelled in self._bytes.items() if spelled == END_OF_TEXT.encode()), None)


def printable_bytes() -> dict[str, int]:
    """Return the byte of each printable character that GPT-2's files use for bytes.

    Printable Latin-1 characters are themselves; the other bytes, in order, are the characters from 256 on.
    """
    themselves = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [b for b in range(256) if b not in themselves]
    return {chr(b): b for b in themselves} | {chr(256 + n): b for n, b in enumerate(others)}


def _gpt2_ranks(encoder_file: Path, merges_file: Path) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return token bytes -> id, and the special tokens. The two files must agree: merge n makes token 256 + n."""
    wrong = f"{encoder_file} and {merges_file} are not a pair of GPT-2 tokenizer files"
    table = printable_bytes()
    try:
        encoder = json.loads(encoder_file.read_text(encoding="utf-8"))
        special = {END_OF_TEXT: encoder.pop(END_OF_TEXT)} if END_OF_TEXT in encoder else {}
        ranks = {bytes(table[c] for c in token): int(rank) for token, rank in encoder.items()}
        merges = [
            line
            for line in merges_file.read_text(encoding="utf-8").split("\n")
            if line and not line.startswith("#version")
        ]
        for number, merge in enumerate(merges, start=256):
            if encoder["".join(merge.split(" "))] != number:
                raise UserError(f"{wrong}: merge '{merge}' should make token {number}; download both again")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{wrong} ({type(error).__name__}: {error}); download both again") from error
    if len(ranks) != 256 + len(merges):
        raise UserError(
            f"{wrong}: {len(merges)} merges and 256 bytes do not make {len(ranks)} tokens; download both again"
        )
    return ranks, special


class HuggingFaceTokenizer:
    """A tokenizer.json, encoded by the `tokenizers` package. No special tokens are added to the text."""

    def __init__(self, file: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise MissingExtra("tokenizers", extra="data", purpose=f"the tokenizer {file}") from error
        definition = file.read_text(encoding="utf-8")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:
            raise UserError(f"{file} is not a tokenizer.json: {error}") from error
        self.name = str(file)
        # Numbers may have holes, so the size is the largest number plus one.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
        self.dtype = _dtype_for(self.vocab_size)
        self.fingerprint = "hf-" + hash_files(file)

    def encode(self, text: str) -> npt.NDArray[Any]:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
        return text


def find_gpt2_files(*folders: Path | None) -> tuple[Path, Path] | None:
    """Return the first folder that has both files, under OpenAI's or Hugging Face's names."""
    for folder in folders:
        for encoder, merges in GPT2_FILES if folder is not None else ():
            if folder is not None and (folder / encoder).is_file() and (folder / merges).is_file():
                return folder / encoder, folder / merges
    return None


def gpt2_cache_folder(cache_dir: str | None = None) -> Path:
    return cache_root(cache_dir) / "gpt2"


def load_tokenizer(
    name: str,
    *,
    root: Path | None,
    text: Callable[[], str] | None = None,
    cache_dir: str | None = None,
) -> Tokenizer:
    """bytes, chars (of `text`), gpt2 (files in `root` or the cache folder), or a tokenizer.json or its folder."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "chars":
        if text is None:
            raise UserError(
                "the tokenizer 'chars' is made from the training text, and there is none here; "
                "give the path of the stored tokenizer"
            )
        return CharTokenizer(text())
    if name in GPT2_NAMES:
        cache = gpt2_cache_folder(cache_dir)
        files = find_gpt2_files(root, cache)
        if files is None:
            places = " or ".join(str(p) for p in (root, cache) if p is not None)
            raise UserError(
                f"the gpt2 tokenizer needs encoder.json and vocab.bpe (or vocab.json and merges.txt, the same files): "
                f"put both in {places}, "
                "name their folder in data.tokenizer_root, or use data.tokenizer=bytes"
            )
        return Gpt2Tokenizer(*files)
    return _load_path(name)


def _load_path(name: str) -> Tokenizer:
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            path = path / "tokenizer.json"
        elif (files := find_gpt2_files(path)) is not None:
            return Gpt2Tokenizer(*files)
        else:
            raise UserError(f"data.tokenizer: the folder {path} has no tokenizer.json, nor encoder.json and vocab.bpe")
    if path.is_file():
        try:
            return CharTokenizer.from_json(path.read_text(encoding="utf-8"))
        except ValueError:
            return HuggingFaceTokenizer(path)
    if "/" in name or "\\" in name or name.endswith(".json"):
        raise UserError(
            f"data.tokenizer: there is no file or folder {path}; "
            f"give a path to a tokenizer.json, or one of: {', '.join(TOKENIZERS)}"
        )
    raise unknown_name("tokenizer", name, TOKENIZERS)
