"""The service on a port: loopback by default; on other addresses always with a key."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable

from smolcluster.errors import needed
from smolcluster.serve.http.api import Api, error_json
from smolcluster.serve.http.service import Service
from smolcluster.web import server
from smolcluster.web.connections import HttpLimits
from smolcluster.web.guard import choose_token

PORT = 5050
PORTS_TRIED = 10  # from PORT on, if no port was given


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The address of the service, and its key. `port` None: PORT, or one of the next few."""

    bind: str = "127.0.0.1"
    port: int | None = None
    key: str | None = dataclasses.field(default=None, repr=False)
    allow_hosts: tuple[str, ...] = ()
    limits: HttpLimits = dataclasses.field(default_factory=HttpLimits)

    def checked(self) -> HttpSettings:
        return dataclasses.replace(self, key=choose_token(self.key, bind=self.bind, option="--api-key"))


def open_port(settings: HttpSettings) -> socket.socket:
    """Listen, before anything is loaded. Connections wait until `serve`."""
    with needed(extra="serve", purpose="serving a model"):
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    ports = range(PORT, PORT + PORTS_TRIED) if settings.port is None else [settings.port]
    return server.listen(settings.bind, ports, write_s=settings.limits.write_s)


async def serve(
    service: Service,
    settings: HttpSettings,
    *,
    ready: Callable[[str], None],
    until: threading.Event | asyncio.Event | None = None,
    opened: socket.socket | None = None,
) -> None:
    """Serve until Ctrl-C, or until `until` is set. `ready` gets the URL, with the key in its fragment."""
    settings = settings.checked()
    with contextlib.closing(opened or open_port(settings)) as listener:
        api = Api(
            service,
            key=settings.key,
            allow_hosts=(*settings.allow_hosts, *server.names_here(settings.bind)),
            write_s=settings.limits.write_s,
        )
        await server.serve(
            api,
            listener,
            ready=lambda: ready(server.url_of(listener, settings.key, name="key")),
            closing=api.close,
            until=until,
            limits=settings.limits,
            error_body=error_json,
        )
