"""The `smolcluster` command: one file per subcommand. Each parses, calls and prints; none imports torch to show its help."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Sequence

import typer

from smolcluster.cli import (
    bench,
    chat,
    cluster,
    compose,
    config,
    dashboard,
    doctor,
    down,
    export,
    generate,
    import_model,
    join,
    k8s,
    logs,
    plan,
    serve,
    server,
    slurm,
    stage,
    status,
    strategies,
    token,
    top,
    train,
    up,
    worker,
)
from smolcluster.cli.ending import tell
from smolcluster.errors import SmolclusterError

# Newer versions of typer carry click inside, older ones depend on it: this is the click that typer itself raises from.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="smolcluster",
    help="Train one model on every computer you own, and serve it from the same machines.",
    epilog="Example: smolcluster train gpt --strategy allreduce --workers 2 --steps 100",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("server", epilog=server.EXAMPLES)(server.server)
app.command("worker", epilog=worker.EXAMPLES)(worker.worker)
app.command("up", epilog=up.EXAMPLES)(up.up)
app.command("status", epilog=status.EXAMPLES)(status.status)
app.command("logs", epilog=logs.EXAMPLES)(logs.logs)
app.command("down", epilog=down.EXAMPLES)(down.down)
app.command("slurm", epilog=slurm.EXAMPLES)(slurm.slurm)
app.command("k8s", epilog=k8s.EXAMPLES)(k8s.k8s)
app.command("compose", epilog=compose.EXAMPLES)(compose.compose)
app.command("join", epilog=join.EXAMPLES)(join.join)
app.command("dashboard", epilog=dashboard.EXAMPLES)(dashboard.dashboard)
app.command("top", epilog=top.EXAMPLES)(top.top)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("serve", epilog=serve.EXAMPLES)(serve.serve)
app.command("stage", epilog=stage.EXAMPLES)(stage.stage)
app.command("chat", epilog=chat.EXAMPLES)(chat.chat)
app.command("generate", epilog=generate.EXAMPLES)(generate.generate)
app.command("strategies", epilog=strategies.EXAMPLES)(strategies.strategies)
app.command("export", epilog=export.EXAMPLES)(export.export)
app.command("import", epilog=import_model.EXAMPLES)(import_model.import_model)
app.add_typer(bench.app, name="bench")
app.add_typer(cluster.app, name="cluster")
app.add_typer(config.app, name="config")
app.add_typer(token.app, name="token")


@app.callback(invoke_without_command=True)
def _top(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from smolcluster import __version__

        typer.echo(f"smolcluster {__version__}")
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 the run failed, 2 wrong input, 130 interrupted."""
    arguments = spread_overrides(sys.argv[1:] if argv is None else argv)
    logging.getLogger("smolcluster").addHandler(logging.NullHandler())  # what a person must read is printed, not logged
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # no command fails for a letter that the terminal does not have
    try:
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
