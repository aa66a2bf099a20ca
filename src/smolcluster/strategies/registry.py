"""Find a strategy's class and options by name. The records are in `config/strategies.py`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from pydantic import ValidationError

from smolcluster.config.describe import reason
from smolcluster.config.schema import StrategyConfig
from smolcluster.config.strategies import record_of
from smolcluster.errors import UserError

if TYPE_CHECKING:
    from smolcluster.config.options import Options
    from smolcluster.strategies.base import Strategy


def find_strategy(name: str, plane: str | None = None, options: Options | None = None) -> type[Strategy[Options]]:
    """Return the class for this plane (default: the strategy's first) and these options (default: its defaults)."""
    record = record_of(name)
    plane = plane or record.planes[0]
    if plane not in record.where:
        raise UserError(f"strategy {record.name} does not run on the {plane} plane")
    where = record.where[plane]
    if options is not None and record.code_for is not None and plane == "mesh":
        where = record.code_for(options) or where
    module, _, attribute = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"strategy {record.name}: {where} cannot be imported: {error}") from error
    declared, used = record.options_on(plane), found.Config
    if declared is not None and (not issubclass(declared, used) or declared.model_fields.keys() - used.model_fields):
        text = f"its record has the options {declared.__name__}, and {attribute} has {used.__name__}; name one class"
        raise UserError(f"strategy {record.name}: {text}")
    if plane == "elastic":
        from smolcluster.strategies.base.replicated import Exchanging

        if not issubclass(found, Exchanging):
            raise UserError(
                f"strategy {record.name}: {attribute} cannot run on the elastic plane; derive it from Exchanging, or from "
                "Pushing where a parameter server combines (smolcluster.strategies.base.replicated)"
            )
    return cast("type[Strategy[Options]]", found)


def read_options(section: StrategyConfig, *, plane: str | None = None) -> tuple[Options, list[str]]:
    """Return the strategy's options from the section, and the names of set keys that have no effect on this plane or
    with the other options."""
    record = record_of(section.name)
    options_class = record.options_on(plane or record.planes[0]) or find_strategy(section.name, plane).Config
    given, known = section.given(), options_class.on(plane)
    if "reduce_bucket_size" in given and "bucket_mb" in known:
        if "bucket_mb" in given:
            raise UserError("strategy.bucket_mb and strategy.reduce_bucket_size are the same; leave one of them out")
        given["bucket_mb"] = given.pop("reduce_bucket_size") * 4 / 2**20
    try:
        options = options_class(**{k: v for k, v in given.items() if k in known})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"strategy.{place} = {first['input']!r}: {reason(first)}" if place else reason(first)
        ) from error
    return options, sorted(given.keys() - known.keys() | given.keys() & options.without_effect())


def not_used(name: str, plane: str, ignored: Sequence[str]) -> str:
    """Return the warning about options that are set and have no effect."""
    return f"strategy {name} does not use, on the {plane} plane and with these options: {', '.join(ignored)}"
