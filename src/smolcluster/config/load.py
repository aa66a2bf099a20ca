"""Load a `Config` from YAML files and overrides, or raise one error that lists every mistake with its location.

    load_config(["gpt", "my.yaml"], overrides=["training.steps=50"])

Sources merge left to right, then overrides. Mappings merge, lists and scalars replace. Epochs from an override take precedence
over steps from a source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from smolcluster.config.checks import conflicts
from smolcluster.config.describe import allowed, keys_at, show
from smolcluster.config.flags import flag_of
from smolcluster.config.flat import into_sections
from smolcluster.config.names import SECTIONS, nearest, nullable
from smolcluster.config.schema import Config, StrategyConfig
from smolcluster.config.strategies import BUILT_IN, find_record, options_of
from smolcluster.config.tree import ConfigNode, KeyPath, Location, Problem, from_python, merge, parse
from smolcluster.errors import UserError, suggest

# `dotted.key=value` with the value in YAML, or a dotted key and a Python value, of which None is ignored.
Override: TypeAlias = str | tuple[str, Any]
Overrides: TypeAlias = Sequence[Override] | Mapping[str, Any]

_NOWHERE = Location(0, 0, "")


def load_config(
    sources: Sequence[str | os.PathLike[str]],
    *,
    overrides: Overrides = (),
) -> Config:
    """Load and merge sources and overrides. A source is a YAML file or a built-in name."""
    if isinstance(sources, str | os.PathLike):
        sources = [sources]
    problems: list[Problem] = []

    # Read everything, in order of precedence.
    base = ConfigNode({}, _NOWHERE)
    layers: list[ConfigNode] = []
    for source in sources:
        path, layer = _read_source(os.fspath(source), order=len(layers), problems=problems)
        layers.append(layer)
        base = merge(base, _implied_strategy(path, layer.place))
    for override in list_overrides(overrides):
        layers.append(_read_override(override, order=len(layers), problems=problems))

    # Merge, then check names, values, and rules between keys.
    merged = base
    for layer in layers:
        tree, found = into_sections(layer, below=merged)
        problems += found
        merged = merge(merged, tree)
    merged = _without_steps_of_files(merged, num_files=len(sources))
    merged = _keep_latest_of(merged, ("training", "eval_samples"), ("training", "eval_batches"))
    plugin_keys = _plugin_options(merged)
    merged, found = _nest_plugin_options(merged, plugin_keys)
    problems += found
    known, found = _drop_unknown_keys(merged, plugin_keys)
    problems += found
    config, found = _validate(known)
    problems += found
    if config is not None and not problems:
        problems += _conflicts(config, known)
    if config is None or problems:
        raise UserError("\n".join(str(problem) for problem in sorted(problems, key=lambda p: p.place[:2])))
    return config


@functools.cache
def builtin_configs() -> dict[str, Path]:
    """Return the configurations of the package, by name."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parents[1] / "configs"):  # installed; a source checkout
        if (folder / "default.yaml").is_file():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def _locate(source: str) -> tuple[Path, str] | None:
    """Return a source's file and its label for errors. A bare name is first looked up among the built-in ones."""
    name = source.removesuffix(".yaml")
    path = Path(source)
    with contextlib.suppress(RuntimeError):  # `~` of an unknown user: no such file
        path = path.expanduser()
    if name in builtin_configs() and (name == source or not path.exists()):
        return builtin_configs()[name], f"{name}.yaml"
    return (path, source) if path.exists() else None


def _read_source(source: str, *, order: int, problems: list[Problem]) -> tuple[Path, ConfigNode]:
    place = Location(order, 0, source)
    empty = ConfigNode({}, place)
    found = _locate(source)
    if found is None:
        text = f"no such file, nor a built-in configuration; {suggest(source, builtin_configs())}"
        problems.append(Problem(place, text))
        return Path(source), empty
    path, label = found
    place = Location(order, 1, label)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problems.append(Problem(place, f"not UTF-8 text: {error.reason} at byte {error.start}"))
        return path, empty
    except OSError as error:
        problems.append(Problem(place._replace(line=0), f"cannot be read: {error.strerror or error}"))
        return path, empty

    node, wrong = parse(text, place=place)
    problems += wrong
    if node.value is not None and not isinstance(node.value, dict):
        problems.append(
            Problem(place, f"a configuration is a mapping of keys, but this file holds {show(node.plain())}")
        )
    return path, node if isinstance(node.value, dict) else empty


