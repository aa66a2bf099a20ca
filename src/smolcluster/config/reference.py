"""The reference page, docs/configuration.md, written from the schema.

python -m smolcluster.config.reference > docs/configuration.md
"""

from __future__ import annotations

from smolcluster.config.describe import allowed, show
from smolcluster.config.load import builtin_configs
from smolcluster.config.names import SECTIONS, SHORTHAND
from smolcluster.config.schema import Config, HostConfig, LinkConfig, Section
from smolcluster.config.strategies import ALIASES

_INTRO = """\
# Configuration

<!-- Written by `python -m smolcluster.config.reference`; change the schema, not this page. -->

A configuration is YAML. `smolcluster train` takes files and built-in names, merged left to right, then overrides:

```
smolcluster train gpt my.yaml --override training.batch_size=16 training.epochs=5
```

- Mappings merge, key by key; lists and single values replace what was there.
- `null` means automatic, or the default. `smolcluster config show` prints what can be known before the data is opened.
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
files and nn_config.yaml have them. These are not simply the key without its section, or need a word more:

| written | means |
|---|---|
"""

_FLAT_MEANINGS = [
    ("`batch_size: 32`", "`training.batch_size`"),
    ("`batch_size: {pi5: 8}`", "`cluster.batch_size`: per host"),
    ("`batch_size: auto`", "`cluster.batch_size`: fitted on every host"),
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


def markdown() -> str:
    """The whole page."""
    builtin = ", ".join(f"`{name}`" for name in builtin_configs())
    parts = [_INTRO, f"Built-in configurations: {builtin}.\n"]
    for name in SECTIONS:
        parts.append(_section_table(name))
        parts += [_inner_table(title, kind) for title, kind in _INNER.get(name, {}).items()]
    others = [name for name in Config.model_fields if name not in SECTIONS]
    parts.append("## Top level\n\n" + _table([(name,) for name in others]))
    parts.append(_FLAT + "".join(f"| {written} | {meaning} |\n" for written, meaning in _FLAT_MEANINGS))
    parts.append(_ALIASES + "".join(f"| `{alias}` | `{name}` |\n" for alias, name in ALIASES.items()))
    return "\n".join(parts)


def _section_table(section: str) -> str:
    doc = SECTIONS[section].__doc__ or ""
    about = " ".join(doc.split())
    return f"## {section}\n\n{about}\n\n" + _table([(section, key) for key in SECTIONS[section].model_fields])


def _inner_table(title: str, kind: type[Section]) -> str:
    """What stands below a name that the user chooses."""
    rows = ["| key | default | may be | meaning |", "|---|---|---|---|"]
    section, holder, *_ = title.split(".")
    for key, field in kind.model_fields.items():
        default = show(field.get_default(call_default_factory=True)).replace("'", "")
        rows.append(
            f"| `{key}` | `{default}` | {allowed((section, holder, 'x', key))} | {_cell(field.description or '')} |"
        )
    about = " ".join((kind.__doc__ or "").split())
    return f"### {title}\n\n{about}\n\n" + "\n".join(rows) + "\n"


def _table(paths: list[tuple[str, ...]]) -> str:
    rows = ["| key | default | may be | meaning |", "|---|---|---|---|"]
    for path in paths:
        section = SECTIONS[path[0]] if len(path) == 2 else Config
        field = section.model_fields[path[-1]]
        default = show(field.get_default(call_default_factory=True)).replace("'", "")
        rows.append(f"| `{path[-1]}` | `{default}` | {allowed(path)} | {_cell(field.description or '')} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(markdown(), end="")
