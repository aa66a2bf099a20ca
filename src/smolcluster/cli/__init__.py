"""The `smolcluster` command: one file per subcommand, which parses, calls and prints. No help imports torch.

Shared: options.py, batch.py (job files), client.py (clients of a service), screen.py (output), ending.py (exit status).
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import re
import sys
from collections.abc import Sequence

import typer

from smolcluster.cli.ending import tell
from smolcluster.cli.options import blank_line_between
from smolcluster.errors import SmolclusterError

# typer vendors click or depends on it, by version; this is the ClickException that typer raises.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]

# In the order of the help. Each is a module here with a function of that name.
COMMANDS = {
    "train": "Train a model on this machine's workers, or as one rank of a job on several machines.",
    "plan": "Estimate the memory of a run, and which strategies fit. "
    "Each rank runs a step on fake tensors; nothing is trained.",
    "server": "Serve a run: workers join it with `smolcluster worker`, at any time, and may leave. "
    "A server that dies is restarted.",
    "worker": "Join a run. Reconnects to a server that is lost, and ends when the run does; Ctrl-C leaves it.",
    "up": "Start a run on the machines of a cluster file over ssh, and show what they print. Ctrl-C leaves it running.",
    "status": "Show the state of every process of a cluster. Status 1 if one has failed or a machine cannot be reached.",
    "logs": "Show the output of all processes, wherever they run. "
    "Or start and stop Grafana and Loki here: `logs up`, `logs down`.",
    "down": "Save and end everything that `up` started; run directories stay.",
    "slurm": "Write a job file for Slurm: one task per rank, or a server and its workers. "
    "Saves and requeues at the time limit.",
    "k8s": "Write manifests for Kubernetes: a Job whose pods are ranks, or a server and workers. "
    "Contacts no cluster without --submit.",
    "compose": "Write a compose file: a server and workers, or ranks, each in a container on this machine.",
    "join": "Announce this machine on the local network, show a pairing code, and work for the cluster that accepts it.",
    "dashboard": "Show a run as a live page: machines, curves, time line, logs. "
    "Reads the run directory, also after the run.",
    "top": "Watch a run in the terminal: machines, loss, events. Reads the run directory, also after the run.",
    "doctor": "Name the layer that fails (name, route, ..., token) and the remedy. "
    "Changes nothing. Status 1 if any is bad.",
    "serve": "Serve a model over one machine or many: an API as OpenAI's, and a chat page.",
    "stage": "Hold layers of a model for `smolcluster serve`, and compute them.\n\n"
    "Ends at Ctrl-C, or when the server is stopped. Reconnects to a server that is lost.",
    "chat": "Talk to a served model. In a pipe: one question from stdin, the answer and nothing else to stdout.\n\n"
    "A model without a chat template, such as one trained on plain text, continues what you write.",
    "generate": "Continue a text with a served model, or one loaded for it, and print the continuation.",
    "strategies": "List every strategy: name, aliases, what it is for, its options.",
    "export": "Write the weights of a run as a Hugging Face model: config.json and model.safetensors.",
    "import": "Make a run at step 0 from a GPT-2, Llama, Qwen2 or Qwen3 model: its weights, "
    "tokenizer and chat template.",
}
GROUPS = {
    "bench": "Measure this machine with your own configuration.",
    "cluster": "Write or check a cluster file; accept machines that run `join`.",
    "config": "Check, show and describe configurations.",
    "token": "Make, show, copy or rotate the token that the machines of a cluster share.",
}
MODULES = {"import": "import_model"}  # where a command's name cannot be one


def build_app(only: str | None = None, *, overview: bool = False) -> typer.Typer:
    """Return the command-line app, with all subcommands unless `only` names one.

    Reading the options of all takes 0.3 s; for an `overview`, which shows names and summaries, no command is imported, nor
    rich, which takes half as long again.
    """
    app = typer.Typer(
        name="smolcluster",
        help="Train one model on every computer you own, and serve it from the same machines.",
        epilog="Example: smolcluster train gpt --strategy allreduce --workers 2 --steps 100",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None if overview else "rich",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.callback(invoke_without_command=True)(_top)
    summaries = COMMANDS | GROUPS
    for name in [only] if only in summaries else summaries:
        place = MODULES.get(name, name)
        module = None if overview else importlib.import_module(f"smolcluster.cli.{place}")
        if module is None:
            app.command(name, short_help=summaries[name].partition("\n")[0])(_not_imported)
        elif name in GROUPS:
            app.add_typer(module.app, name=name, help=summaries[name])
        else:
            app.command(name, help=summaries[name], epilog=blank_line_between(module.EXAMPLES))(getattr(module, place))
    return app


def _not_imported() -> None:
    """Stand in for a command in the overview."""


def _top(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from smolcluster.version import __version__

        typer.echo(f"smolcluster {__version__}")
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 the run failed, 2 wrong input, 130 interrupted."""
    arguments = spread_overrides(sys.argv[1:] if argv is None else argv)
    logging.getLogger("smolcluster").addHandler(logging.NullHandler())  # what a person must read is printed, not logged
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # no command fails for a character that the terminal lacks
    try:
        # Shell completion passes the line in the environment, and needs every option.
        overview = (
            arguments[:1] in ([], ["-h"], ["--help"], ["--version"]) and "_SMOLCLUSTER_COMPLETE" not in os.environ
        )
        app = build_app(arguments[0] if arguments else None, overview=overview)
        status = app(arguments, prog_name="smolcluster", standalone_mode=False)
    except SmolclusterError as error:
        sys.exit(tell(error))
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except _ClickException as error:
        message = getattr(error, "format_message")()  # noqa: B009 - whichever click it is, this is in it
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "smolcluster"
        if message:  # empty after the help of a command without arguments
            print(f"{command}: {message.rstrip('.')}; see {command} --help", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        status = 1
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status if isinstance(status, int) else 0)


def spread_overrides(arguments: Sequence[str]) -> list[str]:
    """Turn `--override a=1 b=2` into `--override a=1 --override b=2`, as typer's options take one value each."""
    result: list[str] = []
    spreading = False
    for argument in arguments:
        if spreading and re.match(r"[A-Za-z_][\w.]*=", argument) and result[-1] != "--override":
            result.append("--override")
        elif argument.startswith("-"):
            spreading = argument == "--override"
        elif result and result[-1] != "--override":
            spreading = False
        result.append(argument)
    return result
