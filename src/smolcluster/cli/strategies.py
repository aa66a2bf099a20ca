"""`smolcluster strategies`: every strategy, what it is for, and its options."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

EXAMPLES = "Example: smolcluster strategies --json"


def strategies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    from smolcluster.config.strategies import all_records, options_of

    rows: list[dict[str, Any]] = []
    records = dict(sorted(all_records().items()))
    for name, record in records.items():
        options: dict[str, dict[str, Any]] = {}
        for option in options_of(record):
            about = {"default": option.field.default, "description": option.field.description}
            planes = options.setdefault(option.key, about | {"planes": {}})["planes"]
            planes.update(dict.fromkeys([option.plane] if option.plane else record.planes, about))
        rows.append(
            {
                "name": name,
                "algorithm": record.algorithm,
                "aliases": sorted(record.aliases),
                "planes": list(record.planes),
                "summary": record.summary,
                "use_when": record.use_when,
                "options": options,
            }
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
        return
    for row in rows:
        also = f"  (also: {', '.join(row['aliases'])})" if row["aliases"] else ""
        typer.echo(f"{row['name']}{also}\n    {row['summary']}")
        if row["use_when"]:
            typer.echo(f"    use it when: {row['use_when']}")
        for option in options_of(records[row["name"]]):
            plane = f" ({option.plane})" if option.plane else ""
            typer.echo(f"    {option.key}{plane} = {option.field.default}: {option.field.description}")
