"""`smolcluster chat`: a conversation with a served model, in the terminal."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from smolcluster.cli.client import DEFAULT_URL, ClientOptions
from smolcluster.cli.options import grouped
from smolcluster.errors import UserError

EXAMPLES = """Examples:
smolcluster chat
smolcluster chat http://mini1:5050 --system "Answer in one sentence." --temperature 0.7
echo "Why is the sky blue?" | smolcluster chat > answer.txt
"""


@grouped
def chat(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Where the server is: what smolcluster serve printed.")
    ] = DEFAULT_URL,
    system: Annotated[str, typer.Option(help="How the model should behave.")] = "",
    *,
    served: ClientOptions,
) -> int:
    from smolcluster.serve.client.terminal import Chat, is_coloured, line_reader, print_chunks, read_all

    options = served.sampling()
    if Path(url).exists():
        raise UserError(
            f"{url} is a file or folder, not a server; for a model: smolcluster serve {url}, then: smolcluster chat"
        )
    question = None if sys.stdin.isatty() else read_all(sys.stdin, what="the question")
    client = served.connect(url)
    about = client.describe()
    continues = about.get("chat") is False
    if continues and system:
        raise UserError("--system has no effect: this model has no chat template; put it before your text")
    model = served.model or client.models()[0]
    if question is not None:
        request = {"model": model, **options}
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        answer = client.complete(question, options=request) if continues else client.chat(messages, options=request)
        print_chunks(answer, sys.stdout)
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
        example_prompts=[text for text in about.get("openings") or [] if isinstance(text, str)],
    )
    return talk.run()
