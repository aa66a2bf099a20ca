"""The dashboard in a real browser, on a run that trains: Chromium through Playwright."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard_client import Viewer, get
from tests.e2e.command import TINY, Running, Smol, eventually, read_rows
from tests.unit.run_folder import T0, append, configure, log, row

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
pytest.importorskip("starlette")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills processes that it finds through /proc"),
    pytest.mark.timeout(300),
]

WITHIN_S = 3.0  # a killed worker shows
PATIENCE_MS = 60_000  # four processes that import torch, and a browser, on two cores
SPITEFUL = '<img src=x onerror="document.title = `owned`"> needle in a log'


# What there is to see


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that have ended, made by hand; the one that trains joins them."""
    path = tmp_path_factory.mktemp("dashboard")
    for name, strategy in (("ended-a", "edp"), ("ended-b", "allreduce")):
        run = configure(path / "runs" / name, strategy=strategy)
        append(run / "metrics.jsonl", *(row(step, rank, val_loss=2.0) for step in range(1, 30) for rank in (0, 1)))
        append(
            run / "logs" / "worker-rank0-mini.log",
            log("begins"),
            log(SPITEFUL, "ERROR", 5),
            log("a warning", "WARNING", 6),
        )
        (run / "summary.json").write_text(json.dumps({"status": "finished", "strategy": strategy, "finished": T0 + 30}))
    return path


@pytest.fixture(scope="class")
def training(smol: Smol, folder: Path) -> Iterator[Running]:
    """A server and two workers that train until they are stopped."""
    command = ("train", "gpt", "--strategy", "edp", "--workers", "2", "--steps", "1000000", "--run-dir", "runs/live")
    running = smol.start(*command, "--override", *TINY, "training.eval_steps=200", "cluster.standby=false", cwd=folder)
    live = folder / "runs" / "live"
    running.until(lambda: len({r["rank"] for r in read_rows(live)}) == 3, what="rows of all", within_s=120)
    yield running
    running.process.send_signal(signal.SIGINT)
    with contextlib.suppress(Exception):
        running.end(within_s=30)
    running.close()


@contextlib.contextmanager
def dashboard(smol: Smol, folder: Path, *options: str, port: str = "0") -> Iterator[str]:
    """The real command; its address."""
    running = smol.start("dashboard", "runs", "--port", port, "--no-browser", *options, cwd=folder)
    try:
        found = running.until(lambda: re.search(r"http://\S+", running.output), what="the address", within_s=60)
        yield found[0]
        running.process.send_signal(signal.SIGINT)
        assert running.end(within_s=30).status == 0
    finally:
        running.close()


@pytest.fixture(scope="module")
def url(smol: Smol, folder: Path) -> Iterator[str]:
    with dashboard(smol, folder) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        options = ["--no-sandbox", "--host-resolver-rules=MAP rebound.example 127.0.0.1"]
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        chromium.close()


class Complaints(list[str]):
    """Whatever a page should not say: errors on its console, exceptions, violations of its policy."""


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; at the end none of them may have complained."""
    complaints, contexts = Complaints(), []

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
    assert complaints == []


def until(page: Any, expression: str, *, within_s: float = PATIENCE_MS / 1000) -> None:
    """Asked from outside: the page's own policy forbids to wait for an expression inside it."""
    eventually(lambda: page.evaluate(expression), within_s=within_s, what=expression)


def pid_of(run: Path, seat: str) -> int:
    """Of the process that was last started for this seat, as its log says."""
    (path,) = (run / "logs").glob(f"{seat}-*.log")
    return int(re.findall(r"starts as process (\d+)", path.read_text(encoding="utf-8"))[-1])