def list_overrides(overrides: Overrides) -> list[Override]:
    return list(overrides.items() if isinstance(overrides, Mapping) else overrides)


def _read_override(override: Override, *, order: int, problems: list[Problem]) -> ConfigNode:
    if isinstance(override, tuple):
        key, given = override
        place = Location(order, 0, flag_of(key) or "argument")
        return ConfigNode({} if given is None else {key: from_python(given, place=place, name=key)}, place)
    place = Location(order, 0, "--override")
    key, equals, value = override.partition("=")
    key = key.strip()
    if not equals or not key:
        problems.append(Problem(place, f"{show(override)} is not KEY=VALUE, such as training.batch_size=16"))
        return ConfigNode({}, place)
    node, wrong = parse(value, place=place, name=key)
    problems += [problem._replace(text=f"{key}: {problem.text}; put quotes around text") for problem in wrong]
    return ConfigNode({} if wrong else {key: node}, place)


def _implied_strategy(path: Path, place: Location) -> ConfigNode:
    """Return the strategy that a file name implies: edp for `cluster_config_edp.yaml`. Any explicit one overrides it."""
    match = re.fullmatch(r"cluster_config_(.+)", path.stem)
    name = {"name": ConfigNode(match[1], place, "strategy.name")} if match else {}
    return ConfigNode({"strategy": ConfigNode(name, place, "strategy")}, place)


def _without_steps_of_files(merged: ConfigNode, *, num_files: int) -> ConfigNode:
    """Drop a file's steps if the command line gives epochs. Otherwise steps take precedence over epochs."""
    steps, epochs = merged.find(("training", "steps")), merged.find(("training", "epochs"))
    if steps is None or epochs is None or epochs.value is None:
        return merged
    if epochs.place.order < num_files or steps.place.order >= num_files:
        return merged
    nothing = ConfigNode({"steps": dataclasses.replace(steps, value=None)}, epochs.place, "training")
    return merge(merged, ConfigNode({"training": nothing}, merged.place))


def _keep_latest_of(merged: ConfigNode, *paths: tuple[str, str]) -> ConfigNode:
    """Of alternative keys, keep the one from the latest source, null included."""
    found = [(path, node) for path in paths if (node := merged.find(path)) is not None]
    last = max((node.place.order for _, node in found), default=0)
    for (section, key), node in found:
        if node.place.order < last:
            nothing = ConfigNode({key: dataclasses.replace(node, value=None)}, node.place, section)
            merged = merge(merged, ConfigNode({section: nothing}, merged.place))
    return merged


def _plugin_options(merged: ConfigNode) -> Collection[str]:
    """Return the options of a strategy from another package, which are not keys of the schema."""
    node = merged.find(("strategy", "name"))
    record = find_record(node.value) if node is not None and isinstance(node.value, str) else None
    options = () if record is None or record.name in BUILT_IN else options_of(record)
    return {option.key for option in options} - StrategyConfig.model_fields.keys()


def _nest_plugin_options(merged: ConfigNode, plugin_keys: Collection[str]) -> tuple[ConfigNode, list[Problem]]:
    """Move `strategy.KEY` to `strategy.options.KEY` for these keys. The last value takes precedence; null means the default."""
    strategy, options = (merged.find(path) for path in (("strategy",), ("strategy", "options")))
    if not plugin_keys or strategy is None or not isinstance((options or strategy).value, dict):
        return merged, []
    below = {} if options is None else options.value
    outside = {key: child for key, child in strategy.children() if key in plugin_keys}
    twice = [(n, below[key]) for key, n in outside.items() if key in below and n.place.order == below[key].place.order]
    inside = dict(sorted([*outside.items(), *below.items()], key=lambda item: item[1].place.order))
    given = {key: child for key, child in inside.items() if child.value is not None}
    rest = {key: child for key, child in strategy.children() if key not in outside}
    rest["options"] = ConfigNode(given, strategy.place, "strategy.options")
    merged = ConfigNode(merged.value | {"strategy": ConfigNode(rest, strategy.place, strategy.name)}, merged.place)
    return merged, [Problem(n.place, f"{n.name}: given twice, here and as {o.name} at {o.place}") for n, o in twice]


