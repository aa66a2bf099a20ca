"""Text to tokens and back: prompts, conversations, and incremental detokenization.

    prompt         text -> tokens, with bos if the model wants it
    chat           messages -> tokens, through the model's chat template
    detokenizer    tokens, one by one -> text; incomplete UTF-8 characters are held back

**Only the template may write special tokens.** `<|im_end|>` typed by a user is encoded as ten characters. The template is
rendered with two private-use characters that occur nowhere else: one before every special token in the text of users, one
around each message, so that no special token is made of two halves. The remaining matches were written by the template. Both
characters are removed, and the text between two special tokens is encoded in one piece: a conversation without special tokens
in its messages has exactly the tokens of `transformers`. Added tokens that are not special to conversations, such as runs of
spaces, are recognized in any text.

A model without a template (a smolcluster run) gets the contents of the messages, one per line.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from smolcluster.errors import UserError
from smolcluster.serve.text.chat_template import check_template
from smolcluster.serve.text.rendering import render_in_child
from smolcluster.serve.text.vocabulary import AddedToken, Vocabulary

_ROLE = re.compile(r"[A-Za-z][A-Za-z_]{0,31}")
_PRIVATE = range(0xE000, 0xF900)  # private-use code points


class ChatTokenizer:
    """The tokenizer of a model, with its chat template. Stateless and thread-safe; raises UserError for invalid text."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        template: str | None = None,
        first: Sequence[int] = (),
        first_in_chat: bool = False,
        stop_tokens: frozenset[int] = frozenset(),
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`first`: tokens before every prompt, and with `first_in_chat` before conversations whose template leaves them out.
        `names`: bos_token and the like, for the template."""
        self.vocab_size = vocabulary.size
        self.stop_tokens = stop_tokens
        self._vocabulary = vocabulary
        self._template = None if template is None else check_template(template)  # reports syntax errors early
        self._first, self._first_in_chat = list(first), first_in_chat or template is None
        self._names = dict(names or {})
        self._hidden = frozenset(marker.token for marker in vocabulary.markers if marker.special) | stop_tokens
        self._markers = {marker.text: marker for marker in vocabulary.markers}
        written = "".join((template or "", *self._names.values()))
        reserved = [m for m in self._markers.values() if m.text.strip() and (m.special or m.text in written)]
        self._all, self._reserved = _any_of(self._markers), _any_of(marker.text for marker in reserved)
        self._open = _any_of(self._markers.keys() - {marker.text for marker in reserved})

    @property
    def has_template(self) -> bool:
        """Return whether the model has a chat template. Without one it can only continue texts."""
        return self._template is not None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Encode a text. `special`: recognize special tokens; not for text of users."""
        return self._encode(_valid(text), self._all if special else self._open)

    def prompt(self, text: str) -> list[int]:
        """Encode a text to continue."""
        return self._first + self.encode(text)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Encode a conversation, up to the model's turn. Raises UserError if it is invalid or the template refuses it."""
        checked = [_checked(message, number) for number, message in enumerate(messages)]
        if self._template is None:
            tokens = self.encode("".join(f"{message['content']}\n" for message in checked))
        else:
            tokens = self._render(checked, self._template)
        if self._first_in_chat and tokens[: len(self._first)] != self._first:
            tokens = self._first + tokens
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()

    def detokenizer(self, *, begins: bool = True) -> Detokenizer:
        """`begins`: the text does not follow another, so a leading space may be dropped."""
        return Detokenizer(self._vocabulary, hidden=self._hidden, drop_space=begins and self._vocabulary.drops_space)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; of an added token, its name."""
        return self._vocabulary.token_bytes(token)

    def _render(self, messages: list[dict[str, str]], template: str) -> list[int]:
        seen = set().union(template, *(message["content"] for message in messages))
        unused = (chr(code) for code in _PRIVATE if chr(code) not in seen)
        guard, edge = next(unused, ""), next(unused, "")
        if not edge:
            raise UserError("the messages contain all private-use characters")

        def guarded(content: str) -> str:
            inner = content.strip()
            if not inner:
                return content
            begin = content.index(inner)
            if self._reserved is not None:
                # Overlapping matches too.
                inner = re.sub(f"(?={self._reserved.pattern})", guard, inner, flags=re.DOTALL)
            # Blanks stay outside: templates strip them.
            return f"{content[:begin]}{edge}{inner}{edge}{content[begin + len(content.strip()) :]}"

        guarded_messages = [{**message, "content": guarded(message["content"])} for message in messages]
        text = render_in_child(template, guarded_messages, names=self._names)
        unguarded = None if self._reserved is None else re.compile(f"(?<!{guard}){self._reserved.pattern}", re.DOTALL)
        return self._encode(text, unguarded, without=(guard, edge))

    def _encode(self, text: str, markers: re.Pattern[str] | None, *, without: Sequence[str] = ()) -> list[int]:
        tokens: list[int] = []
        for place, piece in enumerate(_cut(text, markers, self._markers)):
            if isinstance(piece, AddedToken):
                tokens.append(piece.token)
                continue
            for character in without:
                piece = piece.replace(character, "")
            for inner, part in enumerate(_cut(piece, self._open, self._markers)):
                if isinstance(part, AddedToken):
                    tokens.append(part.token)
                elif part:
                    tokens += self._vocabulary.encode(part, begins=place == inner == 0)
        return tokens


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern for any of these, longest first."""
    known = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile(f"(?:{'|'.join(map(re.escape, known))})", re.DOTALL) if known else None


