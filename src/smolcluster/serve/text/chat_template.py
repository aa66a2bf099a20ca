"""Render chat templates: the Jinja of models, as `transformers` runs it, in Jinja's sandbox and with bounded output.

A template comes with the weights and is not trusted. In the sandbox it can only read the messages; its time and memory are
bounded by the process that renders it (rendering.py). `*` and `**` are checked before they run, since that process has no
memory limit on Windows, and its memory is only polled on macOS.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from smolcluster.errors import UserError, needed

OLDEST_JINJA = (3, 1, 6)  # older sandboxes let a template read the environment and run code
_SOURCE_LIMIT = 1 << 20
_TEXT_LIMIT = 4 << 20


class TemplateFailed(UserError):
    """A template could not render a conversation. `detail` is the template's message: for logs, not for clients."""

    public = "the model's chat template refuses this conversation"

    def __init__(self, detail: str) -> None:
        super().__init__(f"{self.public}: {detail}")
        self.detail = detail


def check_template(source: str) -> str:
    """Parse a template, without evaluating its constants. Raises UserError if it is not valid."""
    environment = _environment()
    if len(source) > _SOURCE_LIMIT:
        raise UserError(f"the model's chat template has {len(source)} characters, more than {_SOURCE_LIMIT}")
    try:
        environment.parse(source)
    except Exception as error:
        raise UserError(f"the model's chat template cannot be used: {error}") from error
    return source


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)  # evaluates constants


def render(source: str, messages: Sequence[Mapping[str, str]], *, names: Mapping[str, str]) -> str:
    """Return the prompt of a conversation. `names`: special tokens. Raises TemplateFailed."""
    pieces, length = [], 0
    try:
        given = {"add_generation_prompt": True, "tools": None, "documents": None, **names}
        for piece in _compiled(source).generate(messages=[dict(message) for message in messages], **given):
            length += len(piece)
            if length > _TEXT_LIMIT:
                raise OverflowError(f"it writes more than {_TEXT_LIMIT} characters")
            pieces.append(piece)
    except Exception as error:
        raise TemplateFailed(str(error) or type(error).__name__) from error
    return "".join(pieces)


def _check_version() -> None:
    version = importlib.metadata.version("jinja2")
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST_JINJA:
        least = ".".join(map(str, OLDEST_JINJA))
        raise UserError(
            f"Jinja {version} lets the chat template of a model read this machine's environment; "
            f"install a newer one with: pip install 'jinja2>={least}'"
        )


@functools.cache
def _environment() -> Any:
    with needed(extra="serve", purpose="the chat template of a model"):
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    _check_version()

    class Generation(Extension):
        """`{% generation %}` marks the model's turns for training; it has no effect here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _size(operator, left, right) > _TEXT_LIMIT:
                raise OverflowError(f"the result of {operator} is too large")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, *, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _size(operator: str, left: Any, right: Any) -> int:
    """Return the size of a product or a power, in items or bits."""
    if isinstance(right, int) and isinstance(left, int):
        return abs(right) * left.bit_length() if operator == "**" else 0
    items, times = (left, right) if isinstance(right, int) else (right, left)
    sized = isinstance(items, str | bytes | list | tuple) and isinstance(times, int)
    return len(items) * times if sized else 0
