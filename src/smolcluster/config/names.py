"""The names of keys, their flat spellings, and suggestions for misspelt ones."""

from __future__ import annotations

import difflib
import functools
import re
import typing
from collections.abc import Iterable

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

# Names of our keys in other programs, for suggestions only.
_ELSEWHERE = {
    "lr": "training.learning_rate",
    "optimizer.lr": "training.learning_rate",
    "max_steps": "training.steps",
    "max_iters": "training.steps",
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.model_dim",
    "d_model": "model.model_dim",
    "block_size": "model.max_seq_len",
    "world_size": "cluster.num_workers",
    "gradient_clipping": "training.grad_clip_norm",
    "max_grad_norm": "training.grad_clip_norm",
    "model.dim": "model.model_dim",
    "model.hidden_size": "model.model_dim",
    "model.layers": "model.num_layers",
    "model.heads": "model.num_heads",
    "training.warmup": "lr_schedule.warmup_iters",
    "training.warmup_steps": "lr_schedule.warmup_iters",
    "data.path": "data.root",
    "data.file": "data.root",
}


# Synonyms in keys.
_SAME_WORD = {"interval": "steps", "every": "steps", "freq": "steps", "frequency": "steps", "save": "checkpoint"}
_SAME_WORD |= {"lr": "learning_rate", "validation": "eval", "val": "eval", "checkpoints": "checkpoint", "step": "steps"}


def nullable(section: str, key: str) -> bool:
    """Return whether this key may be null. For other keys null means the default."""
    return type(None) in typing.get_args(SECTIONS[section].model_fields[key].annotation)


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Return every dotted key, in the order of the schema."""
    keys: list[str] = []
    for name in Config.model_fields:
        section = SECTIONS.get(name)
        keys += [f"{name}.{key}" for key in section.model_fields] if section else [name]
    return tuple(keys)


@functools.cache
def _spellings() -> dict[str, str]:
    """Map every spelling of a key to the key."""
    spellings = {key: key for key in known_keys()}
    for name, key in (_ELSEWHERE | FLAGS).items():
        spellings.setdefault(name, key)
    for name, path in FLAT.items():
        spellings[name] = ".".join(path)
    return spellings | {name: name for name in SECTIONS}


def nearest(name: str, *, also: Iterable[str] = ()) -> tuple[str, float]:
    """Return the known key most similar to `name`, and their similarity, up to 1. The last part weighs most.

    So `trainin.batch_size` finds `training.batch_size`, and `model.learning_rate` finds `training.learning_rate`. An unknown
    section may be the first word of a key: `checkpoint.interval` finds `training.checkpoint_steps`.
    """
    section, _, leaf = name.rpartition(".")

    def likeness(spelling: str) -> float:
        its_section, _, its_leaf = spelling.rpartition(".")
        # For a known section, all others are equally different.
        same_section = float(section == its_section) if section in SECTIONS else _likeness(section, its_section)
        same_section = same_section if section else 1.0
        found = 0.75 * max(_likeness(leaf, its_leaf), _same_words(leaf, its_leaf)) + 0.25 * same_section
        if section and section not in SECTIONS:
            found = max(found, _same_words(f"{section}_{leaf}", its_leaf))
        return found

    spellings = _spellings() | {key: key for key in also}
    best = max(spellings, key=likeness)
    return spellings[best], likeness(best)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _same_words(one: str, other: str) -> float:
    """Return the similarity of two keys up to synonyms, slightly below that of equal spelling."""
    words = [[_SAME_WORD.get(word, word) for word in re.split(r"[._]", key.lower())] for key in (one, other)]
    return 0.95 * _likeness("_".join(words[0]), "_".join(words[1]))
