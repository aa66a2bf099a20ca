"""A service on a port: loopback by default; beyond it there is always a key."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from smolcluster.errors import needed
from smolcluster.serve.http.api import Api, told
from smolcluster.serve.http.service import Service
from smolcluster.web import server
from smolcluster.web.guard import choose_token

PORT = 5050
PORTS_TRIED = 10  # from PORT on, where no port was given
STATIC = Path(__file__).parents[1] / "static"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Where the service listens, and for whom. `port` None: the usual one, or one of the next few."""

    bind: str = "127.0.0.1"
    port: int | None = None
    key: str | None = dataclasses.field(default=None, repr=False)
    allow_hosts: tuple[str, ...] = ()
    static: Path | None = STATIC
    patience: server.HttpLimits = dataclasses.field(default_factory=server.HttpLimits)

    def checked(self) -> HttpSettings:
        return dataclasses.replace(self, key=choose_token(self.key, bind=self.bind, option="--api-key"))


def open_port(place: HttpSettings) -> socket.socket:
    """What fails here fails before anything is loaded. Connections wait until they are served."""
    with needed(extra="serve", purpose="serving a model"):
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    ports = range(PORT, PORT + PORTS_TRIED) if place.port is None else [place.port]
    return server.listen(place.bind, ports, write_s=place.patience.write_s)


async def serve(
    service: Service,
    place: HttpSettings,
    *,
    ready: Callable[[str], None],
    until: threading.Event | asyncio.Event | None = None,
    opened: socket.socket | None = None,
) -> None:
    """Serve until Ctrl-C, or until `until` is set. `ready` gets the address, which carries the key behind the #."""
    place = place.checked()
    with contextlib.closing(opened or open_port(place)) as listener:
        api = Api(
            service,
            key=place.key,
            allow_hosts=(*place.allow_hosts, *server.names_here(place.bind)),
            static=place.static,
            write_s=place.patience.write_s,
        )
        await server.serve(
            api,
            listener,
            ready=lambda: ready(server.url_of(listener, place.key, name="key")),
            closing=api.close,
            until=until,
            patience=place.patience,
            told=told,
        )
