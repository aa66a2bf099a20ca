"""Vocabularies: tokens and their bytes.

    BytewiseVocabulary    a tokenizer of data/tokenizers.py: bytes, chars, gpt2
    JsonVocabulary        a tokenizer.json, run by the `tokenizers` package
    gguf_vocabulary       the header of a GGUF file, converted to a tokenizer.json

An added token, such as `<|im_end|>`, is not made by merges. The package would recognize them in any text; `encode` does not:
conversation.py decides where they are recognized.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from smolcluster.data import tokenizers as ours
from smolcluster.data.tokenizers import GPT2_PATTERN, UNKNOWN, printable_bytes
from smolcluster.errors import UserError, needed

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes a space


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    text: str
    token: int
    special: bool  # never shown
    takes_left: bool = False  # lstrip: strips blanks on this side
    takes_right: bool = False


class Vocabulary(Protocol):
    @property
    def size(self) -> int: ...
    @property
    def markers(self) -> Sequence[AddedToken]: ...
    @property
    def drops_space(self) -> bool:
        """Return whether decoding drops the space before the first word."""

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Encode text without added tokens. `begins`: at the beginning of the text."""

    def token_bytes(self, token: int) -> bytes: ...


class BytewiseVocabulary:
    """A tokenizer of data/tokenizers.py: each token has fixed bytes; no added tokens."""

    markers: Sequence[AddedToken] = ()
    drops_space = False

    def __init__(self, tokenizer: ours.BytewiseTokenizer) -> None:
        self._tokenizer, self.size = tokenizer, tokenizer.vocab_size

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)


