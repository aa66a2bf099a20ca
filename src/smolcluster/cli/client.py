"""Options of `chat` and `generate`, which are clients of a server."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from smolcluster.serve.client.http import ServerClient

DEFAULT_URL = "http://127.0.0.1:5050"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The server's model and key, and how tokens are sampled. The server has defaults for what is not given."""

    model: Annotated[str | None, typer.Option(help="Which of the server's models. Default: its first.")] = None
    key: Annotated[
        str | None,
        typer.Option(envvar="SMOLCLUSTER_API_KEY", show_envvar=True, help="The server's key, where it has one."),
    ] = None
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token. Default: the server's.")] = (
        None
    )
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens up to this sum of probabilities.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.")] = None
    max_tokens: Annotated[int | None, typer.Option(help="The longest answer, in tokens.")] = None
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answer.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: fewer repetitions.")] = None

    def sampling(self, **more: Any) -> dict[str, Any]:
        """Return the sampling options that were given, as fields of a request."""
        from smolcluster.serve.client.terminal import given_options

        return given_options(
            {name: value for name, value in asdict(self).items() if name not in ("model", "key")} | more
        )

    def connect(self, url: str) -> ServerClient:
        """Connect to a server, and wait until it is ready."""
        from smolcluster.serve.client.http import ServerClient

        client = ServerClient(url, key=self.key)
        client.wait_ready(lambda reason: typer.echo(f"waiting: {reason}", err=True))
        return client
