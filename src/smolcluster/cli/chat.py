"""`smolcluster chat`: a conversation with a served model, in the terminal."""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smolcluster.cli.options import grouped
from smolcluster.errors import UserError

if TYPE_CHECKING:
    from smolcluster.serve.client.http import ServerClient

EXAMPLES = """Examples:
smolcluster chat
smolcluster chat http://mini1:5050 --system "Answer in one sentence." --temperature 0.7
echo "Why is the sky blue?" | smolcluster chat > answer.txt
"""

Key = Annotated[
    str | None,
    typer.Option(envvar="SMOLCLUSTER_API_KEY", show_envvar=True, help="The server's key, where it has one."),
]
Model = Annotated[str | None, typer.Option(help="Which of the server's models. Default: its first.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen. What is not given here is the server's choice."""

    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token. Default: the server's.")] = (
        None
    )
    top_p: Annotated[float | None, typer.Option(help="Only the likeliest tokens that make up this share.")] = None
    top_k: Annotated[int | None, typer.Option(help="Only so many of the likeliest tokens.")] = None
    max_tokens: Annotated[int | None, typer.Option(help="The longest answer, in tokens.")] = None
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answer.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: fewer repetitions.")] = None


@grouped
def chat(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Where the server is: what smolcluster serve printed.")
    ] = "http://127.0.0.1:5050",
    system: Annotated[str, typer.Option(help="How the model should behave.")] = "",
    model: Model = None,
    key: Key = None,
    *,
    sampling: SamplingOptions,
) -> int:
    from smolcluster.serve.client.terminal import Chat, given, is_coloured, line_reader, print_pieces, read_all

    options = given(asdict(sampling))
    if Path(url).exists():
        raise UserError(
            f"{url} is a file or folder, not a server; for a model: smolcluster serve {url}, then: smolcluster chat"
        )
    question = None if sys.stdin.isatty() else read_all(sys.stdin, what="the question")
    client = reach(url, key)
    about = client.describe()
    continues = about.get("chat") is False
    if continues and system:
        raise UserError("--system has no effect: this model has no chat template; put it before your text")
    model = model or client.models()[0]
    if question is not None:
        said = {"model": model, **options}
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        answer = client.complete(question, options=said) if continues else client.chat(messages, options=said)
        print_pieces(answer, sys.stdout)
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it stops an answer, also where a script ignores it
    talk = Chat(
        client=client,
        model=model,
        options=options,
        system=system,
        read=line_reader(),
        colour=is_coloured(sys.stdout),
        continues=continues,
        openings=[words for words in about.get("openings") or [] if isinstance(words, str)],
    )
    return talk.run()


def reach(url: str, key: str | None) -> ServerClient:
    """Connect to a server, and wait until it is ready."""
    from smolcluster.serve.client.http import ServerClient

    client = ServerClient(url, key=key)
    client.wait_ready(lambda words: typer.echo(f"waiting: {words}", err=True))
    return client
