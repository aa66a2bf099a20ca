"""Chromium for tests of pages: started once, and pages that may not complain."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.places import eventually

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))), None
)
# Without a graphics card drawing as if there were one takes a core, and so does a process for every page.
CHEAP = ("--no-sandbox", "--disable-gpu", "--renderer-process-limit=1", "--disable-site-isolation-trials")
PATIENCE_MS = 60_000  # four processes that import torch, and a browser, on two cores


@contextlib.contextmanager
def chromium(*options: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*CHEAP, *options])
        yield browser
        browser.close()


@contextlib.contextmanager
def lone_page(browser: Any) -> Iterator[Any]:
    """One that may complain."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    yield page
    context.close()


@contextlib.contextmanager
def pages(browser: Any, *, expected: Sequence[str] = ()) -> Iterator[Callable[..., Any]]:
    """Opens pages; at the end none of them may have complained: errors on the console, exceptions, violations of its policy.

    `expected`: parts of complaints that the test itself causes.
    """
    complaints: list[str] = []
    contexts = []

    def opened(address: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on(
            "console", lambda m: complaints.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
        page.add_init_script(
            "addEventListener('securitypolicyviolation', e => console.error('policy: ' + e.violatedDirective))"
        )
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [words for words in complaints if not any(known in words for known in expected)] == []


def until(page: Any, expression: str, *, timeout_s: float = PATIENCE_MS / 1000) -> Any:
    """Asked from outside: the page's own policy forbids to wait for an expression inside it."""
    return eventually(lambda: page.evaluate(expression), timeout_s=timeout_s, what=expression)
