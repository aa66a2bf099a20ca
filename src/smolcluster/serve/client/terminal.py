"""Chat in a terminal; a single answer in a pipe.

Control characters and escape sequences in a model's text are removed, also if split over chunks: `TerminalText`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from smolcluster.errors import SmolclusterError, UserError, suggest
from smolcluster.observe.text import duration, encodable, printable
from smolcluster.serve.client.http import AnswerChunk, RequestOptions, RequestRejected, ServerClient

_OPEN = re.compile(r"\x1b(?:\[[0-?]*[ -/]*)?\Z")  # an incomplete escape sequence
_LONGEST_OPEN = 64
_KEPT = "\n\t\u200c\u200d"  # the last two join letters and emoji
_QUOTES = '"""'

HELP = """/new              a new conversation
/system [TEXT]    the system prompt; nothing: remove it
/set [NAME VALUE] temperature, top_p, top_k, max_tokens, seed, repetition_penalty; -: the server's default
/retry            answer again
/save FILE        the conversation as text, or with .json as messages
/quit             leave; so does Ctrl-D
A line that ends in \\ continues in the next; \"\"\" begins and ends a text of several lines. Ctrl-C stops an answer."""


@dataclass(frozen=True, slots=True)
class NumberOption:
    """A numeric option of the API, with its range."""

    minimum: float
    maximum: float
    integer: bool = False

    def read(self, name: str, text: str) -> float | int:
        try:
            value = int(text) if self.integer else float(text)
        except ValueError:
            raise UserError(f"{name}: {text!r} is not a {'whole ' if self.integer else ''}number") from None
        if not self.minimum <= value <= self.maximum:
            low, high = (f"{int(n)}" if self.integer else f"{n:g}" for n in (self.minimum, self.maximum))
            raise UserError(f"{name} {text} is outside {low} to {high}")
        return value


OPTIONS = {
    "temperature": NumberOption(0, 2),
    "top_p": NumberOption(0, 1),
    "top_k": NumberOption(1, 1_000_000, integer=True),
    "max_tokens": NumberOption(1, 10_000_000, integer=True),
    "seed": NumberOption(0, 2**63 - 1, integer=True),
    "repetition_penalty": NumberOption(0.1, 10),
}


