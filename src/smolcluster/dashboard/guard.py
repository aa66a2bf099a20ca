"""Who may ask the dashboard: checked before anything else, for every request.

    Host      loopback, the address the connection came in at, or a name from --allow-host; else 421. A page that makes its
              own name point to 127.0.0.1 (DNS rebinding) comes with that name
    verb      GET and HEAD; else 405
    Origin    where a browser tells it, the same as Host; else 403. For the API, also what Sec-Fetch-Site says
    token     for the API, where one is set: in `Authorization: Bearer`, or in the cookie that /api/login gives for it; else 401

Every answer, also a refusal, forbids the browser to run, embed, guess or send on anything: see HEADERS.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

from smolcluster.comm.addresses import is_loopback
from smolcluster.errors import UserError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind} 'self'" for kind in ("script-src", "style-src", "img-src", "connect-src")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
        "require-trusted-types-for 'script'",  # text can never become a page: there is no policy that would make it one
        "trusted-types 'none'",
    )
)
HEADERS: dict[str, str] = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
LEAST_TOKEN = 16  # characters


class Guard:
    """ASGI: answers refusals itself and passes the rest on, with the headers added."""

    def __init__(self, app: App, *, token: str | None, allow_hosts: Iterable[str] = ()) -> None:
        self._app, self._token = app, token
        self._hosts = frozenset(host.lower().rstrip(".") for host in allow_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self.refusal(scope)
        if refusal is not None:
            await _answer(*refusal, send=_hardened(send))
            return
        await self._app(scope, receive, _hardened(send))

    def refusal(self, scope: Scope) -> tuple[int, str, dict[str, str]] | None:
        """Status, message and headers; None for a request that is in order."""
        hosts, origins = _all(scope, b"host"), _all(scope, b"origin")
        if len(hosts) != 1 or not self._may_be_called(hosts[0], scope):
            return 421, "this server does not answer to that name; see smolcluster dashboard --allow-host", {}
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "only GET and HEAD", {"allow": "GET, HEAD"}
        if origins and (len(origins) > 1 or not same_origin(origins[0], hosts[0])):
            return 403, "a page from elsewhere may not ask here", {}
        if scope["path"].startswith("/api"):
            if any(site not in ("same-origin", "none") for site in _all(scope, b"sec-fetch-site")):
                return 403, "a page from elsewhere may not ask here", {}
            if self._token is not None and not self._has_token(scope):
                return 401, "a token is needed: open the address that smolcluster dashboard printed", {}
        return None

    def _may_be_called(self, host: str, scope: Scope) -> bool:
        name = host_name(host)
        if name is None:
            return False
        if is_loopback(name) or name in self._hosts:
            return True
        server = scope.get("server")
        return server is not None and _same_address(name, str(server[0]))

    def _has_token(self, scope: Scope) -> bool:
        assert self._token is not None
        for value in _all(scope, b"authorization"):
            kind, _, given = value.partition(" ")
            if kind.lower() == "bearer" and equal(given.strip(), self._token):
                return True
        expected, name = cookie_value(self._token), cookie_name(scope)
        return any(equal(given, expected) for given in _cookies(scope, name))


def host_name(host: str) -> str | None:
    """`localhost:8265` -> `localhost`, `[::1]:8265` -> `::1`; None for what is no host."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?", host)
    return (found[1] or found[2]).lower().rstrip(".") if found else None


def same_origin(origin: str, host: str) -> bool:
    """Whether a browser's Origin is the Host it asks. The scheme may be https: a proxy in front of us has a certificate."""
    scheme, separator, authority = origin.partition("://")
    if not separator or scheme not in ("http", "https"):
        return False
    return authority.lower() == host.lower()


def equal(given: str, expected: str) -> bool:
    """In a time that does not tell how much of it was right."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def cookie_name(scope: Scope) -> str:
    """Cookies are shared by all ports of a host: each dashboard has its own."""
    return f"smolcluster_dashboard_{(scope.get('server') or ('', 0))[1]}"


def cookie_value(token: str) -> str:
    """Not the token itself, which opens more than this browser."""
    return hmac.new(token.encode(), b"smolcluster dashboard cookie", hashlib.sha256).hexdigest()


def login_cookie(token: str, scope: Scope) -> str:
    """For Set-Cookie: scripts cannot read it, and other sites cannot make the browser send it."""
    return f"{cookie_name(scope)}={cookie_value(token)}; HttpOnly; SameSite=Strict; Path=/; Max-Age=2592000"


def check_token(token: str) -> str:
    """Fit for a header and not to be guessed."""
    if not re.fullmatch(r"[A-Za-z0-9._~+/=-]+", token):
        raise UserError("--token: letters, digits and ._~+/=- only, so that it fits an address")
    if len(token) < LEAST_TOKEN:
        raise UserError(f"--token has {len(token)} characters; give at least {LEAST_TOKEN}, or none to have one made")
    return token


def _same_address(name: str, address: str) -> bool:
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False


def _all(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _cookies(scope: Scope, name: str) -> list[str]:
    found = []
    for header in _all(scope, b"cookie"):
        cookie: SimpleCookie = SimpleCookie()
        try:
            cookie.load(header)
        except CookieError:
            continue
        if name in cookie:
            found.append(cookie[name].value)
    return found


def _hardened(send: Send) -> Send:
    async def hardened(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message.get("headers", [])}
            extra = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in own]
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return hardened


async def _answer(status: int, text: str, headers: dict[str, str], *, send: Send) -> None:
    body = text.encode() + b"\n"
    plain = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), "cache-control": "no-store"}
    fields = [(name.encode(), value.encode()) for name, value in (plain | headers).items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
