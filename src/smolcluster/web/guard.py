"""Access control: checked before anything else, for every request.

    Host            loopback, the address of the connection, or an allowed name; else 421 (against DNS rebinding)
    method          one of the path's; else 405
    Origin          if sent, the same as Host; else 403. Outside pages and files, Sec-Fetch-Site is checked too
    Content-Type    JSON for a request with a body; else 415 (a form of another site cannot send it)
    token           if set and the path needs it, in `Authorization: Bearer` or the login cookie; else 401

Every response, errors included, carries the security headers in HEADERS.
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
        "require-trusted-types-for 'script'",  # no string can be assigned as HTML
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
MIN_TOKEN = 16  # characters
READ_ONLY = ("GET", "HEAD")


def plain_text(status: int, text: str) -> tuple[str, bytes]:  # noqa: ARG001 - see GuardRules.error_body
    """Return content type and body of an error."""
    return "text/plain; charset=utf-8", text.encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRules:
    """What differs between servers: paths, methods and texts."""

    name: str  # in the name of the cookie
    program: str  # the command, for messages: `smolcluster dashboard`
    token: str = "token"  # what the secret is called
    is_ours: Callable[[str], bool]  # paths that pages of other sites may not load
    needs_token: Callable[[str], bool]  # if one is set
    methods: Callable[[str], tuple[str, ...]] = lambda _: READ_ONLY
    error_body: Callable[[int, str], tuple[str, bytes]] = plain_text

    def cookie_name(self, scope: Scope) -> str:
        """Return a name with the port: all ports of a host share cookies."""
        return f"smolcluster_{self.name}_{(scope.get('server') or ('', 0))[1]}"

    def cookie_value(self, token: str) -> str:
        """Return a value that does not reveal the token."""
        return hmac.new(token.encode(), f"smolcluster {self.name} cookie".encode(), hashlib.sha256).hexdigest()

    def login_cookie(self, token: str, scope: Scope) -> str:
        """Return the Set-Cookie header: unreadable for scripts, not sent from other sites."""
        value = self.cookie_value(token)
        return f"{self.cookie_name(scope)}={value}; HttpOnly; SameSite=Strict; Path=/; Max-Age=2592000"


class Guard:
    """ASGI middleware: refuses requests, and adds the security headers to all responses."""

    def __init__(self, app: App, rules: GuardRules, *, token: str | None, allow_hosts: Iterable[str] = ()) -> None:
        self._app, self._rules, self._token = app, rules, token
        self._hosts = frozenset(host.lower().rstrip(".") for host in allow_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self.refusal(scope)
        if refusal is not None:
            status, text, headers = refusal
            await send_response(status, *self._rules.error_body(status, text), headers=headers, send=hardened(send))
            return
        await self._app(scope, receive, hardened(send))

    def refusal(self, scope: Scope) -> tuple[int, str, dict[str, str]] | None:
        """Return status, message and headers of the refusal, None to accept."""
        rules, path, method = self._rules, scope["path"], scope["method"]
        hosts, origins = _all(scope, b"host"), _all(scope, b"origin")
        if len(hosts) != 1 or not self._is_our_host(hosts[0], scope):
            return 421, f"this server does not serve that host name; see {rules.program} --allow-host", {}
        methods = rules.methods(path)
        if method not in methods:
            return 405, f"only {' and '.join(methods)}", {"allow": ", ".join(methods)}
        if origins and (len(origins) > 1 or not same_origin(origins[0], hosts[0])):
            return 403, "requests from pages of other sites are refused", {}
        sites = _all(scope, b"sec-fetch-site")
        if rules.is_ours(path) and any(site not in ("same-origin", "none") for site in sites):
            return 403, "requests from pages of other sites are refused", {}
        if method not in READ_ONLY and not _is_json(scope):
            return 415, "the body must be JSON, with Content-Type: application/json", {}
        if self._token is not None and rules.needs_token(path) and not self._has_token(scope):
            opened = f"open the URL that {rules.program} printed, or send it as Authorization: Bearer"
            return 401, f"a {rules.token} is needed: {opened}", {"www-authenticate": "Bearer"}
        return None

    def _is_our_host(self, host: str, scope: Scope) -> bool:
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
    """`localhost:8265` -> `localhost`, `[::1]:8265` -> `::1`; None for an invalid host."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?", host)
    return (found[1] or found[2]).lower().rstrip(".") if found else None


def same_origin(origin: str, host: str) -> bool:
    """Return whether Origin and Host are the same. The scheme may be https: a proxy in front may terminate TLS."""
    scheme, separator, authority = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and authority.lower() == host.lower()


def equal(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def check_token(token: str, option: str = "--token") -> str:
    """Return the token if it fits a header and is long enough, or raise UserError."""
    if not re.fullmatch(r"[A-Za-z0-9._~+/=-]+", token):
        raise UserError(f"{option}: only letters, digits and ._~+/=- (it is part of a URL)")
    if len(token) < MIN_TOKEN:
        raise UserError(
            f"{option} has {len(token)} characters; give at least {MIN_TOKEN}, or leave it out to generate one"
        )
    return token


def choose_token(given: str | None, *, bind: str, option: str = "--token") -> str | None:
    """Return the given token, a new one beyond loopback, or None."""
    if given is not None:
        return check_token(given, option)
    return None if is_loopback(bind) else secrets.token_urlsafe(24)


def _same_address(name: str, address: str) -> bool:
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False


def _is_json(scope: Scope) -> bool:
    kinds = _all(scope, b"content-type")
    return len(kinds) == 1 and kinds[0].partition(";")[0].strip().lower() == "application/json"


def _all(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _cookies(scope: Scope, name: str) -> list[str]:
    """Split by hand: browsers send the cookies of every application on this host, some malformed."""
    pairs = [pair.partition("=") for header in _all(scope, b"cookie") for pair in header.split(";")]
    return [value.strip() for key, _, value in pairs if key.strip() == name]


def hardened(send: Send) -> Send:
    """Wrap `send`: add HEADERS to every response."""

    async def send_hardened(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message.get("headers", [])}
            extra = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in own]
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return send_hardened


async def send_response(status: int, kind: str, body: bytes, *, headers: dict[str, str], send: Send) -> None:
    """Send a complete response."""
    defaults = {"content-type": kind, "content-length": str(len(body)), "cache-control": "no-store"}
    fields = [(name.encode(), value.encode()) for name, value in (defaults | headers).items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