def _drop_unknown_keys(merged: ConfigNode, plugin_keys: Collection[str]) -> tuple[ConfigNode, list[Problem]]:
    """Return the tree without unknown keys, and a problem for each of those.

    A null for a key that cannot be null means the default, so it is dropped.
    """
    problems: list[Problem] = []
    known: dict[str, ConfigNode] = {}
    for name, node in merged.children():
        if name not in SECTIONS:
            if name in Config.model_fields:
                known[name] = node
            else:
                problems += [_unknown_key(child, f"{name}.{key}") for key, child in node.children()] or [
                    _unknown_key(node, name)
                ]
            continue
        if not isinstance(node.value, dict):
            problems.append(_bad_value(node, (name,)))
            continue
        section: dict[str, ConfigNode] = {}
        for key, child in node.children():
            if key not in SECTIONS[name].model_fields:
                problems.append(_unknown_key(child, f"{name}.{key}", plugin_keys))
            elif child.value is not None or nullable(name, key):
                section[key] = child
        known[name] = ConfigNode(section, node.place, name)
    return ConfigNode(known, merged.place), problems


def _unknown_key(node: ConfigNode, name: str, plugin_keys: Collection[str] = ()) -> Problem:
    """Report an unknown section or key of a section."""
    near, likeness = nearest(name, also=[f"strategy.{key}" for key in plugin_keys])
    value = "(hidden)" if near == "cluster.token" else show(node.plain())
    hint = f"did you mean '{near}'?" if likeness >= 0.6 else f"the nearest known key is '{near}'"
    return Problem(node.place, f"{name} = {value}: unknown key; {hint}")


def _validate(known: ConfigNode) -> tuple[Config | None, list[Problem]]:
    try:
        return Config.model_validate(known.plain()), []
    except ValidationError as error:
        # pydantic may report several errors inside one value; keep one per value. For a union it reports an error per
        # member; keep the most specific one.
        found = error.errors()
        unknown = [known.reach(part["loc"]) for part in found if part["type"] == "extra_forbidden"]
        bad = dict(known.reach(part["loc"]) for part in found if part["type"] != "extra_forbidden")
        inner = [path for path in bad if not any(path == other[: len(path)] for other in bad if other != path)]
        return None, [_unknown_nested_key(node, path) for path, node in unknown] + [
            _bad_value(bad[p], p) for p in inner
        ]


def _unknown_nested_key(node: ConfigNode, path: KeyPath) -> Problem:
    """Report an unknown key of a mapping below a section; `_unknown_key` reports those of a section."""
    key = path[-1]
    text = f"{node.name} = {show(node.plain())}: unknown key; {suggest(str(key), keys_at(path[:-1]))}"
    return Problem(node.place, text)


def _bad_value(node: ConfigNode, path: KeyPath) -> Problem:
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
    written = key if node.name in ("", key) else f"{node.name} ({key})"
    value = "(hidden)" if key == "cluster.token" else show(node.plain())
    remedy = allowed(path)
    if remedy.startswith("text") and isinstance(node.value, int | float):
        remedy += "; put quotes around it"
    return Problem(node.place, f"{written} = {value}: must be {remedy}")


def _conflicts(config: Config, known: ConfigNode) -> list[Problem]:
    problems = []
    for conflict in conflicts(config):
        # Point at the key that was given last.
        written = [node.place for path in conflict.paths if (node := known.find(path)) is not None]
        place = max(written, key=lambda place: place.order, default=_NOWHERE)
        problems.append(Problem(place, conflict.text))
    return problems
