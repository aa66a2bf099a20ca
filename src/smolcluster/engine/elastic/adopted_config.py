"""The configuration of a worker: an allow-list of keys from the server, everything else from the worker's owner.

    from the server   numbers, flags and choices of the sections model, training, lr_schedule, strategy and cluster; the
                      names of the strategy, the hosts and the dataset
    from the owner    what touches this machine's files, network or code: data.root, data.cache_dir, data.tokenizer_root,
                      data.download, logging, training.device, the task, the token

The owner sets them in the worker's own configuration (`WorkerSpec.config`) and in its flags and overrides
(`WorkerSpec.overrides`). A dataset other than the embedded text is read only if one of them names its folder or the dataset,
a tokenizer in a file only if one of them names that file. This module does not import torch.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ValidationError

from smolcluster.config import public_dict
from smolcluster.config.names import SECTIONS, known_keys
from smolcluster.config.schema import Config
from smolcluster.config.strategies import BUILT_IN
from smolcluster.data.names import HF_PREFIX, is_text
from smolcluster.engine.checks import OWN_TO_A_HOST, check_same_config
from smolcluster.errors import UserError

MAX_STEPS = 2**53
EMBEDDED = "embedded"
_WITHOUT_FILES = ("bytes", "chars")  # tokenizers that need none
_NAMED = (*_WITHOUT_FILES, "gpt2", "openai-community/gpt2")  # any other tokenizer is a path

# Set by each machine: not compared with the server's configuration.
OWN_TO_A_MEMBER = OWN_TO_A_HOST | {
    *("training.precision", "training.compile", "training.gradient_checkpointing"),
    *("data.download", "data.tokenizer", "logging", "cluster", "run", "task"),
    *("training.steps", "training.epochs"),  # the length of the run is the server's decision, e.g. with --steps
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """The server's answer to ASK."""

    run: str
    total_steps: int
    config: Mapping[str, Any]


def read_plan(meta: Mapping[str, Any]) -> ServerPlan:
    """Parse the server's plan. Raises ValueError."""
    run, steps, config = meta.get("run"), meta.get("total_steps"), meta.get("config")
    if not isinstance(run, str) or not re.fullmatch(r"[0-9a-f]{16}", run):
        raise ValueError("its run has no id")
    if type(steps) is not int or not 0 < steps <= MAX_STEPS:
        raise ValueError("its number of steps is not a positive integer")
    if not isinstance(config, dict):
        raise ValueError("it has no configuration")
    for name, value in config.items():
        if name not in Config.model_fields or (name in SECTIONS and not isinstance(value, dict)):
            raise ValueError(f"this version knows no section {name!r:.60}; install the same version on both machines")
        unknown = [key for key in value if key not in SECTIONS[name].model_fields] if name in SECTIONS else []
        if unknown:
            key = f"{name}.{unknown[0]}"
            raise ValueError(f"this version knows no key {key!r:.60}; install the same version on both machines")
    return ServerPlan(run=run, total_steps=steps, config=config)


# The allow-list