def _cut(text: str, pattern: re.Pattern[str] | None, markers: Mapping[str, AddedToken]) -> Iterator[str | AddedToken]:
    """Split into text and added tokens."""
    at = 0
    strip = False
    for match in pattern.finditer(text) if pattern is not None else ():
        marker = markers[match[0]]
        before = text[at : match.start()]
        before = before.lstrip() if strip else before
        yield before.rstrip() if marker.takes_left else before
        yield marker
        at, strip = match.end(), marker.takes_right
    yield text[at:].lstrip() if strip else text[at:]


def _checked(message: Mapping[str, str], number: int) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise UserError(
            f"messages[{number}].role is {str(role)[:40]!r}, which is not a role such as system, user, assistant"
        )
    if not isinstance(content, str):
        raise UserError(f"messages[{number}].content is not a text")
    return {"role": role, "content": _valid(content)}


def _valid(text: str) -> str:
    """Replace lone surrogates, which JSON allows."""
    return text.encode("utf-8", errors="replace").decode() if not text.isascii() else text


class Detokenizer:
    """Incremental decoding: the results, joined, are the text of all tokens."""

    def __init__(self, vocabulary: Vocabulary, *, hidden: frozenset[int], drop_space: bool) -> None:
        self._vocabulary, self._hidden, self._drop_space = vocabulary, hidden, drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that is complete. Invalid UTF-8 becomes the replacement character."""
        spelled = b"" if token in self._hidden else self._vocabulary.token_bytes(token)
        if spelled and self._drop_space:
            spelled, self._drop_space = spelled.removeprefix(b" "), False
        return self._decoder.decode(spelled)

    def flush(self) -> str:
        """Return what was held back, after the last token."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Text up to the first stop string; a possible beginning of one is held back.

    The string completed first applies; of several that end at the same position, the longest.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(dict.fromkeys(text for text in stop if text))
        self._held = ""
        self._reached = False

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text to send, and whether a stop string was reached."""
        if self._reached:
            return "", True
        text = self._held + text
        found = [(begin + len(stop), begin) for stop in self._stop if (begin := text.find(stop)) >= 0]
        if found:
            self._held, self._reached = "", True
            return text[: min(found)[1]], True
        wait = max((self._beginning(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - wait :]
        return text[: len(text) - wait], False

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
        longest = min(len(stop) - 1, len(text))
        return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
