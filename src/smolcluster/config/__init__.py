"""The configuration: schema, loading from YAML, errors with a remedy. Nothing here imports torch."""

from smolcluster.config.flags import flag_sets
from smolcluster.config.load import builtin_configs, load_config
from smolcluster.config.resolve import dump, public_dict, resolve
from smolcluster.config.schema import Config
from smolcluster.config.strategies import canonical_strategy

__all__ = [
    "Config",
    "builtin_configs",
    "canonical_strategy",
    "dump",
    "flag_sets",
    "load_config",
    "public_dict",
    "resolve",
]
