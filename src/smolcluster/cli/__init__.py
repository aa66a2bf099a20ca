"""The `smolcluster` command: one file per subcommand. Each parses, calls and prints; none imports torch to show its help."""

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
from smolcluster.cli.options import apart
from smolcluster.errors import SmolclusterError

# Newer versions of typer carry click inside, older ones depend on it: this is the click that typer itself raises from.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]

# In the order of the help. Each is a module here, which has a function of that name, or an app of several commands.
COMMANDS = (
    *("train", "plan", "server", "worker", "up", "status", "logs", "down", "slurm", "k8s", "compose", "join"),
    *("dashboard", "top", "doctor", "serve", "stage", "chat", "generate", "strategies", "export", "import"),
)
GROUPS = ("bench", "cluster", "config", "token")
MODULES = {"import": "import_model"}  # where a command's name cannot be one


def build_app(only: str | None = None) -> typer.Typer:
    """Return the command-line app, with all subcommands unless `only` names one: reading the options of all takes 0.3 s."""
    app = typer.Typer(
        name="smolcluster",
        help="Train one model on every computer you own, and serve it from the same machines.",
        epilog="Example: smolcluster train gpt --strategy allreduce --workers 2 --steps 100",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_top)
    names = [only] if only in (*COMMANDS, *GROUPS) else [*COMMANDS, *GROUPS]
    for name in names:
        place = MODULES.get(name, name)
        module = importlib.import_module(f"smolcluster.cli.{place}")
        if name in GROUPS:
            app.add_typer(module.app, name=name)
        else:
            app.command(name, epilog=apart(module.EXAMPLES))(getattr(module, place))
    return app


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
        sys.stdout.reconfigure(errors="replace")  # no command fails for a letter that the terminal does not have
    try:
        app = build_app(arguments[0] if arguments else None)
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
        if message:  # none when the help was shown because nothing was asked
            print(f"{command}: {message.rstrip('.')}; see {command} --help", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        status = 1
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output went away: that is its right
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status if isinstance(status, int) else 0)


def spread_overrides(arguments: Sequence[str]) -> list[str]:
    """`--override a=1 b=2` becomes `--override a=1 --override b=2`; options of the parser take one value each."""
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
