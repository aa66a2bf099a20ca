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
from tests.e2e.browser import CHROMIUM, chromium, pages, until
from tests.e2e.command import TINY, Running, Smol, read_rows
from tests.places import at_most, eventually
from tests.server_thread import served
from tests.unit.run_folder import T0, aged, append, configure, log, row, summarize, write_rows
from tests.world import TASKS

from smolcluster.dashboard.runs import MAX_RUNS
from smolcluster.dashboard.server import DashboardConfig, serve

pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
pytest.importorskip("starlette")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills processes that it finds through /proc"),
]

WITHIN_S = 3.0  # a killed worker shows
SPITEFUL = '<img src=x onerror="document.title = `owned`"> needle in a log'


# What there is to see


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that have ended, made by hand; the one that trains joins them."""
    path = tmp_path_factory.mktemp("dashboard")
    for name, strategy in (("ended-a", "edp"), ("ended-b", "allreduce")):
        run = configure(path / "runs" / name, strategy=strategy)
        write_rows(run, *(row(step, rank, val_loss=2.0) for step in range(1, 30) for rank in (0, 1)))
        append(
            run / "logs" / "worker-rank0-mini.log",
            log("begins"),
            log(SPITEFUL, "ERROR", 5),
            log("a warning", "WARNING", 6),
        )
        summarize(run, status="finished", strategy=strategy, finished=T0 + 30)
    return path


@pytest.fixture(scope="class")
def training(smol: Smol, folder: Path) -> Iterator[Running]:
    """A server and two workers that train until they are stopped, and leave the processor to the page most of the time."""
    command = ("train", "gpt", "--strategy", "edp", "--workers", "2", "--steps", "1000000", "--run-dir", "runs/live")
    overrides = (*TINY, f"task={TASKS}:Paced", "training.eval_steps=20", "cluster.standby=false")
    running = smol.start(*command, "--override", *overrides, cwd=folder, env={"PACE_S": "0.1"})
    live = folder / "runs" / "live"
    running.until(lambda: len({r["rank"] for r in read_rows(live)}) == 3, what="rows of all", timeout_s=120)
    yield running
    running.process.send_signal(signal.SIGINT)
    with contextlib.suppress(Exception):
        running.end(timeout_s=30)
    running.close()


@contextlib.contextmanager
def dashboard(smol: Smol, folder: Path, *options: str, port: str = "0") -> Iterator[str]:
    """The real command; its address."""
    running = smol.start("dashboard", "runs", "--port", port, "--no-browser", *options, cwd=folder)
    try:
        found = running.until(lambda: re.search(r"http://\S+", running.output), what="the address", timeout_s=60)
        yield found[0]
        running.process.send_signal(signal.SIGINT)
        assert running.end(timeout_s=30).status == 0
    finally:
        running.close()


@pytest.fixture(scope="module")
def url(smol: Smol, folder: Path) -> Iterator[str]:
    with dashboard(smol, folder) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium("--host-resolver-rules=MAP rebound.example 127.0.0.1") as started:
        yield started


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    with pages(browser) as opened:
        yield opened


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
        until(page, f"{lost} > {before}")
        took_s = time.monotonic() - killed
        assert took_s <= at_most(WITHIN_S)
        print(f"\na killed worker was on the page after {took_s:.2f} s")
        until(page, "document.querySelector('#events').innerText.includes('worker 1 is gone')")
        until(page, "document.querySelector('#events').innerText.includes('worker 1: killed (SIGKILL)')")
        # Whoever looks at warnings alone finds it too; on the time line it is told of once.
        (server,) = (folder / "runs" / "live" / "logs").glob("server-*.log")
        lines = [json.loads(line) for line in server.read_text(encoding="utf-8").splitlines()]
        assert {line["level"] for line in lines if "is gone" in line["message"]} == {"WARNING"}
        assert not [e for e in page.query_selector_all("#events li[data-kind=warning]") if "is gone" in e.inner_text()]
        # It is started again, and then it is said so.
        page.wait_for_selector("#machines .machine[data-rank='1'][data-state='training']")
        assert re.search(r"worker 1 is back after \d+ s; killed \(SIGKILL\)", page.inner_text("#events"))

    def test_a_run_that_trains_has_its_numbers_in_the_list_too(
        self, training: Running, url: str, open_page: Callable[..., Any]
    ) -> None:
        page = open_page(f"{url}#/live/runs")
        cells = "[...document.querySelectorAll('#runs tr[aria-current] td')].map(d => d.textContent)"
        until(page, f"{cells}.length && !{cells}.includes('\\u2013')")  # nothing is a dash, once it was evaluated
        assert page.evaluate(cells)[1:4] == ["training", "edp", "2"]

    def test_a_page_says_that_its_server_is_gone_and_goes_on_when_it_is_back(
        self, training: Running, smol: Smol, folder: Path, lone: Any
    ) -> None:
        page = lone
        with dashboard(smol, folder) as address:
            page.goto(f"{address}#/live/overview")
            until(page, "document.querySelector('#line').textContent === 'live'")
        until(page, "document.querySelector('#line').textContent === 'the dashboard has ended'")
        assert page.inner_text("#status") == "training"  # what was known last is still there
        with dashboard(smol, folder, port=address.split(":")[2].rstrip("/")):
            until(page, "document.querySelector('#line').textContent === 'live'")
            page.goto("about:blank")


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


def test_a_table_that_goes_on_beyond_the_edge_is_in_the_shade_there(url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{url}#/ended-a/runs", viewport={"width": 320, "height": 800}, has_touch=True, is_mobile=True)
    page.wait_for_selector("#runs tbody tr:nth-child(2)")
    table = "document.querySelector('#runs .scroll')"
    page.evaluate(f"{table}.scrollIntoView({{block: 'center'}})")

    def edges() -> tuple[bytes, bytes]:
        """Below the table, where nothing is but its background."""
        box = page.evaluate(f"(r => [r.left, r.right, r.bottom])({table}.getBoundingClientRect())")
        strips = ({"x": x, "y": box[2] - 4, "width": 6, "height": 3} for x in (box[0] + 1, box[1] - 7))
        return page.screenshot(clip=next(strips)), page.screenshot(clip=next(strips))

    def at(place: int) -> tuple[bytes, bytes]:
        page.evaluate(f"{table}.scrollLeft = {place}")
        page.evaluate("new Promise(painted => requestAnimationFrame(() => requestAnimationFrame(painted)))")
        return edges()

    def is_shaded() -> bool:  # some time after it is scrolled, on the side where there is more
        (left, right), (left_at_end, right_at_end) = at(0), at(10000)
        return right != left == right_at_end != left_at_end

    assert page.evaluate(f"{table}.scrollWidth > {table}.clientWidth")
    eventually(is_shaded, what="a shade on the right, then on the left")


def test_a_single_evaluation_is_in_the_middle_of_its_chart(url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{url}#/ended-a/runs")
    asked = """async (x) => {
        const { Chart, ticks } = await import('/static/chart.js');
        const { x0, x1 } = Chart.prototype.range.call({ x: 'step' }, [{ x: [x], y: [5.02] }]);
        return [x0, x1, ticks(x0, x1, 5, 1)];
    }"""
    assert page.evaluate(asked, 25) == [0, 50, [0, 10, 20, 30, 40, 50]]
    assert page.evaluate(asked, 1) == [0, 2, [0, 1, 2]]


def test_skipped_steps_and_metrics_of_a_task_show_where_there_are_any(
    url: str, folder: Path, open_page: Callable[..., Any]
) -> None:
    run = configure(folder / "runs" / "own", row(1, val_loss=2.0), workers=1)
    page = open_page(f"{url}#/own/overview")
    until(page, "document.querySelector('[data-tile=step] b').textContent === '1'")
    assert page.is_hidden("#metrics")
    assert page.query_selector("[data-tile=skipped]") is None
    write_rows(run, *(row(step, skipped=3, val_f1=step / 10, val_wer=0.5) for step in (2, 3)))
    until(page, "document.querySelector('[data-tile=skipped] b')?.textContent === '3'")
    label = "document.querySelector('#metrics canvas').getAttribute('aria-label')"
    until(page, f"/^Metrics: f1 0.3\\d*, wer 0.5\\d*$/.test({label})")
    assert page.locator("#metrics canvas").bounding_box()["width"] > 300
    page.click("#metrics .legend button >> text=wer")
    until(page, f"!{label}.includes('wer')")
    shutil.rmtree(run)


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


def test_keys_change_the_view_from_a_box_too_and_a_view_begins_at_its_top(
    url: str, open_page: Callable[..., Any]
) -> None:
    page = open_page(f"{url}#/ended-a/runs", viewport={"width": 360, "height": 500})
    page.wait_for_selector("#compare-loss canvas")
    page.focus("#runs input[data-run=ended-a]")
    page.evaluate("scrollTo(0, 300)")
    until(page, "scrollY > 0")
    page.keyboard.press("1")
    page.wait_for_selector("#machines .machine")
    assert page.evaluate("scrollY") == 0
    page.evaluate("scrollTo(0, 900)")
    page.click(".tabs a[data-view=runs]")
    page.wait_for_selector("#runs input")
    assert page.evaluate("scrollY") == 0


def test_nothing_is_cut_at_a_usual_width(url: str, folder: Path, open_page: Callable[..., Any]) -> None:
    run = configure(folder / "runs" / "wide", strategy="edp", workers=8)
    numbers = {"lr": 0.00012345, "val_loss": 2.0, "val_accuracy": 0.975}
    write_rows(run, *(row(s, r, **numbers) for s in (1, 2) for r in range(8)))
    write_rows(run, *(row(s, 8, role="server", **numbers) for s in (1, 2)))
    page = open_page(f"{url}#/wide/overview", viewport={"width": 1280, "height": 900})
    page.wait_for_selector("#links tbody tr:nth-child(16)")
    until(page, "document.querySelector('[data-tile=loss] small').textContent === 'lr 0.000123'")
    cut = "[...document.querySelectorAll('.tile *')].filter(n => n.scrollWidth > n.clientWidth + 1).map(n => n.textContent)"
    assert page.evaluate(cut) == []
    halves = """(() => { const end = document.querySelector('#links .scroll').getBoundingClientRect().bottom;
        return [...document.querySelectorAll('#links tr')].map(r => r.getBoundingClientRect())
            .filter(r => r.top < end - 1 && r.bottom > end + 1).length; })()"""
    assert page.evaluate(halves) == 0
    baselines = """[...document.querySelectorAll('#who tbody tr')].map(row => {
        const bottom = cell => {
            const range = document.createRange();
            range.selectNodeContents(cell);
            return range.getBoundingClientRect().bottom;
        };
        const words = row.children[1].firstChild.lastChild;
        return Math.abs(bottom(words) - bottom(row.children[3])); })"""
    assert max(page.evaluate(baselines)) <= 1.5


def test_the_bar_of_a_silent_machine_ends_where_it_was_heard(
    url: str, folder: Path, open_page: Callable[..., Any]
) -> None:
    run = configure(folder / "runs" / "killed", *(row(step, 0) for step in range(1, 30)), strategy="edp")
    write_rows(run, *(row(step, 2, role="server") for step in range(1, 30)))
    for path in (run / "metrics.jsonl", run / "config.yaml"):
        aged(path, T0 + 30)
    page = open_page(f"{url}#/killed/overview")
    until(page, "document.querySelector('#status').textContent === 'silent'")
    widths = "[...document.querySelectorAll('#timeline .span')].map(b => b.getBoundingClientRect().width)"
    until(page, f"{widths}.length === 2")
    assert "Timeline of 0:28 " in page.get_attribute("#timeline svg", "aria-label")  # and does not go on up to now
    assert min(page.evaluate(widths)) > 300
    page.click(".tabs a[data-view=runs]")
    assert page.inner_text("#runs tr[aria-current] .pill") == "silent"


def test_a_run_that_was_named_does_not_wait_for_the_list_of_all(url: str, lone: Any) -> None:
    page = lone
    page.route("**/api/runs", lambda _: None)  # never answered
    page.goto(f"{url}#/ended-a/overview")
    until(page, "document.querySelector('#status').textContent === 'finished'")
    page.wait_for_selector("#machines .machine")


@contextlib.contextmanager
def here(folder: Path, **options: Any) -> Iterator[str]:
    """A dashboard of this process, for a folder of a test's own; its address."""
    place = DashboardConfig(folder=folder, port=0, **options)
    with served(lambda ready, until: serve(place, ready=ready, until=until)) as port:
        yield f"http://127.0.0.1:{port}/"


