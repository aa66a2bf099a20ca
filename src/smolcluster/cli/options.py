"""Arguments that several commands take, each with the same words."""

from __future__ import annotations

from typing import Annotated

import typer

_GUIDE = "Model and training (the same as --override)"

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG",
        help="YAML files, built-in names (gpt, mnist, ...), or a task as file.py:Class. Merged left to right.",
    ),
]
Override = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE...", help="Set one or more configuration keys.")]
Resume = Annotated[
    str | None,
    typer.Option(
        help="Continue: a run directory, a checkpoint, `latest`, or `auto`: the run in --run-dir, begun if it saved nothing."
    ),
]
Strategy = Annotated[str | None, typer.Option(help="How machines work together; see `smolcluster strategies`.")]
Backend = Annotated[
    str | None, typer.Option(help="gloo, nccl or mpi. Default: nccl where each worker has a GPU, gloo otherwise.")
]

VocabSize = Annotated[int | None, typer.Option(help="model.vocab_size", rich_help_panel=_GUIDE)]
HiddenSize = Annotated[int | None, typer.Option(help="model.model_dim", rich_help_panel=_GUIDE)]
AttentionHeads = Annotated[int | None, typer.Option(help="model.num_heads", rich_help_panel=_GUIDE)]
Layers = Annotated[int | None, typer.Option(help="model.num_layers", rich_help_panel=_GUIDE)]
MaxSeqLength = Annotated[int | None, typer.Option(help="model.max_seq_len", rich_help_panel=_GUIDE)]
LearningRate = Annotated[float | None, typer.Option(help="training.learning_rate", rich_help_panel=_GUIDE)]
BatchSize = Annotated[int | None, typer.Option(help="training.batch_size, per worker", rich_help_panel=_GUIDE)]
Epochs = Annotated[int | None, typer.Option(help="training.epochs", rich_help_panel=_GUIDE)]
GradientClipNorm = Annotated[float | None, typer.Option(help="training.grad_clip_norm", rich_help_panel=_GUIDE)]
SaveInterval = Annotated[int | None, typer.Option(help="training.checkpoint_steps", rich_help_panel=_GUIDE)]
MixedPrecision = Annotated[
    bool, typer.Option("--mixed-precision", help="training.precision=bf16", rich_help_panel=_GUIDE)
]
GradientCheckpointing = Annotated[
    bool,
    typer.Option("--use-gradient-checkpointing", help="training.gradient_checkpointing=true", rich_help_panel=_GUIDE),
]


def apart(examples: str) -> str:
    """Return the examples with a blank line between them: without it the help joins them into one paragraph."""
    return examples.replace("\n", "\n\n")
