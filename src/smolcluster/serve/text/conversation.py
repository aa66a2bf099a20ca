"""Text to tokens and back: prompts, conversations, and answers that come one token at a time.

    prompt    text               -> tokens         a user's text, with the model's first token where it wants one
    chat      messages           -> tokens         through the model's own template
    detokenizer    token by token -> text          as soon as it is certain: half a character waits for its other half

**Who may write a marker.** `<|im_end|>` ends a turn. A user who types it has typed ten characters, and that is how they are
encoded: only the template's own text may become markers. The template is run on the messages as they are, but for two
characters that occur nowhere else, chosen when the messages are known: one before every marker that a user has typed, one
around each message, so that no marker is made of two halves. What is still a marker afterwards is the template's own. Then both
are taken out, and all text between two markers is encoded as one: an honest conversation has exactly the tokens that
`transformers` gives it.

A marker that is no secret of the conversation stays one in any text: a vocabulary may have runs of spaces as such.

A model without a template (a run of ours) gets the contents of the messages, each on a line of its own.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from smolcluster.errors import UserError
from smolcluster.serve.text.rendering import Renderer
from smolcluster.serve.text.vocabulary import AddedToken, Vocabulary

_ROLE = re.compile(r"[A-Za-z][A-Za-z_]{0,31}")
_PRIVATE = range(0xE000, 0xF900)  # code points that mean nothing to anybody


class ChatTokenizer:
    """What a model reads and writes. It has no state: any thread may ask. A UserError means that the text does not fit it."""

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
        """`first`: what every prompt begins with, and a conversation too if so said and its template does not do it.

        `names`: bos_token and the like, for the template.
        """
        self.vocab_size = vocabulary.size
        self.stop_tokens = stop_tokens
        self._vocabulary = vocabulary
        self._template = None if template is None else Renderer(template)
        self._first, self._first_in_chat = list(first), first_in_chat or template is None
        self._names = dict(names or {})
        self._hidden = frozenset(marker.token for marker in vocabulary.markers if marker.special) | stop_tokens
        self._markers = {marker.text: marker for marker in vocabulary.markers}
        written = "".join((template or "", *self._names.values()))
        secret = [m for m in self._markers.values() if m.text.strip() and (m.special or m.text in written)]
        self._all, self._secret = _any_of(self._markers), _any_of(marker.text for marker in secret)
        self._open = _any_of(self._markers.keys() - {marker.text for marker in secret})

    @property
    def has_template(self) -> bool:
        """Whether the model knows conversations. Else it continues texts."""
        return self._template is not None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """`special`: markers become their tokens. Never for text of a user."""
        return self._encode(_valid(text), self._all if special else self._open)

    def prompt(self, text: str) -> list[int]:
        """A text to be continued."""
        return self._first + self.encode(text)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation, up to where the model answers. Raises UserError where it cannot be, or the template refuses it."""
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
        """`begins`: the text stands by itself. Else it follows another, and its first word keeps the space before it."""
        return Detokenizer(self._vocabulary, hidden=self._hidden, drop_space=begins and self._vocabulary.drops_space)

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for; of a marker, its name."""
        return self._vocabulary.token_bytes(token)

    def _render(self, messages: list[dict[str, str]], template: Renderer) -> list[int]:
        seen = set().union(template.source, *(message["content"] for message in messages))
        unused = (chr(code) for code in _PRIVATE if chr(code) not in seen)
        guard, edge = next(unused, ""), next(unused, "")
        if not edge:
            raise UserError("the messages have every character for private use in them; leave some out")

        def guarded(content: str) -> str:
            inner = content.strip()
            if not inner:
                return content
            begin = content.index(inner)
            if self._secret is not None:
                # Before each place where one begins, also inside another.
                inner = re.sub(f"(?={self._secret.pattern})", guard, inner, flags=re.DOTALL)
            # Blanks stay outside: templates take them off.
            return f"{content[:begin]}{edge}{inner}{edge}{content[begin + len(content.strip()) :]}"

        told = [{**message, "content": guarded(message["content"])} for message in messages]
        text = template.render(told, names=self._names)
        own = None if self._secret is None else re.compile(f"(?<!{guard}){self._secret.pattern}", re.DOTALL)
        return self._encode(text, own, without=(guard, edge))

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
    """Any of these, the longest that fits."""
    known = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile(f"(?:{'|'.join(map(re.escape, known))})", re.DOTALL) if known else None


def _cut(text: str, pattern: re.Pattern[str] | None, markers: Mapping[str, AddedToken]) -> Iterator[str | AddedToken]:
    """Text and markers in turn."""
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
            f"messages[{number}].role is {str(role)[:40]!r}, which is no role; such as: system, user, assistant"
        )
    if not isinstance(content, str):
        raise UserError(f"messages[{number}].content is not a text")
    return {"role": role, "content": _valid(content)}


def _valid(text: str) -> str:
    """Text that can be UTF-8: JSON can name half a character."""
    return text.encode("utf-8", errors="replace").decode() if not text.isascii() else text


class Detokenizer:
    """Text of tokens that come one by one. All that it returns, joined, is the text of all tokens together."""

    def __init__(self, vocabulary: Vocabulary, *, hidden: frozenset[int], drop_space: bool) -> None:
        self._vocabulary, self._hidden, self._drop_space = vocabulary, hidden, drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is certain now. Bytes that are no character become the replacement character."""
        spelled = b"" if token in self._hidden else self._vocabulary.token_bytes(token)
        if spelled and self._drop_space:
            spelled, self._drop_space = spelled.removeprefix(b" "), False
        return self._decoder.decode(spelled)

    def flush(self) -> str:
        """What was waiting. No token comes after it."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Text up to the first stop string. What may be the beginning of one waits.

    The string that is whole first counts; of several that end at one place, the longest. How the text was cut does not matter.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(dict.fromkeys(text for text in stop if text))
        self._held = ""
        self._reached = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may go out now, and whether a stop string has been reached."""
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
        """What was waiting, now that nothing more comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """How much of the end of the text is the beginning of the stop string."""
        longest = min(len(stop) - 1, len(text))
        return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