class TestARunThatTrains:
    """One run for these; it is stopped before the others, which need no such company."""

    def test_the_page_opens_and_its_curves_move(
        self, training: Running, url: str, open_page: Callable[..., Any]
    ) -> None:
        page = open_page(f"{url}#/live/overview")
        until(page, "document.querySelector('#status').textContent === 'training'")
        step = "Number(document.querySelector('[data-tile=step] b').textContent.replaceAll(',', ''))"
        picture = "document.querySelector('#loss canvas').toDataURL()"
        first, drawn = page.evaluate(step), page.evaluate(picture)
        until(page, f"{step} > {first} + 5")
        until(page, f"{picture} !== {json.dumps(drawn)}")
        label = page.get_attribute("#loss canvas", "aria-label")
        assert re.match(r"Loss: worker 0 [\d.]+, worker 1 [\d.]+, all workers [\d.]+", label)
        assert page.inner_text("#line") == "live"

        # The machines, each with its state in words, and bytes that move on the links between them.
        states = page.eval_on_selector_all(
            "#machines .machine", "nodes => nodes.map(n => n.getAttribute('aria-label'))"
        )
        assert sorted(re.sub(r" on .*: ", ": ", state) for state in states) == [
            "server: training",
            "worker 0: training",
            "worker 1: training",
        ]
        until(page, "document.querySelectorAll('#machines .flow').length === 4")
        until(page, "[...document.querySelectorAll('#machines .flow')].some(f => f.getAnimations().length)")
        rates = page.eval_on_selector_all("#links tbody tr", "rows => rows.map(r => r.innerText)")
        assert len(rates) == 4
        assert all(re.search(r"[kM]?B/s|–", rate) for rate in rates)  # noqa: RUF001 - the dash of what is not known

    def test_a_killed_worker_shows_within_three_seconds(
        self, training: Running, url: str, folder: Path, open_page: Callable[..., Any]
    ) -> None:
        page = open_page(f"{url}#/live/overview")
        page.wait_for_selector("#machines .machine[data-rank='1'][data-state='training']")
        lost = "document.querySelectorAll('#events li[data-kind=lost]').length"
        before = page.evaluate(lost)
        os.kill(pid_of(folder / "runs" / "live", "worker-rank1"), signal.SIGKILL)
        killed = time.monotonic()
        until(page, f"{lost} > {before}", within_s=WITHIN_S)
        took_s = time.monotonic() - killed
        assert took_s <= WITHIN_S
        print(f"\na killed worker was on the page after {took_s:.2f} s")
        assert "worker 1 is gone" in page.inner_text("#events li[data-kind=lost]")
        # It is started again, and then it is said so.
        page.wait_for_selector("#machines .machine[data-rank='1'][data-state='training']")
        assert "again" in page.inner_text("#events li[data-kind=join]")

    def test_a_page_says_that_its_server_is_gone_and_goes_on_when_it_is_back(
        self, training: Running, smol: Smol, folder: Path, browser: Any
    ) -> None:
        context = browser.new_context()
        page = context.new_page()
        with dashboard(smol, folder) as address:
            page.goto(f"{address}#/live/overview")
            until(page, "document.querySelector('#line').textContent === 'live'")
        until(page, "document.querySelector('#line').textContent === 'the dashboard has ended'")
        assert page.inner_text("#status") == "training"  # what was known last is still there
        with dashboard(smol, folder, port=address.split(":")[2].rstrip("/")):
            until(page, "document.querySelector('#line').textContent === 'live'")
            page.goto("about:blank")
        context.close()


# Runs that have ended


