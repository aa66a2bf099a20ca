"""Which requests the dashboard's guard refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smolcluster.dashboard import server
from smolcluster.dashboard.app import RULES
from smolcluster.errors import UserError
from smolcluster.web.guard import Guard, check_token


def refusal(guard: Guard, method: str = "GET", path: str = "/api/runs", **headers: str | list[str]) -> int | None:
    pairs = [
        (k.replace("_", "-"), v) for k, value in headers.items() for v in ([value] if isinstance(value, str) else value)
    ]
    fields = [(name.encode(), value.encode("latin-1")) for name, value in pairs]
    scope = {"type": "http", "method": method, "path": path, "headers": fields, "server": ("192.168.1.5", 8265)}
    found = guard.refusal(scope)
    return None if found is None else found[0]


async def nobody(*_: Any) -> None:
    raise AssertionError("asked")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(
            (name, None)
            for name in ("localhost:8265", "localhost", "127.0.0.1:1", "[::1]:8265", "127.8.9.1", "LOCALHOST.")
        ),
        *((name, None) for name in ("192.168.1.5:8265", "mini.local:99", "MINI.local.")),
        *((name, 421) for name in ("evil.example", "localhost.evil.example", "192.168.1.6", "127.0.0.1.evil", "")),
        *((name, 421) for name in ("localhost:8265@evil", "[::1", "local host", "localhost:", "2130706433", "0x7f.1")),
    ],
)
def test_hosts(host: str, status: int | None) -> None:
    assert refusal(Guard(nobody, RULES, token=None, allow_hosts=["mini.local"]), host=host) == status


def test_a_request_has_one_host() -> None:
    guard = Guard(nobody, RULES, token=None)
    assert refusal(guard) == 421
    assert refusal(guard, host=["localhost", "evil.example"]) == 421


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        *((origin, None) for origin in ("http://localhost:8265", "https://localhost:8265", "http://LOCALHOST:8265")),
        *(
            (origin, 403)
            for origin in ("http://localhost:8266", "http://localhost", "null", "http://evil.example", "", "file://")
        ),
        ("http://127.0.0.1:8265", 403),
    ],
)
def test_origins(origin: str, status: int | None) -> None:
    guard = Guard(nobody, RULES, token=None)
    assert refusal(guard, host="localhost:8265", origin=origin) == status
    assert refusal(guard, path="/", host="localhost:8265", origin=origin) == status


def test_pages_of_other_sites_cannot_load_from_the_api() -> None:
    guard = Guard(nobody, RULES, token=None)
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", None), ("none", None)):
        assert refusal(guard, host="localhost", sec_fetch_site=site) == status
    assert (
        refusal(guard, path="/", host="localhost", sec_fetch_site="cross-site") is None
    )  # a link to the page is in order


def test_a_token_opens_the_api_as_header_or_cookie() -> None:
    guard, token = Guard(nobody, RULES, token="a" * 20), "a" * 20
    assert refusal(guard, host="localhost") == 401
    assert refusal(guard, path="/", host="localhost") is None  # the page has no secrets
    assert refusal(guard, path="/static/app.js", host="localhost") is None
    for given in (f"Bearer {token}", f"bearer {token}"):
        assert refusal(guard, host="localhost", authorization=given) is None
    for given in (f"Bearer {token}a", token):
        assert refusal(guard, host="localhost", authorization=given) == 401
    cookie = f"smolcluster_dashboard_8265={RULES.cookie_value(token)}"
    assert refusal(guard, host="localhost", cookie=f"x=1; {cookie}") is None
    assert refusal(guard, host="localhost", cookie=cookie.replace("8265", "8266")) == 401
    assert refusal(guard, host="localhost", cookie=f"smolcluster_dashboard_8265={token}") == 401
    assert refusal(guard, host="localhost", cookie='a="; =;;', authorization="Bearer é") == 401
    assert token not in RULES.cookie_value(token)


@pytest.mark.parametrize("other", ['prefs={"a":1}', "name=John Smith", "a/b=1", "=", "", "flag", 'open="a', "é=ü"])
def test_cookies_of_other_applications_do_not_lock_the_page_out(other: str) -> None:
    """A browser sends those of all ports of a host together."""
    token = "0123456789abcdef"
    guard = Guard(nobody, RULES, token=token)
    ours = f"smolcluster_dashboard_8265={RULES.cookie_value(token)}"
    for cookie in (f"{other}; {ours}", f"{ours}; {other}", f"{other};{ours};{other}"):
        assert refusal(guard, host="localhost", cookie=cookie) is None
    assert refusal(guard, host="localhost", cookie=f"{other}; x{ours}; {ours}x") == 401


def test_tokens_are_long_and_fit_an_address() -> None:
    assert check_token("abcdefghijklmnop") == "abcdefghijklmnop"
    for bad in ("short", "with a space in it at all", "ümlaut-ümlaut-ümlaut"):
        with pytest.raises(UserError, match="--token"):
            check_token(bad)
    place = server.DashboardConfig(folder=Path(), bind="0.0.0.0").checked()
    assert place.token is not None
    assert len(place.token) >= 32
    assert place.token not in repr(place)
    assert server.DashboardConfig(folder=Path()).checked().token is None
