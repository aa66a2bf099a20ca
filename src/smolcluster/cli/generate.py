"""`smolcluster generate`: continue a text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from smolcluster.cli.client import DEFAULT_URL, ClientOptions
from smolcluster.cli.options import grouped
from smolcluster.errors import UserError

if TYPE_CHECKING:
    from smolcluster.serve.client.http import CompletionClient

EXAMPLES = """Examples:
smolcluster generate "Once upon a time" --max-tokens 60
smolcluster generate - --temperature 0 < prompt.txt
smolcluster generate "def fib(n):" --url http://mini1:5050 --stop "def " --no-stream
smolcluster generate runs/demo "Once upon a time"            (without a server; the same as --from runs/demo)
"""


@grouped
def generate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help="A text to continue; - reads it from stdin. With a model before it: the same as --from MODEL.",
        ),
    ],
    url: Annotated[str, typer.Option(help="Where the server is.")] = DEFAULT_URL,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Without a server: load this model here, for this one text. What `smolcluster serve` takes.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="With --from: cpu, cuda, mps. Default: the best one here.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. May be given several times.")] = None,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print tokens as they come, or the whole text at the end.")
    ] = True,
    *,
    served: ClientOptions,
) -> int:
    from smolcluster.serve.client.terminal import print_chunks, read_all

    options = served.sampling(stop=stop or None)
    from_, prompt = _model_and_prompt(words, from_)
    if from_ is None and device is not None:
        raise UserError("--device is for --from MODEL; a served model computes where its machines are")
    if from_ is not None and served.model is not None:
        raise UserError(
            "--model names one of a server's models, and with --from there is no server; leave one of them out"
        )
    text = read_all(sys.stdin, what="the prompt") if prompt == "-" else prompt
    if not text:
        raise UserError("the prompt is empty; write the text that is to be continued, or - to read it from stdin")
    source: CompletionClient
    if from_ is not None:
        from smolcluster.serve.main import load_in_process

        service = load_in_process(from_, device)
        source, name = service, service.name
    else:
        client = served.connect(url)
        source, name = client, served.model or client.models()[0]
    print_chunks(source.complete(text, options={"model": name, **options}, stream=stream), sys.stdout)
    return 0


def _model_and_prompt(words: list[str], from_: str | None) -> tuple[str | None, str]:
    """PROMPT, or MODEL PROMPT as `smolcluster serve MODEL` has it."""
    if len(words) == 1:
        return from_, words[0]
    if len(words) == 2 and from_ is None:
        return words[0], words[1]
    known = f"MODEL PROMPT with --from {from_}" if len(words) == 2 else f"{len(words)} texts"
    raise UserError(
        f"{known}: give one text, in quotes, and the model once: smolcluster generate runs/demo 'Once upon a time'"
    )