class TerminalText:
    """Model text, made safe for a terminal. An incomplete escape sequence is held back."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, piece: str) -> str:
        text = self._held + piece
        found = _OPEN.search(text, max(0, len(text) - _LONGEST_OPEN))
        self._held = found[0] if found else ""
        return printable(text[: len(text) - len(self._held)], keep=_KEPT)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return printable(held, keep=_KEPT)


def print_chunks(chunks: Iterable[AnswerChunk], out: IO[str]) -> str:
    """Write an answer as it arrives. Return its text."""
    shown, text, last = TerminalText(), "", ""
    for chunk in chunks:
        text += chunk.text
        last = _write(shown.push(chunk.text), out) or last
    last = _write(shown.flush(), out) or last
    if not last.endswith("\n"):
        _write("\n", out)
    return text


def _write(text: str, out: IO[str]) -> str:
    if text:
        out.write(encodable(text, out))
        out.flush()
    return text


@dataclass(kw_only=True)
class Chat:
    """A conversation. `read` reads a line; it raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""

    client: ServerClient
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    system: str = ""
    read: Callable[[str], str] = input
    out: IO[str] = field(default_factory=lambda: sys.stdout)
    colour: bool = False
    continues: bool = False  # no chat template: the model continues the text so far
    example_prompts: Sequence[str] = ()
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> int:
        """Run until the user leaves. Return 0, or 130 after Ctrl-C."""
        self._note(f"{printable(self.model)} at {self.client.url}; /help for help, Ctrl-D to leave")
        if self.continues:
            example = f", such as: {printable(self.example_prompts[0])}" if self.example_prompts else ""
            self._note(f"this model has no chat template: write the beginning of a text to continue{example}")
        interrupted = False
        while True:
            try:
                text = self._question()
            except EOFError:
                self._print("")
                return 0
            except KeyboardInterrupt:
                self._print("")
                if interrupted:
                    return 130
                self._note("Ctrl-C again leaves")
                interrupted = True
                continue
            interrupted = False
            try:
                if text.startswith("/") and not text.startswith("//"):
                    if not self._command(text):
                        return 0
                elif text.strip():
                    self.messages.append({"role": "user", "content": text.removeprefix("/")})
                    interrupted = not self._answer()
            except UserError as error:
                self._note(str(error))

    def _question(self) -> str:
        """Read a line, or several after a backslash or between triple quotes."""
        line = self.read("> ")
        if line.lstrip().startswith(_QUOTES):
            text = line.lstrip()[len(_QUOTES) :]
            while _QUOTES not in text:
                text += "\n" + self.read(". ")
            return text.partition(_QUOTES)[0].strip("\n")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self.read(". ")
        return line

    def _answer(self) -> bool:
        """Request and print an answer. Return False when Ctrl-C stopped it."""
        began = time.monotonic()
        system = [{"role": "system", "content": self.system}] if self.system else []
        text, finished, first_s, tokens, ended = "", True, None, None, None
        shown = TerminalText()
        options = {"model": self.model, **self.options}
        chunks: Generator[AnswerChunk, None, None]
        if self.continues:
            chunks = self.client.complete(continued(self.messages), options=options)
        else:
            chunks = self.client.chat([*system, *self.messages], options=options)
        with closing(chunks):
            try:
                for chunk in chunks:
                    if chunk.text and first_s is None:
                        first_s = time.monotonic() - began
                    text += chunk.text
                    tokens, ended = tokens if chunk.tokens is None else chunk.tokens, chunk.finish or ended
                    _write(shown.push(chunk.text), self.out)
            except KeyboardInterrupt:
                finished = False
            except RequestRejected as error:
                self.messages.pop()
                more = "; /new starts a new conversation" if self.messages else ""
                self._note(f"{error}; your message was removed{more}")
                return True
            except SmolclusterError as error:
                self._print("" if not text else shown.flush())
                self._note(f"{error}; /retry to try again")
                self._keep(text)
                return True
        self._print(shown.flush())
        self._keep(text)
        if not finished:
            self._note("stopped; Ctrl-C again leaves")
        elif tokens and first_s is not None:
            rest_s = time.monotonic() - began - first_s
            rate = f"{(tokens - 1) / rest_s:.1f} tokens/s, " if tokens > 1 and rest_s > 0 else ""
            cut = ", cut off at max_tokens" if ended == "length" else ""
            self._note(f"{rate}first after {duration(first_s)}, {tokens} tokens{cut}")
        return finished

    def _keep(self, text: str) -> None:
        if text:
            self.messages.append({"role": "assistant", "content": text})

    # Commands

    def _command(self, text: str) -> bool:
        """Run a command. Return False to leave."""
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit", "/q"):
            return False
        known = {
            "/help": lambda _: self._print(HELP),
            "/new": lambda _: self._new(),
            "/system": self._set_system,
            "/set": self._set,
            "/retry": lambda _: self._retry(),
            "/save": self._save,
        }
        if name not in known:
            raise UserError(
                f"unknown command {name}; {suggest(name, [*known, '/quit'])}. To send a leading /, write //"
            )
        known[name](rest)
        return True

    def _new(self) -> None:
        self.messages.clear()
        self._note("a new conversation")

    def _set_system(self, text: str) -> None:
        if self.continues:
            raise UserError("/system has no effect: this model has no chat template; put it before your text")
        self.system = text
        self._note("system prompt set" if text else "system prompt removed")

    def _set(self, text: str) -> None:
        if not text:
            self._print("\n".join(f"{name} {self.options.get(name, '-')}" for name in OPTIONS))
            return
        name, _, value = text.replace("=", " ", 1).partition(" ")
        name, value = name.strip().replace("-", "_"), value.strip()
        if name not in OPTIONS:
            raise UserError(f"there is no setting {name!r}; {suggest(name, OPTIONS)}")
        if value in ("-", "", "default"):
            self.options.pop(name, None)
        else:
            self.options[name] = OPTIONS[name].read(name, value)
        self._note(f"{name} {self.options.get(name, 'default of the server')}")

    def _retry(self) -> None:
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise UserError("there is nothing to retry")
        self._answer()

    def _save(self, text: str) -> None:
        path = _file_named(text)
        messages = [{"role": "system", "content": self.system}, *self.messages] if self.system else self.messages
        if path.suffix == ".json":
            content = json.dumps(messages, indent=2, ensure_ascii=False) + "\n"
        else:
            content = "\n".join(f"## {message['role']}\n\n{message['content']}\n" for message in messages)
        try:
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(content)
        except FileExistsError:
            raise UserError(f"{path} exists; choose another name") from None
        except (OSError, ValueError) as error:  # ValueError: an invalid name
            raise UserError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None
        self._note(f"{len(self.messages)} messages in {path}")

    # Output

    def _print(self, text: str) -> None:
        _write(text + "\n", self.out)

    def _note(self, text: str) -> None:
        shown = printable(text)
        self._print(f"\x1b[2m{shown}\x1b[0m" if self.colour else shown)


def continued(messages: Iterable[Mapping[str, str]]) -> str:
    """Join the messages to one text; each message of the user begins on a new line."""
    text = ""
    for message in messages:
        if message["role"] == "user" and text and not text.endswith("\n"):
            text += "\n"
        text += message["content"]
    return text


def _file_named(text: str) -> Path:
    """Parse the file name of /save, which may be quoted or contain an apostrophe."""
    try:
        names = shlex.split(text) if text.count('"') != 1 and text.count("'") != 1 else [text]
    except ValueError as error:  # an unmatched quote
        raise UserError(f"{text} is not a file name: {str(error).lower()}") from None
    if len(names) != 1:
        raise UserError("/save needs one file name, such as /save talk.md")
    try:
        return Path(names[0]).expanduser()
    except RuntimeError:  # ~ of an unknown user
        raise UserError(f"{names[0]}: there is no such home directory") from None


def line_reader() -> Callable[[str], str]:
    """Return `input`, with line editing and history if readline is available."""
    try:
        import readline
    except ImportError:  # Windows
        return input
    readline.set_history_length(1000)
    return input


def is_coloured(out: IO[str]) -> bool:
    return out.isatty() and not os.environ.get("NO_COLOR")


def read_all(stream: IO[str], *, what: str) -> str:
    """Read a prompt from a pipe."""
    try:
        text = stream.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not {error.encoding} text: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise UserError(f"{what} is empty; write a prompt to the pipe, or run without one")
    return text


def given_options(options: RequestOptions) -> dict[str, Any]:
    """Return the options given on the command line, checked."""
    found = {name: value for name, value in options.items() if value is not None}
    for name, value in found.items():
        if name in OPTIONS:
            OPTIONS[name].read(f"--{name.replace('_', '-')}", str(value))
    return found