def test_the_link_past_the_top_keeps_the_run_and_the_view(url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{url}#/ended-b/logs")
    page.wait_for_selector(".log li")
    page.focus(".skip")
    page.keyboard.press("Enter")
    until(page, "document.activeElement.id === 'main'")
    assert page.url == f"{url}#/ended-b/logs"
    assert page.input_value("#run") == "ended-b"


def test_a_newer_run_does_not_take_the_place_of_the_one_that_is_shown(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    write_rows(configure(tmp_path / "first"), row(1, 0), row(1, 1))
    with here(tmp_path) as address:
        page = open_page(address)
        until(page, "document.title.endsWith('first')")
        write_rows(configure(tmp_path / "second"), row(1, 0), row(1, 1))
        until(page, "document.querySelectorAll('#run option').length === 2")
        page.keyboard.press("3")
        page.wait_for_selector("#config dt")
        assert page.input_value("#run") == "first"
        page.select_option("#run", "second")
        until(page, "document.title.endsWith('second')")
        page.goto("about:blank")


def test_an_old_run_among_many_is_shown(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    for number in range(MAX_RUNS + 2):
        run = configure(tmp_path / f"run-{number:03d}")
        aged(run / "config.yaml", T0 + number)
    append(tmp_path / "run-000" / "metrics.jsonl", row(1, 0), row(1, 1))
    aged(tmp_path / "run-000" / "metrics.jsonl", T0)
    with here(tmp_path, run="run-000") as address:
        page = open_page(address)
        until(page, "document.title.endsWith('run-000')")
        page.keyboard.press("3")
        page.wait_for_selector("#config dt")
        assert page.input_value("#run") == "run-000"
        page.goto("about:blank")


def test_a_run_that_was_deleted_does_not_keep_others_from_being_compared(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    for name in ("a", "b", "c"):
        write_rows(configure(tmp_path / name), row(1, 0), row(1, 1))
    with here(tmp_path) as address:
        page = open_page(f"{address}#/a/runs")
        page.check("#runs input[data-run=b]")
        heads = "[...document.querySelectorAll('#compare-numbers thead th')].map(t => t.textContent).join()"
        until(page, f"{heads} === ',a,b'")
        # A list that is drawn anew takes the focus from nobody.
        page.focus("#runs a[data-run=a]")
        page.evaluate("document.querySelector('#runs a[data-run=a]').id = 'old'")
        shutil.rmtree(tmp_path / "b")
        until(page, "!document.querySelector('#runs a[data-run=b]')")
        assert page.evaluate("document.querySelector('#old') === null && document.activeElement.textContent") == "a"
        page.check("#runs input[data-run=c]")
        until(page, f"{heads} === ',a,c'")
        page.goto("about:blank")


def test_whoever_reads_older_lines_is_left_in_peace(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    run = configure(tmp_path / "one", row(1, 0), row(1, 1))
    append(run / "logs" / "worker-rank0-a.log", *(log(f"line {i}", when=i) for i in range(300)))
    with here(tmp_path) as address:
        page = open_page(f"{address}#/one/logs")
        until(page, "document.querySelectorAll('.log li').length === 200")
        page.click(".older")
        until(page, "document.querySelectorAll('.log li').length === 300")
        assert not page.is_checked("#log-follow")
        append(run / "logs" / "worker-rank0-a.log", log("a new line", when=400))
        page.wait_for_timeout(1500)
        assert page.locator(".log li").count() == 300
        page.check("#log-follow")
        until(page, "document.querySelector('.log li:last-child .message').textContent === 'a new line'")
        page.goto("about:blank")


def test_a_configuration_that_was_changed_is_shown(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    run = configure(tmp_path / "one", row(1, 0), row(1, 1), steps=100)
    with here(tmp_path) as address:
        page = open_page(f"{address}#/one/config")
        values = "[...document.querySelectorAll('#config dd')].map(d => d.textContent).join()"
        until(page, f"{values} === 'allreduce,2,100'")
        configure(run, steps=200)  # killed, and resumed for longer
        until(page, f"{values} === 'allreduce,2,200'")
        page.goto("about:blank")


# The picture: pure geometry, of the module that the page uses

HIDDEN = """async () => {
    const { layout, together, way } = await import("/static/layout.js");
    const linksOf = (shape, ranks, server) => {
        const links = [];
        const both = (a, b) => links.push({ source: a, target: b }, { source: b, target: a });
        if (server !== null) ranks.forEach(rank => both(rank, server));
        if (shape === "line") ranks.slice(1).forEach((rank, i) => both(ranks[i], rank));
        if (["ring", "wheel"].includes(shape) && ranks.length > 1)
            ranks.forEach((rank, i) => links.push({ source: rank, target: ranks[(i + 1) % ranks.length] }));
        return links;
    };
    const box = (p, more = 0) => [p.x - p.w / 2 - more, p.y - p.h / 2 - more, p.x + p.w / 2 + more, p.y + p.h / 2 + more];
    const meet = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
    const crosses = (points, b) => points.slice(1).some(([x1, y1], i) => {
        const [x0, y0] = points[i];
        return [...Array(101).keys()].some(k => {
            const [x, y] = [x0 + ((x1 - x0) * k) / 100, y0 + ((y1 - y0) * k) / 100];
            return x > b[0] && x < b[2] && y > b[1] && y < b[3];
        });
    });
    const labelBox = ({ x, y, anchor = "middle", turned }) => {
        const [w, h] = turned ? [11, 56] : [56, 11];  // 999.9 MB/s
        const left = { start: x, middle: x - w / 2, end: x - w }[anchor];
        return [left, y - h / 2, left + w, y + h / 2];
    };
    const found = [];
    for (const shape of ["star", "wheel", "ring", "line"]) for (const width of [266, 306, 420, 584, 790, 920])
        for (let num = shape === "star" ? 1 : 2; num <= 24; num++) {
            const say = words => found.push(`${num} as a ${shape} in ${width}: ${words}`);
            const ranks = [...Array(num).keys()];
            const server = ["star", "wheel"].includes(shape) ? num : null;
            const plan = layout(shape, ranks, server, width);
            const frame = b => b[0] >= -1 && b[1] >= -1 && b[2] <= width + 1 && b[3] <= plan.height + 1;
            const links = linksOf(shape, ranks, server);
            const places = [...plan.places];
            places.forEach(([rank, p], i) => {
                if (!frame(box(p))) say(`${rank} is outside`);
                if (places.slice(i + 1).some(([, other]) => meet(box(p), box(other)))) say(`${rank} is behind another`);
            });
            for (const { source, target } of links)
                for (const [rank, p] of places)
                    if (crosses(way(plan, source, target).points, box(p, 1))) say(`${source} to ${target} behind ${rank}`);
            const labels = together(plan, links).map(same => [same, labelBox(way(plan, same[0].source, same[0].target).label)]);
            labels.forEach(([same, b], i) => {
                const name = `the rate of ${same[0].source} to ${same[0].target}`;
                if (!frame(b)) say(`${name} is outside`);
                if (places.some(([, p]) => meet(b, box(p)))) say(`${name} is on a machine`);
                if (labels.slice(i + 1).some(([, other]) => meet(b, other))) say(`${name} is on another`);
                for (const link of links.filter(link => !same.includes(link)))
                    if (crosses(way(plan, link.source, link.target).points, b)) say(`${name} is on a link`);
            });
        }
    return found;
}"""


def test_every_link_and_its_rate_is_to_be_seen(url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{url}#/ended-a/overview")
    assert page.evaluate(HIDDEN) == []


# Many viewers


def test_fifty_viewers_get_the_same(url: str, folder: Path) -> None:
    run = configure(folder / "runs" / "watched", row(1, 0), row(1, 1))
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
            write_rows(run, row(step, 0), row(step, 1))
        summarize(run, status="finished", finished=time.time())
        events = [future.result(300) for future in waiting]
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


def test_a_page_from_elsewhere_gets_nothing(url: str, lone: Any, elsewhere: str) -> None:
    page = lone
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


def test_a_name_that_was_rebound_is_refused(url: str, lone: Any) -> None:
    page = lone
    port = url.split(":")[2]
    for path in ("", "api/runs", "static/app.js"):
        answer = page.goto(f"http://rebound.example:{port}{path}")
        assert answer.status == 421
        assert "smolcluster dashboard --allow-host" in answer.text()


def test_with_a_token_the_address_opens_it_once(smol: Smol, folder: Path, lone: Any) -> None:
    page = lone
    with dashboard(smol, folder, "--token", "a-token-for-the-test") as address:
        assert address.endswith("#token=a-token-for-the-test")
        plain = address.partition("#")[0]
        page.goto(plain)
        page.wait_for_selector("#notice input[type=password]")
        page.fill("#notice input", "wrong-token-wrong-token")
        page.click("#notice button")
        until(page, "document.querySelector('#notice').textContent.includes('That is not it')")
        page.goto(address)  # put into the address bar of the page that asks for it
        until(page, "document.querySelectorAll('#run option').length > 1")
        assert "token" not in page.url  # not left in the address bar
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        page.goto("about:blank")
        page.goto(f"{plain}#/ended-a/overview")  # the cookie is enough, for the stream too
        until(page, "document.querySelector('#status').textContent === 'finished'")
