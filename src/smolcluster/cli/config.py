"""`smolcluster config`: check, show and describe configurations."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from smolcluster.cli import options

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: smolcluster config check cluster.yaml gpt.yaml",
)


@app.command("check", epilog="Example: smolcluster config check cluster_config_edp.yaml gpt_config.yaml")
def check(
    files: Annotated[list[str], typer.Argument(help="YAML files or built-in names; they merge left to right.")],
    override: options.Override = None,
) -> None:
    """Validate configuration files: exit 0 if they are valid, else 2 with every problem."""
    from smolcluster.config import load_config, resolve

    resolve(load_config(files, overrides=override or []))
    typer.echo(f"{', '.join(files)}: ok")


@app.command("show", epilog="Example: smolcluster config show gpt --override training.steps=50")
def show(
    files: Annotated[
        list[str] | None, typer.Argument(help="YAML files or built-in names. Default: the built-in default.")
    ] = None,
    override: options.Override = None,
) -> None:
    """Print the resolved configuration as YAML."""
    from smolcluster.config import dump, load_config, resolve

    typer.echo(dump(resolve(load_config(files or ["default"], overrides=override or []))), nl=False)


@app.command("schema", epilog="Example: smolcluster config schema > smolcluster.schema.json")
def schema() -> None:
    """Print the JSON schema of a configuration, for editors."""
    from smolcluster.config.describe import schema_for_editors

    typer.echo(json.dumps(schema_for_editors(), indent=2))
