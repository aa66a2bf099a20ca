"""The names a configuration may use: keys, their flat spellings, strategies, and what a misspelt one most resembles."""

from __future__ import annotations

import difflib
import functools
import typing

from smolcluster.config.flags import FLAGS
from smolcluster.config.schema import Config, Section

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}

# A section may be given as one plain word: `strategy: edp`.
SHORTHAND = {"strategy": "name", "model": "type", "data": "name"}

# A flat key is a key of one of these sections written at the top level, as the first cluster files and nn_config.yaml
# have them. A key of several sections goes to the first that has it: `seed` is cluster.seed. (`batch_size` is both: a
# number is training.batch_size, a mapping of hosts cluster.batch_size.)
FLAT: dict[str, tuple[str, str]] = {
    "batch_size": ("training", "batch_size"),
    "num_epochs": ("training", "epochs"),
}
for _section in ("cluster", "training", "strategy"):
    for _key in SECTIONS[_section].model_fields:
        if _key not in ("name", "options"):
            FLAT.setdefault(_key, (_section, _key))

ALIASES = {
    "classicdp": "allreduce",
    "dp": "allreduce",
    "ddp": "allreduce",
    "dataparallel": "allreduce",
    "ps": "syncps",
    "synchronousps": "syncps",
    "mp": "pipeline",
    "modelparallelism": "pipeline",
    "modelparallel": "pipeline",
    "zero": "fsdp",
} | {
    name: name
    for name in (
        ("single", "allreduce", "fsdp", "tensor", "pipeline", "mesh") + ("edp", "syncps", "diloco", "dipaco", "swarm")
    )
}

# What other programs call our keys: only for suggestions.
_ELSEWHERE = {
    "lr": "training.learning_rate",
    "max_steps": "training.steps",
    "max_iters": "training.steps",
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.model_dim",
    "d_model": "model.model_dim",
    "block_size": "model.max_seq_len",
    "world_size": "cluster.num_workers",
    "gradient_clipping": "training.grad_clip_norm",
}


def canonical_strategy(name: str) -> str:
    """The strategy's own name: `ClassicDP` -> `allreduce`. Case, `-` and `_` do not matter. Others pass unchanged."""
    return ALIASES.get(name.strip().lower().replace("-", "").replace("_", ""), name.strip())


def nullable(section: str, key: str) -> bool:
    """Whether null is a value of this key's own. For any other key it means the default."""
    return type(None) in typing.get_args(SECTIONS[section].model_fields[key].annotation)


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Every key, dotted, in the order of the schema."""
    keys: list[str] = []
    for name in Config.model_fields:
        section = SECTIONS.get(name)
        keys += [f"{name}.{key}" for key in section.model_fields] if section else [name]
    return tuple(keys)


@functools.cache
def _spellings() -> dict[str, str]:
    """What a user may have meant -> the key it stands for."""
    spellings = {key: key for key in known_keys()}
    for name, key in (_ELSEWHERE | FLAGS).items():
        spellings.setdefault(name, key)
    for name, path in FLAT.items():
        spellings[name] = ".".join(path)
    return spellings | {name: name for name in SECTIONS}


def nearest(name: str) -> tuple[str, float]:
    """The known key most like `name`, and how alike they are, up to 1. The last part weighs most.

    So `trainin.batch_size` finds `training.batch_size`, and `model.learning_rate` finds `training.learning_rate`.
    """
    section, _, leaf = name.rpartition(".")

    def likeness(spelling: str) -> float:
        its_section, _, its_leaf = spelling.rpartition(".")
        same_leaf = difflib.SequenceMatcher(None, leaf, its_leaf).ratio()
        same_section = difflib.SequenceMatcher(None, section, its_section).ratio() if section else 1.0
        return 0.75 * same_leaf + 0.25 * same_section

    best = max(_spellings(), key=likeness)
    return _spellings()[best], likeness(best)
