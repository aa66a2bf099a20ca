"""Parse YAML into a tree that keeps the location of each value; write YAML.

Errors can then say `gpt.yaml:7`, however many files and overrides were merged. Scalars follow YAML 1.2 rather than
PyYAML's 1.1: `6e-4` is a number, and a machine called `on` or `no` is not a boolean. Keys are always text.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import yaml

KeyPath = tuple[str | int, ...]

MAX_NODES = 100_000  # of one document


class Location(NamedTuple):
    """Where a value was given. `order`: the position of its source among all, by which problems are sorted."""

    order: int
    line: int  # 0: not known, or not a file
    label: str

    def __str__(self) -> str:
        return f"{self.label}:{self.line}" if self.line else self.label


class Problem(NamedTuple):
    """One mistake in the configuration, with its location."""

    place: Location
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.place.label else self.text


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigNode:
    """A value, its location, and its dotted name as the user wrote it. Mappings and lists contain nodes."""

    value: Any
    place: Location
    name: str = ""

    def children(self) -> Iterator[tuple[str, ConfigNode]]:
        """Yield the entries of a mapping; nothing for other values."""
        yield from self.value.items() if isinstance(self.value, dict) else ()

    def plain(self) -> Any:
        """Return the value without locations."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def reach(self, path: KeyPath) -> tuple[KeyPath, ConfigNode]:
        """Follow `path` as far as the tree goes; return that part of it and the node. Steps that are no key are skipped."""
        node, reached = self, []
        for key in path:
            inside = (isinstance(node.value, dict) and key in node.value) or (
                isinstance(node.value, list) and isinstance(key, int) and key < len(node.value)
            )
            if inside:
                node = node.value[key]
                reached.append(key)
        return tuple(reached), node

    def find(self, path: KeyPath) -> ConfigNode | None:
        """Return the node at `path`, or None."""
        reached, node = self.reach(path)
        return node if reached == path else None


def merge(below: ConfigNode, above: ConfigNode) -> ConfigNode:
    """Merge two trees: mappings key by key; other values of `above` replace those of `below`."""
    if not isinstance(below.value, dict) or not isinstance(above.value, dict):
        return above
    merged = dict(below.value)
    for key, child in above.children():
        merged[key] = merge(merged[key], child) if key in merged else child
    return dataclasses.replace(above, value=merged)


def from_python(value: Any, *, place: Location, name: str) -> ConfigNode:
    """Make a tree of plain Python values, all with one location."""
    if isinstance(value, Mapping):
        return ConfigNode(
            {str(k): from_python(v, place=place, name=f"{name}.{k}") for k, v in value.items()}, place, name
        )
    if isinstance(value, list | tuple):
        return ConfigNode([from_python(v, place=place, name=f"{name}[{i}]") for i, v in enumerate(value)], place, name)
    return ConfigNode(os.fspath(value) if isinstance(value, os.PathLike) else value, place, name)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}


class _ConfigDumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers  # quotes text that would be read as a number


_TAG = "tag:yaml.org,2002:"
for _kind, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)\Z", list("tTfF")),
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*\Z", list("-+0123456789")),
    ("float", r"[-+]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z", list("-+.0123456789")),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z", list("-+.")),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(_pattern), _first)
_ConfigDumper.add_representer(tuple, _ConfigDumper.represent_list)

_SCALARS: dict[str, Callable[[str], Any]] = {
    _TAG + "null": lambda _: None,
    _TAG + "bool": lambda text: text.lower() == "true",
    _TAG + "int": int,
    _TAG + "float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
    _TAG + "str": str,
}


def to_yaml(value: Any) -> str:
    """Return YAML that `parse` reads back to the same value. Keys keep their order."""
    text = yaml.dump(value, Dumper=_ConfigDumper, sort_keys=False, allow_unicode=True, width=120)
    if "\x85" in text:  # PyYAML cannot read back its own output of this line break: escape everything
        text = yaml.dump(value, Dumper=_ConfigDumper, sort_keys=False, allow_unicode=False, width=120)
    return text


def parse(text: str, *, place: Location, name: str = "") -> tuple[ConfigNode, list[Problem]]:
    """Parse a YAML document. Returns its tree and the problems found. An empty document is null."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        return ConfigNode(None, place, name), [_syntax_problem(error, text, place)]
    except RecursionError:
        return ConfigNode(None, place, name), [Problem(place, "this is nested too deep")]
    problems: list[Problem] = []
    if root is None:
        return ConfigNode(None, place, name), problems
    if _count(root) > MAX_NODES:
        return ConfigNode(None, place, name), [Problem(place, f"more than {MAX_NODES} values, aliases filled in")]
    return _build(root, place=place, name=name, problems=problems, above=frozenset()), problems


def _count(root: yaml.Node) -> int:
    """Count the values with all aliases expanded. A cyclic alias counts once; `_build` reports it."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0
            inside = [v for _, v in node.value] if isinstance(node, yaml.MappingNode) else node.value
            sizes[id(node)] = 1 + sum(map(size, inside)) if isinstance(node, yaml.CollectionNode) else 1
        return sizes[id(node)]

    return size(root)


def _syntax_problem(error: yaml.YAMLError, text: str, place: Location) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line, reason = error.problem_mark.line + 1, error.problem
        if "'\\t'" in str(reason):
            reason = "there is a tab, and YAML is indented by spaces only"
    elif isinstance(error, yaml.reader.ReaderError):
        line, reason = text.count("\n", 0, error.position) + 1, f"the character U+{error.character:04X} is not allowed"
    else:
        line, reason = 1, str(error)
    return Problem(place._replace(line=line) if place.line else place, f"this is not YAML: {reason}")


def _build(
    node: yaml.Node, *, place: Location, name: str, problems: list[Problem], above: frozenset[int]
) -> ConfigNode:
    """`above`: the enclosing nodes, to detect cyclic aliases."""
    if id(node) in above:
        problems.append(Problem(place, f"{name}: an alias may not contain itself"))
        return ConfigNode(None, place, name)
    above = above | {id(node)}

    if isinstance(node, yaml.MappingNode):
        entries: dict[str, ConfigNode] = {}
        for key_node, value_node in node.value:
            here = _at(place, key_node)
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or key == "<<":
                problems.append(Problem(here, "keys must be plain text: YAML merge keys and complex keys are not read"))
                continue
            child_name = f"{name}.{key}" if name else key
            if key in entries:
                problems.append(Problem(here, f"{child_name}: given twice, here and at {entries[key].place}"))
            entries[key] = _build(value_node, place=here, name=child_name, problems=problems, above=above)
        return ConfigNode(entries, place, name)

    if isinstance(node, yaml.SequenceNode):
        items = [
            _build(item, place=_at(place, item), name=f"{name}[{i}]", problems=problems, above=above)
            for i, item in enumerate(node.value)
        ]
        return ConfigNode(items, place, name)

    convert = _SCALARS.get(node.tag)
    try:
        if convert is None:
            raise ValueError(f"the tag {node.tag.replace(_TAG, '!!')} is not supported")
        return ConfigNode(convert(node.value), place, name)
    except ValueError as error:
        problems.append(Problem(place, f"{name}: {error}"))
        return ConfigNode(None, place, name)


def _at(place: Location, node: yaml.Node) -> Location:
    """Return the location of a node; overrides have no lines."""
    return place._replace(line=node.start_mark.line + 1) if place.line else place
