"""The configuration: schema, loading from YAML, errors with a remedy. Nothing here imports torch."""

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