def test_a_run_directory_alone_is_enough(url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{url}#/ended-b/overview")
    until(page, "document.querySelector('#status').textContent === 'finished'")
    assert page.inner_text("[data-tile=step] b") == "29"
    assert page.eval_on_selector_all("#machines .machine", "n => n.map(m => m.dataset.state)") == ["finished"] * 2
    page.click(".tabs a[data-view=config]")
    page.wait_for_selector("#config dt")
    assert "allreduce" in page.inner_text("#config")
    page.fill("#config input", "num_workers")
    assert page.eval_on_selector_all("#config dt", "n => n.map(d => d.textContent)") == ["num_workers"]


def test_logs_are_searched_and_filtered_and_are_never_more_than_text(url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{url}#/ended-a/overview")
    page.keyboard.press("/")  # from anywhere
    page.wait_for_selector(".log li")
    lines = "nodes => nodes.map(n => n.querySelector('.message').textContent)"
    assert page.eval_on_selector_all(".log li", lines) == ["begins", SPITEFUL, "a warning"]
    page.fill("#log-search", "NEEDLE")
    until(page, "document.querySelectorAll('.log li').length === 1")
    assert page.inner_text(".log mark") == "needle"
    assert page.locator(".log img").count() == 0
    assert page.title() != "owned"
    page.fill("#log-search", "")
    page.select_option("#log-level", "WARNING")
    until(page, "document.querySelectorAll('.log li').length === 2")
    page.select_option("#log-level", "ERROR")
    until(page, "document.querySelectorAll('.log li').length === 1")
    page.fill("#log-search", "nowhere")
    until(page, "document.querySelector('#logs .fine').textContent === 'no line fits'")


def test_two_runs_beside_each_other(url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{url}#/ended-a/runs")
    page.wait_for_selector("#runs input[data-run=ended-a]:checked")
    page.check("#runs input[data-run=ended-b]")
    page.wait_for_selector("#compare-config td")
    assert page.inner_text("#compare-config tbody").split() == ["strategy.name", "edp", "allreduce"]
    heads = page.eval_on_selector_all("#compare-numbers thead th", "n => n.map(t => t.textContent)")
    assert heads[1:] == ["ended-a", "ended-b"]
    page.click("#runs a:text('ended-b')")
    until(page, "document.title.includes('ended-b')")


@pytest.mark.parametrize("view", ["overview", "logs", "config", "runs"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(
    url: str, open_page: Callable[..., Any], view: str, scheme: str
) -> None:
    page = open_page(
        f"{url}#/ended-a/{view}",
        viewport={"width": 360, "height": 740},
        color_scheme=scheme,
        has_touch=True,
        is_mobile=True,
    )
    page.wait_for_selector(
        {"overview": "#machines .machine", "logs": ".log li", "config": "#config dt", "runs": "#runs a"}[view]
    )
    until(page, "document.querySelector('#status').textContent === 'finished'")
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    too_wide = """[...document.querySelectorAll('main .card, main .tiles, header, nav')]
        .filter(n => n.getBoundingClientRect().right > innerWidth + 0.5).map(n => n.id || n.className)"""
    assert page.evaluate(too_wide) == []


def test_by_keyboard_and_without_motion(url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{url}#/ended-a/overview", reduced_motion="reduce")
    until(page, "document.querySelector('#status').textContent === 'finished'")
    page.focus("#loss canvas")
    page.keyboard.press("Home")
    until(page, "document.querySelector('#loss .sr').textContent.startsWith('step 1,')")
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('#loss .sr').textContent.startsWith('step 2,')")
    page.focus("#machines .machine")
    assert "mini" in page.inner_text("#tip")
    page.keyboard.press("2")
    page.wait_for_selector(".log li")
    assert page.evaluate("document.getAnimations().length") == 0
    unnamed = """[...document.querySelectorAll('button, input, select, a, canvas, svg[role]')]
        .filter(n => !(n.textContent.trim() || n.getAttribute('aria-label') || n.closest('label'))).length"""
    assert page.evaluate(unnamed) == 0


# Many viewers


def test_fifty_viewers_get_the_same(url: str, folder: Path) -> None:
    run = configure(folder / "runs" / "watched")
    append(run / "metrics.jsonl", row(1, 0), row(1, 1))
    port = int(url.split(":")[2].rstrip("/"))
    viewers = [Viewer(port, "watched") for _ in range(50)]
    for viewer in viewers:
        viewer.next("snapshot")

    def last_of(viewer: Viewer) -> tuple[str, str, Any]:
        while True:
            event = viewer.next("changes", "snapshot")
            if event[2].get("status") == "finished":
                return event

    with ThreadPoolExecutor(50) as pool:
        waiting = [pool.submit(last_of, viewer) for viewer in viewers]
        for step in range(2, 6):
            append(run / "metrics.jsonl", row(step, 0), row(step, 1))
        (run / "summary.json").write_text(json.dumps({"status": "finished", "finished": time.time()}))
        events = [future.result(60) for future in waiting]
    assert all(event == events[0] for event in events)
    assert events[0][2]["summary"]["status"] == "finished"
    for viewer in viewers:
        viewer.close()


def test_train_shows_itself_and_its_viewers_hear_of_its_end(smol: Smol, folder: Path) -> None:
    command = ("train", "gpt", "--workers", "1", "--steps", "400", "--run-dir", "runs/shown", "--dashboard")
    running = smol.start(*command, "--override", *TINY, cwd=folder)
    found = running.until(lambda: re.search(r"http://127\.0\.0\.1:(\d+)/", running.output), what="the address")
    port = int(found[1])
    running.until(lambda: get(port, "/api/run/shown")[0] == 200, what="the run")
    viewer = Viewer(port, "shown")
    last: dict[str, Any] = {}
    while (event := viewer.next("changes", "snapshot", "bye"))[0] != "bye":
        last |= event[2]
    assert (last["status"], last["numbers"]["step"]) == ("finished", 400)
    viewer.close()
    assert running.end().ok()
    with pytest.raises(ConnectionRefusedError):
        get(port, "/health")


# Pages from elsewhere

ATTEMPTS = """async address => {
    const tried = {};
    const attempt = async (name, work) => { try { tried[name] = await work(); } catch (error) { tried[name] = 'refused'; } };
    await attempt('fetch', async () => (await fetch(address + 'api/runs')).status);
    await attempt('blind', async () => (await fetch(address + 'api/runs', {mode: 'no-cors'})).type);
    await attempt('post', async () => (await fetch(address + 'api/runs', {method: 'POST', body: '{}'})).status);
    await attempt('put', async () => (await fetch(address + 'api/runs', {method: 'PUT', headers: {'x-a': '1'}})).status);
    await attempt('events', () => new Promise((good, bad) => {
        const source = new EventSource(address + 'api/run/ended-a/events');
        source.addEventListener('snapshot', () => good('read'));
        source.onerror = () => { source.close(); bad(); };
    }));
    await attempt('socket', () => new Promise((good, bad) => {
        const socket = new WebSocket(address.replace('http', 'ws') + 'api/run/ended-a/events');
        socket.onopen = () => good('open');
        socket.onerror = () => bad();
    }));
    for (const [name, tag] of [['script', 'script'], ['image', 'img']]) {
        await attempt(name, () => new Promise((good, bad) => {
            const node = document.createElement(tag);
            node.onload = () => good('loaded');
            node.onerror = () => bad();
            node.src = address + (name === 'script' ? 'api/runs' : 'static/icon.svg');
            document.body.append(node);
        }));
    }
    return tried;
}"""


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A page of another origin, on another port of this machine."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title><body></body>")

        def log_message(self, *_: Any) -> None:
            """Not into the tests' output."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{page.server_address[1]}/"
        page.shutdown()
        thread.join()


def test_a_page_from_elsewhere_gets_nothing(url: str, browser: Any, elsewhere: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(elsewhere)
    tried = page.evaluate(ATTEMPTS, url)
    # A blind request is sent, but its answer is a refusal that the page cannot read; all others fail openly.
    assert tried.pop("blind") in ("refused", "opaque")
    assert set(tried.values()) == {"refused"}, tried
    port = int(url.split(":")[2].rstrip("/"))
    assert get(port, "/api/runs", origin=elsewhere.rstrip("/"))[0] == 403
    assert get(port, "/api/run/ended-a/events", origin="null")[0] == 403
    page.evaluate(
        "address => { const f = document.createElement('iframe'); f.src = address; document.body.append(f); }", url
    )
    eventually(lambda: len(page.frames) > 1, what="a frame")
    assert "smolcluster" not in page.frames[1].content()
    context.close()


def test_a_name_that_was_rebound_is_refused(url: str, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    port = url.split(":")[2]
    for path in ("", "api/runs", "static/app.js"):
        answer = page.goto(f"http://rebound.example:{port}{path}")
        assert answer.status == 421
        assert "smolcluster dashboard --allow-host" in answer.text()
    context.close()
    for verb in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert get(int(port.rstrip("/")), "/api/runs", verb)[0] == 405


def test_with_a_token_the_address_opens_it_once(smol: Smol, folder: Path, browser: Any) -> None:
    with dashboard(smol, folder, "--token", "a-token-for-the-test") as address:
        assert address.endswith("#token=a-token-for-the-test")
        plain = address.partition("#")[0]
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(plain)
        page.wait_for_selector("#notice input[type=password]")
        page.fill("#notice input", "wrong-token-wrong-token")
        page.click("#notice button")
        until(page, "document.querySelector('#notice').textContent.includes('That is not it')")
        page.goto("about:blank")
        page.goto(address)
        until(page, "document.querySelectorAll('#run option').length > 1")
        assert "token" not in page.url  # not left in the address bar
        (cookie,) = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        page.goto("about:blank")
        page.goto(f"{plain}#/ended-a/overview")  # the cookie is enough, for the stream too
        until(page, "document.querySelector('#status').textContent === 'finished'")
        context.close()