def _is_plain(annotation: Any) -> bool:
    """Return whether a key holds only numbers, flags or choices: nothing that names a file, an address or code."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _is_plain(arguments[0])
    if origin is dict:
        return _is_plain(arguments[1])
    if origin in (typing.Union, types.UnionType, list, tuple):
        return all(_is_plain(argument) for argument in arguments if argument is not Ellipsis)
    return annotation in (int, float, bool, types.NoneType)


_TRUSTED_SECTIONS = ("model", "training", "lr_schedule", "strategy", "cluster")
_TRUSTED_KEYS = {"strategy.name", "cluster.workers", "data.name", "data.val_fraction", "logging.log_interval"}
_NOT_TRUSTED = {
    *("training.profile_ranks", "strategy.draw_schedule"),  # these write files
    *("cluster.port", "cluster.buffer_size", "cluster.standby"),
}
FROM_SERVER: frozenset[str] = frozenset(
    key
    for key in known_keys()
    for section, _, name in [key.partition(".")]
    if key in _TRUSTED_KEYS
    or (
        section in _TRUSTED_SECTIONS
        and key not in _NOT_TRUSTED
        and _is_plain(SECTIONS[section].model_fields[name].annotation)
    )
)


def adopt(
    theirs: Mapping[str, Any],
    *,
    own: Config | None,
    given: Mapping[str, Any],
    strategy: str = "",
    rank: int,
    server: str,
) -> Config:
    """Return the configuration that this worker runs with.

    `theirs` is what the server sent (`ServerPlan.config`), `own` the worker's configuration if it has one, `given` its flags
    and overrides by dotted name, `strategy` what it was started for. Raises UserError for what the owner has not allowed.
    """
    if own is not None:
        first_is = f"the server at {server}"
        # The server may have picked these from the measured link.
        open_ones = {key for key in ("preset", "inner_steps") if getattr(own.strategy, key, None) is None}
        own_keys = OWN_TO_A_MEMBER | {f"strategy.{key}" for key in open_ones}
        check_same_config(dict(theirs), public_dict(own), rank=rank, own=own_keys, first_is=first_is)
    plain = (own or Config.model_validate({})).model_dump(mode="json")
    for key in FROM_SERVER:
        section, _, name = key.partition(".")
        if name in theirs.get(section, {}):
            plain[section][name] = theirs[section][name]
    try:
        config = Config.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))[:80]
        raise UserError(f"the server at {server} sent {key} = {first['input']!r:.80}: {first['msg']:.200}") from error
    _adopt_strategy(config, theirs, own=own, strategy=strategy, server=server)
    _adopt_data(config, theirs, own=own, given=given, server=server)
    for key, value in given.items():
        if key in ("data.name", "data.tokenizer"):
            continue  # adopted above
        section, _, name = key.rpartition(".")  # the task is in no section
        setattr(getattr(config, section) if section else config, name, value)
    _adopt_task(config, theirs.get("task"), server=server)
    return config


def _adopt_strategy(
    config: Config, theirs: Mapping[str, Any], *, own: Config | None, strategy: str, server: str
) -> None:
    name = config.strategy.name
    if strategy not in ("", name):
        raise UserError(
            f"the server at {server} runs the strategy {name:.60} and this worker was started for {strategy}; "
            "leave --strategy out, or start another server"
        )
    if own is not None:
        return  # compared already, options included
    options = theirs.get("strategy", {}).get("options", {})
    if name in BUILT_IN:
        config.strategy.options = options if isinstance(options, dict) else {}
    elif strategy == "" or options:
        raise UserError(
            f"the server at {server} runs the strategy {name!r:.60}, which is not one of smolcluster's own; if this machine "
            "may run it, give the server's configuration to this worker, as worker RANK HOSTNAME CONFIG"
        )


def _adopt_data(
    config: Config, theirs: Mapping[str, Any], *, own: Config | None, given: Mapping[str, Any], server: str
) -> None:
    """Adopt the names of the dataset and its tokenizer; their folders and anything that needs files come from the owner."""
    data, name = config.data, config.data.name
    allowed = own.data.name if own is not None else given.get("data.name")
    if allowed not in (None, name):
        raise UserError(
            f"the server at {server} trains on data.name {name!r:.60} and this worker was started for {allowed!r}; start both "
            "with the same data"
        )
    text = is_text(name)
    by_root = given.get("data.root") is not None and not name.startswith(HF_PREFIX)
    if name != EMBEDDED and allowed is None and not by_root:
        here = "" if name.startswith(HF_PREFIX) else "--data-root FOLDER if the data is on this machine, or with "
        raise UserError(
            f"the server at {server} trains on data.name {name!r:.60}, and a server may not choose files for this machine to "
            f"read or download: start this worker with {here}--override data.name={name:.60} to use its cache folder, "
            "downloading what is missing"
        )
    if not text:
        return
    wanted = theirs.get("data", {}).get("tokenizer")
    mine = given.get("data.tokenizer") or (own.data.tokenizer if own is not None else None)
    if wanted is not None and not isinstance(wanted, str):
        raise UserError(f"the server at {server} sent data.tokenizer = {wanted!r:.60}: it must be text")
    if mine is None and own is None:
        consented = name != EMBEDDED or given.get("data.tokenizer_root") is not None
        data.tokenizer = wanted if wanted in _WITHOUT_FILES or (wanted in _NAMED and consented) else None
    else:
        data.tokenizer = mine
    both_paths = wanted not in (None, *_NAMED) and mine not in (None, *_NAMED)
    if data.tokenizer != wanted and not both_paths:
        here = "this worker was not given one" if mine is None else f"this worker was given {mine!r}"
        value = wanted if wanted in _NAMED else "PATH"
        raise UserError(
            f"the server at {server} uses data.tokenizer {wanted!r:.200} and {here}; a server may not choose files for this "
            f"machine to read or download: start this worker with --override data.tokenizer={value}"
        )


def _adopt_task(config: Config, theirs: Any, *, server: str) -> None:
    """Check that both sides train a task, or neither. `config.task` is the owner's."""
    if theirs is not None and config.task is None:
        raise UserError(
            f"the server at {server} trains a custom task, {theirs!r:.200}; code is not sent: start this worker with a "
            "copy of that file, as worker RANK HOSTNAME --task FILE.py:Class"
        )
    if theirs is None and config.task is not None:
        raise UserError(
            f"this worker was started with the task {config.task} and the server at {server} trains without one; leave it out, "
            "or start the server with that task"
        )
