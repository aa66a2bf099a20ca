"""`smolcluster import`: start a run from a pretrained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smolcluster.errors import UserError

EXAMPLES = """Examples:
smolcluster import SmolLM2-135M runs/smollm
smolcluster import model.gguf runs/smollm
smolcluster train --resume runs/smollm --steps 100 --override data.name=text data.root=my_book.txt
"""


def import_model(
    model: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face folder (config.json and model.safetensors, or its shards), or a *.gguf file."
        ),
    ],
    run: Annotated[Path, typer.Argument(help="The run directory to make; it must not hold a run yet.")],
) -> None:
    from smolcluster.engine.checkpoint.import_hf import import_gguf, import_model

    if not model.exists():
        raise UserError(f"there is no model at {model}; name a folder in Hugging Face's layout, or a *.gguf file")
    if model.is_file():
        from smolcluster.serve.engine.gguf_source import GGUFSource

        shape, tokenizer = import_gguf(model, run, GGUFSource.open(model).tokenizer_files())
    else:
        shape, tokenizer = import_model(model, run)
    typer.echo(f"{run}: {shape.num_parameters:,} parameters, {shape.num_layers} layers of {shape.model_dim}")
    if tokenizer is None:
        typer.echo(f"{model} has no tokenizer: name the model's own with data.tokenizer=PATH when you train")
    typer.echo(f"train it with: smolcluster train --resume {run} --steps 100")
