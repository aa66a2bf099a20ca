"""`smolcluster export`: a run's weights for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:
smolcluster export runs/demo demo-hf
smolcluster export runs/demo demo-hf --checkpoint best --dtype bf16
smolcluster export runs/demo/checkpoints/step-00000200 demo-hf
"""
_TOKENIZERS = {
    "bytes": "bytes (token n is the byte n of UTF-8 text)",
    "chars": "chars (the characters of the training text, sorted)",
}


def export(
    run: Annotated[Path, typer.Argument(help="A run directory, or one checkpoint folder inside it.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must be new or empty.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="latest, best, or the name of one, such as step-00000200. Default: latest.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16: the type of the written weights.")] = "fp32",
) -> None:
    from smolcluster.engine.checkpoint.export_hf import export_run

    done = export_run(run, out, checkpoint=checkpoint, dtype=dtype)
    for name in done.damaged:
        typer.echo(f"note: {name} is damaged; the newest good checkpoint is exported instead")
    typer.echo(f"{out}: {done.architecture} of {done.checkpoint}, {done.num_parameters:,} parameters, {dtype}")
    where = "its files are in the folder" if done.has_tokenizer else "it is not part of the folder"
    typer.echo(f"tokenizer: {_TOKENIZERS.get(done.tokenizer, done.tokenizer)}; {where}")
    load = f"from transformers import AutoModelForCausalLM; model = AutoModelForCausalLM.from_pretrained({str(out)!r})"
    typer.echo(f"load it with: {load}")
