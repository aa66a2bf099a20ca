"""`smolcluster strategies`: every strategy, what it is for, and its options."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

EXAMPLES = "Example: smolcluster strategies --json"


def strategies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List every strategy: name, aliases, what it is for, its options."""
    from smolcluster.config.strategies import all_records
    from smolcluster.strategies.registry import find_strategy

    rows: list[dict[str, Any]] = []
    for name, record in sorted(all_records().items()):
        strategy = find_strategy(name)
        rows.append(
            {
                "name": name,
                "algorithm": record.algorithm,
                "aliases": sorted(record.aliases),
                "planes": list(record.planes),
                "summary": record.summary,
                "options": {
                    key: {"default": field.default, "description": field.description}
                    for key, field in strategy.Config.model_fields.items()
                },
            }
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        also = f"  (also: {', '.join(row['aliases'])})" if row["aliases"] else ""
        typer.echo(f"{row['name']}{also}\n    {row['summary']}")
        for key, option in row["options"].items():
            typer.echo(f"    {key} = {option['default']}: {option['description']}")
