"""Options that several commands share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    from smolcluster.engine.spec import WorkerSpec

R = TypeVar("R")


def panel(heading: str) -> Callable[..., Any]:
    """Return `typer.Option` for options that the help shows under this heading."""
    return functools.partial(typer.Option, rich_help_panel=heading)


def blank_line_between(examples: str) -> str:
    """Separate the examples by blank lines, or the help joins them into one paragraph."""
    return examples.strip().replace("\n", "\n\n")


def grouped(command: Callable[..., R]) -> Callable[..., R]:
    """Replace each dataclass parameter of a command by an option for each of its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    flat: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            flat.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        of_fields = get_type_hints(groups[parameter.name], include_extras=True)
        for field in dataclasses.fields(groups[parameter.name]):
            flat.append(parameter.replace(name=field.name, annotation=of_fields[field.name], default=field.default))
    signature = inspect.Signature(flat)

    @functools.wraps(command)
    def expanded(*args: Any, **kwargs: Any) -> R:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        return command(**given)

    expanded.__signature__ = signature  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return expanded


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
        help="Resume a run directory, a checkpoint, `latest`, or `auto`: the run in --run-dir, or step 0 without one."
    ),
]
RunDir = Annotated[Path | None, typer.Option(help="Where the run is written. Default: runs/<name>.")]
AcceptNew = Annotated[
    bool, typer.Option("--accept-new", help="Trust machines that ssh has not seen before, and remember their keys.")
]
Cluster = Annotated[
    str | None, typer.Argument(metavar="[CLUSTER]", help="Its name or file. Default: the one that was started last.")
]
Watched = Annotated[
    Path | None,
    typer.Argument(metavar="RUN_DIR", help="A run, or a folder of runs. Default: the newest run in ./runs."),
]
Strategy = Annotated[str | None, typer.Option(help="The training strategy; see `smolcluster strategies`.")]
Plane = Annotated[
    str | None,
    typer.Option(help="mesh, or elastic: a server, and workers that may join and leave. Default: the strategy's."),
]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps; wins over epochs.")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights, data order and dropout.")]
Backend = Annotated[
    str | None, typer.Option(help="gloo, nccl or mpi. Default: nccl where each worker has a GPU, gloo otherwise.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupOptions:
    """What to train, and how."""

    sources: Sources = None
    strategy: Strategy = None
    plane: Plane = None
    override: Override = None
    seed: Seed = None
    backend: Backend = None

    def overrides(self, **more: Any) -> list[str | tuple[str, Any]]:
        """Return --override and the flags, as configuration overrides. `more`: further flags of the command."""
        from smolcluster.config import flag_overrides

        flags = flag_overrides(strategy=self.strategy, plane=self.plane, seed=self.seed, **more)
        return [*(self.override or []), *flags.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(SetupOptions):
    """What to train, how, and for how long."""

    steps: Steps = None


_own = panel("This machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerOptions:
    """What the owner of a machine sets for its worker."""

    device: Annotated[str | None, _own(help="cpu, cuda, cuda:1, mps. Default: the best one here.")] = None
    data_root: Annotated[
        Path | None,
        _own(help="Folder or file to train on. Without: the embedded text only, or what --override data.name allows."),
    ] = None
    task: Annotated[
        str | None,
        _own(metavar="FILE.py:CLASS", help="This machine's copy of your task; code is not sent."),
    ] = None
    override: Annotated[
        list[str] | None, _own(metavar="KEY=VALUE...", help="Set keys that are this machine's own.")
    ] = None

    def spec(
        self, rank: int, host: str, *, server: str | None, precision: str | None = None, **more: Any
    ) -> WorkerSpec:
        """Return the spec of the worker. `more`: as of `worker_spec`."""
        from smolcluster.config import flag_overrides
        from smolcluster.launch.join.worker import worker_spec

        root = None if self.data_root is None else str(self.data_root.resolve())
        flags = flag_overrides(device=self.device, data_root=root, precision=precision)
        return worker_spec(
            rank, host, server=server, task=self.task, overrides=[*(self.override or []), *flags.items()], **more
        )


_shorthand = panel("Model and training (the same as --override)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """Shorthands for model and training keys that decide how much memory a rank needs."""

    vocab_size: Annotated[int | None, _shorthand(help="model.vocab_size")] = None
    hidden_size: Annotated[int | None, _shorthand(help="model.model_dim")] = None
    attention_heads: Annotated[int | None, _shorthand(help="model.num_heads")] = None
    layers: Annotated[int | None, _shorthand(help="model.num_layers")] = None
    max_seq_length: Annotated[int | None, _shorthand(help="model.max_seq_len")] = None
    batch_size: Annotated[int | None, _shorthand(help="training.batch_size, per worker")] = None
    mixed_precision: Annotated[bool, _shorthand("--mixed-precision", help="training.precision=bf16")] = False
    use_gradient_checkpointing: Annotated[
        bool, _shorthand("--use-gradient-checkpointing", help="training.gradient_checkpointing=true")
    ] = False

    def overrides(self) -> dict[str, Any]:
        """Return those that were given, by dotted name."""
        from smolcluster.config import flag_overrides

        return flag_overrides(**dataclasses.asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlags(ModelFlags):
    """All shorthands for model and training keys."""

    learning_rate: Annotated[float | None, _shorthand(help="training.learning_rate")] = None
    epochs: Annotated[int | None, _shorthand(help="training.epochs")] = None
    gradient_clip_norm: Annotated[float | None, _shorthand(help="training.grad_clip_norm")] = None
    save_interval: Annotated[int | None, _shorthand(help="training.checkpoint_steps")] = None
