"""Generate documentation from the schema, the records of the strategies and the doctor's table.

python -m tools.reference docs    configuration.md, troubleshooting.md, tables in strategies/ and in README.md, line numbers in
                                  architecture.md
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from smolcluster.config.describe import allowed, show
from smolcluster.config.load import builtin_configs
from smolcluster.config.names import SECTIONS, SHORTHAND
from smolcluster.config.options import CodecOptions
from smolcluster.config.schema import Config, HostConfig, LinkConfig, Section
from smolcluster.config.strategies import ALIASES, BUILT_IN, Record, StrategyOption, built_in_options, options_of
from smolcluster.config.tree import KeyPath
from smolcluster.launch.doctor.layers import TROUBLES

_INTRO = """\
# Configuration

<!-- Written by `python -m tools.reference docs`; change the schema, not this page. -->

A configuration is YAML. `smolcluster train` takes files and built-in names, merged left to right, then overrides:

```
smolcluster train gpt my.yaml --override training.batch_size=16 training.epochs=5
```

- Mappings merge, key by key; lists and single values replace what was there.
- `null` means automatic, or the default. `smolcluster config show` prints the values that do not depend on the data.
- An unknown key is an error, and so is a key given twice in one file.
- Numbers may be written `6e-4` or `1e3`. Text that looks like a number needs quotes.
- `training.batch_size: 16` at the top level of a file is the same as `batch_size: 16` in `training`.
"""

# Mappings of names that the user chooses.
_INNER: dict[str, dict[str, type[Section]]] = {
    "cluster": {"cluster.hosts.NAME": HostConfig, "cluster.links.NAME": LinkConfig}
}

_FLAT = """\
## Flat keys

Keys of `cluster`, `training` and `strategy` may also stand at the top level, in files and in overrides, as the cluster
files and nn_config.yaml have them. These have another name, or need an explanation:

| written | means |
|---|---|
"""

_FLAT_MEANINGS = [
    ("`batch_size: 32`", "`training.batch_size`"),
    ("`batch_size: {pi5: 8}`", "`cluster.batch_size`: per host"),
    ("`batch_size: auto`", "`cluster.batch_size`: by measured speed, on every host"),
    ("`num_epochs: 2`", "`training.epochs`"),
    ("`seed: 42`", "`cluster.seed`"),
    ("`gradient_clipping: {enabled: true, max_norm: 1.0}`", "`training.grad_clip_norm`; `null` when not enabled"),
    ("`dataset: {name: MNIST}`", "`data.name`"),
    *((f"`{section}: WORD`", f"`{section}.{key}`") for section, key in SHORTHAND.items()),
]

_ALIASES = """\
## Strategies by other names

A file called `cluster_config_NAME.yaml` means the strategy NAME, unless one is named elsewhere. Case, `-` and `_` do
not matter.

| written | strategy |
|---|---|
"""


_BEGIN = "<!-- Written by `python -m tools.reference docs`; change the record, not this table. -->\n"
_END = "<!-- end -->\n"


def pages(docs: Path) -> dict[Path, str]:
    """Return the text of every page with generated parts."""
    found = {docs / "configuration.md": markdown(), docs / "troubleshooting.md": troubleshooting()}
    found[docs / "architecture.md"] = with_lines(docs / "architecture.md")
    folder = docs / "strategies"
    tables = {docs.parent / "README.md": _short_strategy_table(), folder / "index.md": _strategy_table()}
    tables |= {folder / f"{name}.md": table for name, record in BUILT_IN.items() if (table := _option_table(record))}
    for path, table in tables.items():
        before, _, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
        found[path] = before + _BEGIN + table + _END + rest.partition(_END)[2]
    return found


def with_lines(page: Path) -> str:
    """Return the page with the line of each class or function that it links to: [`Class.method`](FILE#L10)."""

    def link(match: re.Match[str]) -> str:
        name, file = match[1], match[2]
        return f"[`{name}`]({file}#L{_line_of(name, page.parent / file)})"

    return re.sub(r"\[`([\w.]+)`\]\((\S+\.py)(?:#L\d+)?\)", link, page.read_text(encoding="utf-8"))


def _line_of(name: str, file: Path) -> int:
    """Raises StopIteration where the file has no such class or function."""
    found: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next(n for n in ast.iter_child_nodes(found) if isinstance(n, kinds) and n.name == part)
    assert isinstance(found, ast.stmt)
    return found.lineno


def _strategy_table() -> str:
    rows = ["| strategy | also called | planes | use it when |", "|---|---|---|---|"]
    for name, record in BUILT_IN.items():
        known = [record.algorithm] if record.algorithm != name.capitalize() else []
        known += [alias for alias in record.aliases if alias != record.algorithm.lower()]
        rows.append(f"| [`{name}`]({name}.md) | {', '.join(known)} | {', '.join(record.planes)} | {record.use_when} |")
    return "\n".join(rows) + "\n"


def _short_strategy_table() -> str:
    rows = ["| strategy | use it when | file |", "|---|---|---|"]
    for name, record in BUILT_IN.items():
        known = f" ({record.algorithm})" if record.algorithm.lower() != name else ""
        file = next(iter(record.where.values())).partition(":")[0].rpartition(".")[2] + ".py"
        rows.append(f"| `{name}`{known} | {record.use_when} | [{file}](src/smolcluster/strategies/{file}) |")
    return "\n".join(rows) + "\n"


def _option_table(record: Record) -> str:
    """The options of the codecs share a row: docs/codecs.md describes them."""
    options = list(options_of(record))
    of_codecs = [option for option in options if option.key in CodecOptions.model_fields and option.key != "codec"]
    rows = []
    for option in options:
        plane = f" ({option.plane})" if option.plane else ""
        if option not in of_codecs:
            meaning = _cell(option.field.description or "")
            rows.append(f"| `{option.key}`{plane} | {_defaults([option])} | {meaning} |")
        elif option is of_codecs[0]:
            keys = ", ".join(f"`{each.key}`" for each in of_codecs)
            rows.append(f"| {keys}{plane} | | options of the codecs: [codecs](../codecs.md) |")
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) + "\n" if rows else ""


