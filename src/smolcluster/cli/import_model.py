"""`smolcluster import`: a model of others, to go on training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Example:

smolcluster import SmolLM2-135M runs/smollm

smolcluster train --resume runs/smollm --steps 100 --override data.tokenizer=SmolLM2-135M/tokenizer.json
"""


def import_model(
    folder: Annotated[
        Path, typer.Argument(help="A Hugging Face folder: config.json and model.safetensors, or its shards.")
    ],
    run: Annotated[Path, typer.Argument(help="The run directory to make; it must not hold a run yet.")],
) -> None:
    """Make a run at step 0 from the weights of a GPT-2, Llama or Qwen2 model."""
    from smolcluster.engine.importing import import_model

    shape = import_model(folder, run)
    typer.echo(f"{run}: {shape.num_parameters:,} parameters, {shape.num_layers} layers of {shape.model_dim}")
    typer.echo(f"go on from it with: smolcluster train --resume {run} --steps 100")