class JsonVocabulary:
    """A tokenizer.json. Raises UserError if it is invalid or its decoder is not supported."""

    def __init__(self, definition: Mapping[str, Any], *, where: str) -> None:
        with needed(extra="serve", purpose=f"the tokenizer of {where}"):
            from tokenizers import Tokenizer
        try:
            plain = {**definition, "added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
            self._first = Tokenizer.from_str(json.dumps(plain))
            later = _without_prefix(plain)
            self._later = self._first if later == plain else Tokenizer.from_str(json.dumps(later))
            self.markers = _markers(definition.get("added_tokens") or [])
            spelling = _Spelling(definition.get("decoder"))
            tokens = {token: spelling.token_bytes(text) for text, token in self._first.get_vocab().items()}
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        except Exception as error:
            raise UserError(f"{where}: its tokenizer is damaged or not supported: {error}") from error
        tokens |= {marker.token: marker.text.encode() for marker in self.markers}
        self._tokens = tokens
        unknown = definition["model"].get("unk_token")
        self._kept = {marker.token: marker.text for marker in self.markers if marker.special and marker.text != unknown}
        self.size = max(tokens, default=-1) + 1
        self.drops_space = spelling.drops_space

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        tokenizer = self._first if begins else self._later
        try:
            # A batch of one: only `encode_batch` releases the GIL.
            ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        except Exception as error:  # the library raises no other type
            raise UserError(f"cannot tokenize the text: {error}") from error
        if not self._kept.keys().isdisjoint(ids):  # a vocabulary with a special token as an ordinary one
            found = next(self._kept[token] for token in ids if token in self._kept)
            raise UserError(f"the text contains {found!r}, a special token of this model; remove it")
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self._tokens.get(token, UNKNOWN.encode())


def _markers(added: Any) -> tuple[AddedToken, ...]:
    found = [
        AddedToken(
            text=str(one["content"]),
            token=int(one["id"]),
            special=bool(one.get("special")),
            takes_left=bool(one.get("lstrip")),
            takes_right=bool(one.get("rstrip")),
        )
        for one in added
    ]
    if any(not marker.text or marker.token < 0 for marker in found):
        raise UserError("its tokenizer has an added token without content or id")
    return tuple(found)


def _without_prefix(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition for text that does not begin: without the space before the first word."""

    def changed(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        if part.get("type") == "Sequence":
            return {**part, "pretokenizers": [changed(one) for one in part.get("pretokenizers", [])]}
        never = part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first"
        return {**part, "prepend_scheme": "never"} if never else part

    return {**definition, "pre_tokenizer": changed(definition.get("pre_tokenizer"))}


class _Spelling:
    """The bytes of tokens, according to the decoder."""

    def __init__(self, decoder: Any) -> None:
        steps = (
            decoder.get("decoders", []) if isinstance(decoder, dict) and decoder["type"] == "Sequence" else [decoder]
        )
        self.drops_space = False
        self._replaced: list[tuple[str, str]] = []
        self._joined = self._byte_tokens = False
        self._bytes: dict[str, int] | None = None
        for step in steps:
            self._take(step)

    def _take(self, step: Any) -> None:
        kind = None if step is None else step["type"]
        if kind is None:  # words, joined with spaces
            self._joined = self.drops_space = True
        elif kind == "ByteLevel":
            self._bytes = printable_bytes()
        elif kind == "ByteFallback":
            self._byte_tokens = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self._replaced.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self._replaced.append((step["replacement"], " "))
            self.drops_space = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
        elif kind == "Strip" and step["content"] == " " and step["start"] <= 1 and not step["stop"]:
            self.drops_space = step["start"] == 1
        elif kind != "Fuse":
            raise UserError(f"its tokenizer has the decoder {kind}, which is not supported")

    def token_bytes(self, text: str) -> bytes:
        if self._bytes is not None:
            if all(character in self._bytes for character in text):
                return bytes(self._bytes[character] for character in text)
            return text.encode()
        if self._byte_tokens and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)):
            return bytes.fromhex(byte[1])
        for old, new in self._replaced:
            text = text.replace(old, new)
        return (f" {text}" if self._joined else text).encode()


# GGUF


NORMAL, UNKNOWN_TOKEN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Characters in all splits of all tokens: 16 million for 256,000 tokens of 8 characters.
_MAX_SPLIT = 1 << 26

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenizer patterns by `tokenizer.ggml.pre`, applied one after the other.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2_PATTERN,),
    "smollm": (r"\p{N}", GPT2_PATTERN),
    "llama-bpe": (_LLAMA3_PATTERN,),
    "qwen2": (_LLAMA3_PATTERN.replace("{1,3}", ""),),
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        GPT2_PATTERN.removesuffix(r"|\s+"),
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ),
}


_PLAIN_MARKER = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def gguf_vocabulary(metadata: Mapping[str, Any], *, where: str) -> JsonVocabulary:
    """Return the tokenizer in the header of a GGUF file."""
    found = JsonVocabulary(gguf_definition(metadata, where=where), where=where)
    found.size = len(metadata["tokenizer.ggml.tokens"])  # unused tokens included
    return found


def gguf_definition(metadata: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the tokenizer in the header of a GGUF file as the contents of a tokenizer.json."""
    kind = metadata.get("tokenizer.ggml.model")
    try:
        if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
            raise UserError(f"tokenizer.ggml.model is {kind!r}, which is not supported; known: gpt2, llama")
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        types = _numbers(metadata, "tokenizer.ggml.token_type", count=len(tokens), default=NORMAL)
        model = (_bpe_model if kind == "gpt2" else _sentencepiece_model)(metadata, tokens, types)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    added = [
        {"id": token, "content": text, "special": types[token] != USER_DEFINED, **_PLAIN_MARKER}
        for token, text in enumerate(tokens)
        if text and types[token] in (CONTROL, UNKNOWN_TOKEN, USER_DEFINED)
    ]
    return {"version": "1.0", "added_tokens": added, **model}


def _bpe_model(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    """Return a byte-level BPE model, as GPT-2's."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _PATTERNS:
        raise UserError(f"tokenizer.ggml.pre is {pre!r}, which is not supported; known: {', '.join(_PATTERNS)}")
    merges = [merge.split(" ") for merge in _strings(metadata, "tokenizer.ggml.merges")]
    vocabulary = {text: token for token, text in enumerate(tokens) if types[token] == NORMAL}
    # Rare bytes may be missing, and are dropped from texts; ASCII may not.
    lost = next(
        (letter for letter, byte in printable_bytes().items() if 32 <= byte < 127 and letter not in vocabulary), None
    )
    if lost is not None:
        raise UserError(f"tokenizer.ggml.tokens has no token for the letter {lost!r}")
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise UserError(
                f"tokenizer.ggml.merges has {' '.join(merge)!r}, which does not merge two tokens into a third"
            )
    cuts = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in _PATTERNS[pre]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": pre == "llama-bpe"},
    }


def _sentencepiece_model(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    """Return a sentencepiece model: BPE merges in order of the scores."""
    scores = _numbers(metadata, "tokenizer.ggml.scores", count=len(tokens), default=None)
    normal = {text: token for token, text in enumerate(tokens) if types[token] == NORMAL}
    others = {text: token for token, text in enumerate(tokens) if types[token] in (UNKNOWN_TOKEN, BYTE)}
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in others]
    unknown = next((text for text, token in others.items() if types[token] == UNKNOWN_TOKEN), None)
    if missing:
        raise UserError(f"tokenizer.ggml.tokens has no token for the byte {missing[0]}")
    _check_splits(normal)
    merges = []
    for text in sorted(normal, key=lambda one: -scores[normal[one]]):  # of equal scores, the first token first
        splits = ((text[:at], text[at:]) for at in range(1, len(text)))
        pairs = [pair for pair in splits if pair[0] in normal and pair[1] in normal]
        merges += sorted(pairs, key=lambda pair: (normal[pair[0]], normal[pair[1]]))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = flag(metadata, "tokenizer.ggml.add_space_prefix", default=True)
    steps = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": int(prefix), "stop": 0},
    ]
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] * prefix), spaces],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            "type": "BPE",
            "vocab": normal | others,
            "merges": merges,
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _check_splits(tokens: Collection[str]) -> None:
    """Bound the time and memory of splitting every token at every position."""
    if sum(len(text) ** 2 for text in tokens) > _MAX_SPLIT:
        longest = max(tokens, key=len)
        raise UserError(
            f"tokenizer.ggml.tokens are too long: the longest, {longest[:16]!r}..., has {len(longest)} characters"
        )


def flag(metadata: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Read a boolean of the header of a GGUF file."""
    value = metadata.get(key, default)
    if not isinstance(value, int):
        raise UserError(f"{key} is {value!r}, which is neither true nor false")
    return bool(value)


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UserError(f"{key} is missing, or not a list of strings: the file has no usable tokenizer")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, *, count: int, default: int | None) -> Any:
    value = metadata.get(key)
    if value is None and default is not None:
        return [default] * count
    if not isinstance(value, np.ndarray) or len(value) != count:
        raise UserError(f"{key} is missing, or does not have {count} values")
    return value.tolist()
