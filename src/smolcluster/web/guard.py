"""Who may ask: checked before anything else, for every request.

    Host      loopback, the address the connection came in at, or a name that was allowed; else 421. A page that makes its own
              name point to 127.0.0.1 (DNS rebinding) comes with that name
    verb      those of the path; else 405
    Origin    where a browser tells it, the same as Host; else 403. Beside pages and files, also what Sec-Fetch-Site says
    kind      a request with a body says that it is JSON; else 415. A form of another site's page cannot say so
    token     where one is set and the path needs it: in `Authorization: Bearer`, or the cookie given for it; else 401

Every answer, also a refusal, forbids the browser to run, embed, guess or send on anything: see HEADERS.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
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
READ_ONLY = ("GET", "HEAD")


def plain(status: int, text: str) -> tuple[str, bytes]:  # noqa: ARG001 - others look at it
    """A refusal in words: its kind and its bytes."""
    return "text/plain; charset=utf-8", text.encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRules:
    """What is one face's own: its paths, its verbs, its words."""

    name: str  # of the face, in its cookie
    program: str  # what a person called, for what is said to be done: `smolcluster dashboard`
    token: str = "token"  # what the secret is called
    is_ours: Callable[[str], bool]  # paths that no page from elsewhere may load
    needs_token: Callable[[str], bool]  # where there is one
    verbs: Callable[[str], tuple[str, ...]] = lambda _: READ_ONLY
    told: Callable[[int, str], tuple[str, bytes]] = plain

    def cookie_name(self, scope: Scope) -> str:
        """Cookies are shared by all ports of a host: each server has its own."""
        return f"smolcluster_{self.name}_{(scope.get('server') or ('', 0))[1]}"

    def cookie_value(self, token: str) -> str:
        """Not the token itself, which opens more than this browser."""
        return hmac.new(token.encode(), f"smolcluster {self.name} cookie".encode(), hashlib.sha256).hexdigest()

    def login_cookie(self, token: str, scope: Scope) -> str:
        """For Set-Cookie: scripts cannot read it, and other sites cannot make the browser send it."""
        value = self.cookie_value(token)
        return f"{self.cookie_name(scope)}={value}; HttpOnly; SameSite=Strict; Path=/; Max-Age=2592000"


class Guard:
    """ASGI: answers refusals itself and passes the rest on, with the headers added."""

    def __init__(self, app: App, rules: GuardRules, *, token: str | None, allow_hosts: Iterable[str] = ()) -> None:
        self._app, self._rules, self._token = app, rules, token
        self._hosts = frozenset(host.lower().rstrip(".") for host in allow_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self.refusal(scope)
        if refusal is not None:
            status, text, headers = refusal
            await answer(status, *self._rules.told(status, text), headers=headers, send=hardened(send))
            return
        await self._app(scope, receive, hardened(send))

    def refusal(self, scope: Scope) -> tuple[int, str, dict[str, str]] | None:
        """Status, message and headers; None for a request that is in order."""
        rules, path, method = self._rules, scope["path"], scope["method"]
        hosts, origins = _all(scope, b"host"), _all(scope, b"origin")
        if len(hosts) != 1 or not self._may_be_called(hosts[0], scope):
            return 421, f"this server does not answer to that name; see {rules.program} --allow-host", {}
        verbs = rules.verbs(path)
        if method not in verbs:
            return 405, f"only {' and '.join(verbs)}", {"allow": ", ".join(verbs)}
        if origins and (len(origins) > 1 or not same_origin(origins[0], hosts[0])):
            return 403, "a page from elsewhere may not ask here", {}
        sites = _all(scope, b"sec-fetch-site")
        if rules.is_ours(path) and any(site not in ("same-origin", "none") for site in sites):
            return 403, "a page from elsewhere may not ask here", {}
        if method not in READ_ONLY and not _says_json(scope):
            return 415, "the body must be JSON, and Content-Type must say so: application/json", {}
        if self._token is not None and rules.needs_token(path) and not self._has_token(scope):
            opened = f"open the address that {rules.program} printed, or send it as Authorization: Bearer"
            return 401, f"a {rules.token} is needed: {opened}", {"www-authenticate": "Bearer"}
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
        expected, name = self._rules.cookie_value(self._token), self._rules.cookie_name(scope)
        return any(equal(given, expected) for given in _cookies(scope, name))


def host_name(host: str) -> str | None:
    """`localhost:8265` -> `localhost`, `[::1]:8265` -> `::1`; None for what is no host."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?", host)
    return (found[1] or found[2]).lower().rstrip(".") if found else None


def same_origin(origin: str, host: str) -> bool:
    """Whether a browser's Origin is the Host it asks. The scheme may be https: a proxy in front of us has a certificate."""
    scheme, separator, authority = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and authority.lower() == host.lower()


def equal(given: str, expected: str) -> bool:
    """In a time that does not tell how much of it was right."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def check_token(token: str, option: str = "--token") -> str:
    """Fit for a header and not to be guessed."""
    if not re.fullmatch(r"[A-Za-z0-9._~+/=-]+", token):
        raise UserError(f"{option}: letters, digits and ._~+/=- only, so that it fits an address")
    if len(token) < LEAST_TOKEN:
        raise UserError(f"{option} has {len(token)} characters; give at least {LEAST_TOKEN}, or none to have one made")
    return token


def choose_token(given: str | None, *, bind: str, option: str = "--token") -> str | None:
    """Beyond loopback there is always a token: the one that was given, or a new one."""
    if given is not None:
        return check_token(given, option)
    return None if is_loopback(bind) else secrets.token_urlsafe(24)


def _same_address(name: str, address: str) -> bool:
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False


def _says_json(scope: Scope) -> bool:
    kinds = _all(scope, b"content-type")
    return len(kinds) == 1 and kinds[0].partition(";")[0].strip().lower() == "application/json"


def _all(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _cookies(scope: Scope, name: str) -> list[str]:
    """Split by hand: cookies of other applications on this host come along, and not all of them keep to the grammar."""
    pairs = [pair.partition("=") for header in _all(scope, b"cookie") for pair in header.split(";")]
    return [value.strip() for key, _, value in pairs if key.strip() == name]


def hardened(send: Send) -> Send:
    """The same, with HEADERS on every answer."""

    async def send_hardened(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message.get("headers", [])}
            extra = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in own]
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return send_hardened


async def answer(status: int, kind: str, body: bytes, *, headers: dict[str, str], send: Send) -> None:
    """A whole answer, without a framework."""
    usual = {"content-type": kind, "content-length": str(len(body)), "cache-control": "no-store"}
    fields = [(name.encode(), value.encode()) for name, value in (usual | headers).items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