def _defaults(takers: Sequence[StrategyOption]) -> str:
    """`25.0`, or `allreduce 25.0; edp 4.0` where they differ."""
    by_value: dict[str, list[str]] = {}
    for option in takers:
        by_value.setdefault(show(option.field.default).replace("'", ""), []).append(option.taker)
    if len(by_value) == 1:
        return f"`{next(iter(by_value))}`"
    return "; ".join(f"{', '.join(names)} `{value}`" for value, names in by_value.items())


def markdown() -> str:
    """Return configuration.md."""
    builtin = ", ".join(f"`{name}`" for name in builtin_configs())
    parts = [_INTRO, f"Built-in configurations: {builtin}.\n"]
    for name, kind in SECTIONS.items():
        parts.append(_described(f"## {name}", kind, (name,)))
        parts += [
            _described(f"### {path}", inner, tuple(path.split("."))) for path, inner in _INNER.get(name, {}).items()
        ]
    others = [name for name in Config.model_fields if name not in SECTIONS]
    parts.append("## Top level\n\n" + _table(Config, others, ()))
    parts.append(_FLAT + "".join(f"| {written} | {meaning} |\n" for written, meaning in _FLAT_MEANINGS))
    parts.append(_ALIASES + "".join(f"| `{alias}` | `{name}` |\n" for alias, name in ALIASES.items()))
    return "\n".join(parts)


def _described(title: str, kind: type[Section], path: KeyPath) -> str:
    about = " ".join((kind.__doc__ or "").split())
    return f"{title}\n\n{about}\n\n" + _table(kind, kind.model_fields, path)


def _table(kind: type[Section], keys: Iterable[str], path: KeyPath) -> str:
    rows = ["| key | default | may be | meaning |", "|---|---|---|---|"]
    for key in keys:
        field = kind.model_fields[key]
        default = f"`{show(field.get_default(call_default_factory=True))}`".replace("'", "")
        if path == ("strategy",) and key in built_in_options():  # null there: the default of the strategy
            default = _defaults(built_in_options()[key])
        rows.append(f"| `{key}` | {default} | {allowed((*path, key))} | {_cell(field.description or '')} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def troubleshooting() -> str:
    """Return troubleshooting.md."""
    lines = [
        "# Troubleshooting",
        "",
        "<!-- Written by `python -m tools.reference docs`; change launch/doctor/layers.py, not this page. -->",
        "",
        "Start with the doctor. It names the lowest layer that fails, and the remedy:",
        "",
        "```",
        "smolcluster doctor                        # this machine",
        "smolcluster doctor 192.168.1.10           # a server, seen from here; HOST:PORT for another port than 65432",
        "smolcluster doctor cluster.yaml           # all machines of a cluster, and the paths between them",
        "```",
        "",
    ]
    for layer, troubles in TROUBLES.items():
        lines += [f"## {layer}", "", "| you see | because | do |", "|---|---|---|"]
        lines += [f"| {t.sign} | {t.cause} | {t.remedy.replace('|', chr(92) + '|')} |" for t in troubles]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    for _path, _text in pages(Path(sys.argv[1])).items():
        _path.write_text(_text, encoding="utf-8", newline="\n")
