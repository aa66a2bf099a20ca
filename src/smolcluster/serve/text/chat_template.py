"""The template that makes one text of a conversation: Jinja, as models carry it and as `transformers` runs it.

A template comes with the weights. It runs in Jinja's sandbox, where it reaches nothing but the messages. Bounded are what it
writes, its ranges, and every text, list and number that an operator, a filter, a method or a block makes: before it is made
where it could be many times larger than what it is made of (template_sizes.py), else behind it. Not bounded are how many of
them it makes and keeps, how long it takes, and how long lists within lists are when they are written out: for that, a model
that is served has its template run in a process that can be killed (rendering.py).
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from smolcluster.errors import UserError, needed
from smolcluster.serve.text.template_sizes import of_filter, of_method, of_operator

OLDEST_JINJA = (3, 1, 6)  # older sandboxes let a template read the environment and run code
_SOURCE_LIMIT = 1 << 20
_TEXT_LIMIT = 4 << 20
_RANGE_LIMIT = 10_000
_SHORT = 64  # characters of a form for dates, and of what tojson puts between values
# Filters that no template needs and that could grow without bounds.
_NOT_HERE = ("pprint", "urlize", "wordwrap", "xmlattr")


class TemplateFailed(UserError):
    """A template did not make a text of a conversation. `detail` is its own text: for logs, not for clients."""

    public = "the model's chat template refuses this conversation"

    def __init__(self, detail: str) -> None:
        super().__init__(f"{self.public}: {detail}")
        self.detail = detail


class ChatTemplate:
    """A compiled template. Raises UserError when it is not valid."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        if len(source) > _SOURCE_LIMIT:
            raise UserError(f"the model's chat template has {len(source)} characters, more than {_SOURCE_LIMIT}")
        self.source = source
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            raise UserError(f"the model's chat template cannot be used: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]], *, names: Mapping[str, str]) -> str:
        """The text of a conversation, up to where the model answers. `names`: special tokens. Raises TemplateFailed."""
        pieces, length = [], 0
        try:
            given = {"add_generation_prompt": True, "tools": None, "documents": None, **names}
            for piece in self._template.generate(messages=[dict(message) for message in messages], **given):
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
        from jinja2.visitor import NodeTransformer
    _check_version()

    class Generation(Extension):
        """`{% generation %}` marks what the model itself would say. It is plain text here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Joining(NodeTransformer):
        """`a ~ b` as a filter: there is no other way to see it."""

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes), "join", [], [], None, None, lineno=node.lineno)

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "+", "%"))
        concat = staticmethod(_joined)  # of what a block or a macro writes

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check(of_operator(operator, left, right), operator)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
            name = getattr(function, "__name__", "a call")
            args = tuple(map(_listed, args)) if name == "join" else args
            _check(of_method(function, args, named), name)
            return _checked(super().call(context, function, *args, **named))

        def _generate(self, source: Any, *args: Any, **named: Any) -> Any:
            return super()._generate(Joining().visit(source), *args, **named)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        ensure_ascii: bool = False,
        sort_keys: bool = False,
    ) -> str:
        if (indent or 0) > _SHORT or any(len(one) > _SHORT for one in separators or ()):
            raise OverflowError("what tojson puts between values is too large")
        return json.dumps(value, indent=indent, separators=separators, ensure_ascii=ensure_ascii, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        if len(form) > _SHORT:
            raise OverflowError(f"a form for dates of {len(form)} characters")
        return datetime.datetime.now().strftime(form)

    def bounded_range(*args: int) -> range:
        numbers = range(*args)
        if len(numbers) > _RANGE_LIMIT:
            raise OverflowError(f"range of {len(numbers)}")
        return numbers

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.filters = {k: _bounded(k, v) for k, v in environment.filters.items() if k not in _NOT_HERE}
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    del environment.globals["lipsum"]
    environment.globals["range"] = bounded_range
    return environment


def _bounded(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks before it does something, and behind it."""
    hidden = int(hasattr(filter_, "jinja_pass_arg"))  # Jinja gives some of them a first argument of its own

    @functools.wraps(filter_)
    def bounded(*args: Any, **named: Any) -> Any:
        args = tuple(map(_listed, args)) if name == "join" else args
        _check(of_filter(name, args[hidden:], named), name)
        return _checked(filter_(*args, **named))

    return bounded


def _listed(value: Any) -> Any:
    """What can be looked at once only, as a list."""
    return list(value) if isinstance(value, Iterator) else value


def _joined(pieces: Iterable[str]) -> str:
    pieces = list(pieces)
    _check(sum(map(len, pieces)), "a block")
    return "".join(pieces)


def _checked(value: Any) -> Any:
    _check(len(value) if isinstance(value, str | bytes | list | tuple) else 0, "a step")
    return value


def _check(size: float, what: str) -> None:
    if size > _TEXT_LIMIT:
        raise OverflowError(f"the result of {what} is too large")
