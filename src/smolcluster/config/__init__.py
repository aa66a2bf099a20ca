"""The configuration: schema, loading from YAML, errors with a remedy. Nothing here imports torch.

schema.py      the keys, with types and defaults; types.py: bounds
options.py     the keys of each strategy; strategies.py: the strategies, by name
load.py        files and overrides to a `Config`, or one error for all mistakes (unknown keys too)
tree.py        YAML with the line of each value
names.py       spellings of keys, nearest names; flat.py: flat keys to sections; flags.py: flags to keys
checks.py      rules between keys
resolve.py     automatic values; YAML out
shape.py       the `model` section as a model's configuration
describe.py    values and keys in messages and in the reference page
"""

from smolcluster.config.flags import flag_overrides
from smolcluster.config.load import Overrides, builtin_configs, list_overrides, load_config
from smolcluster.config.resolve import dump, public_dict, resolve
from smolcluster.config.schema import Config
from smolcluster.config.strategies import canonical_strategy

__all__ = [
    "Config",
    "Overrides",
    "builtin_configs",
    "canonical_strategy",
    "dump",
    "flag_overrides",
    "list_overrides",
    "load_config",
    "public_dict",
    "resolve",
]
