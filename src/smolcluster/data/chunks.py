"""Split long text into pieces that can be tokenized one after the other.

A piece ends where an ASCII letter or digit is followed by a space or a line break. No token of GPT-2's pre-tokenizer (nor
of its successors') crosses such a place, so the pieces give the same tokens as the whole text. Splitting at line breaks
would not: a run of blanks is one token at the end of a text and two before a word.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from smolcluster.errors import UserError

CHUNK_BYTES = 1024 * 1024
WORDLESS_BYTES = 4 * CHUNK_BYTES
_WORD_END = re.compile(rb"[0-9A-Za-z](?=[ \n])")


def text_chunks(blocks: Iterable[bytes], *, place: str, wordless_bytes: int = WORDLESS_BYTES) -> Iterator[str]:
    """Decode blocks of UTF-8 of any size into text pieces of about the same size.

    If `wordless_bytes` have no such place (Chinese, say), a piece ends before a line break: then at worst one run of
    blanks is tokenized differently.
    """
    rest, offset = b"", 0
    for block in blocks:
        rest += block
        cut = _last_word_end(rest)
        if not cut and len(rest) >= wordless_bytes:
            cut = max(rest.rfind(b"\n"), 0)
        if cut:
            yield _decode(rest[:cut], offset=offset, place=place)
            offset += cut
            rest = rest[cut:]
    if rest:
        yield _decode(rest, offset=offset, place=place)


def file_chunks(path: Path) -> Iterator[str]:
    yield from text_chunks(file_blocks(path), place=str(path))


def file_blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while block := file.read(CHUNK_BYTES):
                yield block
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def hash_files(*files: Path) -> str:
    """Hash the hashes of the files, so that moving text from one file to the next changes the result."""
    digest = hashlib.sha256()
    for file in files:
        content = hashlib.sha256()
        for block in file_blocks(file):
            content.update(block)
        digest.update(content.digest())
    return digest.hexdigest()


def _last_word_end(data: bytes) -> int:
    """Return the end of the last word that a blank follows, or 0. It is nearly always close to the end."""
    for size in (4096, len(data)):
        ends = [match.end() for match in _WORD_END.finditer(data, max(len(data) - size, 0))]
        if ends:
            return ends[-1]
    return 0


def _decode(data: bytes, *, offset: int, place: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {offset + error.start}; "
            "convert it to UTF-8, or leave it out"
        ) from error
