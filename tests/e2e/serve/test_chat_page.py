"""The chat page in a real browser, before a model that says what the test tells it to: Chromium through Playwright.

`SMOLCLUSTER_SCREENSHOTS=docs/images` keeps the pictures of the last test.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.browser import CHROMIUM, chromium, lone_page, pages, until
from tests.e2e.serve.fake_chat import (
    STORY,
    Fake,
    break_off,
    err,
    machine,
    pieces,
    refuse,
    serving,
    three_stages,
)
from tests.places import eventually
from tests.unit.scripted_engine import SAID, ScriptedEngine
from tests.unit.scripted_engine import serving as scripted

from smolcluster.serve.engine.types import Unavailable

pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def open_page(fake: Fake, browser: Any) -> Iterator[Callable[..., Any]]:
    """Refusals are the tests' own."""
    with pages(browser, expected=("Failed to load resource", "net::ERR_")) as opened:
        yield lambda address="", **options: opened(fake.url + address, **options)
        fake.go.set()


ANSWER = "(document.querySelector('article.assistant:last-of-type .markdown')?.textContent ?? '')"
DONE = "document.querySelector('article.assistant:last-of-type:not([aria-busy]) .markdown') !== null"


def ask(page: Any, words: str = "hello") -> None:
    page.fill("#question", words)
    page.keyboard.press("Enter")


def ready(page: Any) -> None:
    until(page, "document.querySelector('#status').textContent === 'ready'")


# Talking


def test_an_answer_grows_while_it_is_written(fake: Fake, open_page: Callable[..., Any]) -> None:
    fake.hold_at = 3
    page = open_page()
    ready(page)
    assert page.inner_text("#name") == "smollm2"
    page.click("#question")
    page.keyboard.type("Tell me")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("more.")
    page.keyboard.press("Enter")
    until(page, f"{ANSWER} === 'Here is a'")
    assert page.locator("article.assistant[aria-busy=true]").count() == 1
    assert page.inner_text("article.user .bubble") == "Tell me\nmore."
    assert page.is_hidden("#send")
    lengths = [page.evaluate(f"{ANSWER}.length")]
    fake.pace_s = 0.05
    fake.go.set()
    while not page.evaluate(DONE):
        if (length := page.evaluate(f"{ANSWER}.length")) > lengths[-1]:
            lengths.append(length)
    assert len(lengths) >= 5, lengths
    assert page.inner_text("article.assistant strong") == "short"
    assert page.eval_on_selector_all("article.assistant li", "n => n.map(i => i.textContent)") == ["one", "two"]
    assert page.inner_text("article.assistant pre") == 'print("hello")'
    numbers = page.inner_text("article.assistant .numbers")
    assert f"{len(fake.words)} tokens" in numbers
    assert "tokens/s · first after" in numbers
    assert fake.bodies == [
        {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "Tell me\nmore."}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert page.evaluate("document.title") == "Tell me more."


def test_a_model_without_a_template_continues_a_text(fake: Fake, open_page: Callable[..., Any]) -> None:
    fake.chat, fake.openings, fake.words = False, ["The sea is wide", "In the morning"], [" and", " blue."]
    page = open_page()
    ready(page)
    assert page.inner_text("#empty h2") == "Continue a text."
    assert page.locator("#suggestions button").all_inner_texts() == fake.openings
    page.click("#suggestions button >> nth=0")
    until(page, f"{DONE} && {ANSWER}.trim() === 'and blue.'")
    ask(page, "Then")
    until(page, "document.querySelectorAll('article.assistant:not([aria-busy])').length === 2")
    assert [body["prompt"] for body in fake.bodies] == ["The sea is wide", "The sea is wide and blue.\nThen"]
    assert not any("messages" in body for body in fake.bodies)


def test_a_question_waits_for_stages_that_are_starting(fake: Fake, open_page: Callable[..., Any]) -> None:
    loading = {"layers": [0, 11], "machines": [machine("mini1", state="loading")]}
    fake.tell(ready=False, stages=[loading, {"layers": [12, 29], "machines": [machine("mini2")]}])
    fake.next.append(refuse(503, "the model is not ready", retry_after="60"))  # for a page that does not wait
    page = open_page()
    until(page, "document.querySelector('#notice').textContent.includes('1 of 2 stages ready')")
    ask(page)
    until(page, "document.querySelector('article.assistant[aria-busy=true]') !== null")
    assert fake.bodies == []
    fake.next.clear()
    fake.tell(ready=True, stages=three_stages()["stages"])
    until(page, DONE)
    assert len(fake.bodies) == 1
    fake.tell(ready=False, stages=[loading])
    until(page, "document.querySelector('#status').textContent === 'loading'")
    ask(page, "again")
    page.click("#stop")
    until(page, "document.querySelector('#send').hidden === false")
    assert len(fake.bodies) == 1


def test_stop_keeps_what_has_come_and_frees_the_server(fake: Fake, open_page: Callable[..., Any]) -> None:
    fake.hold_at = 4
    page = open_page()
    for way in ("#stop", "Escape"):
        fake.left = 0
        ask(page, f"stopped by {way}")
        until(page, f"{ANSWER}.startsWith('Here is a short')")
        page.click(way) if way.startswith("#") else page.keyboard.press(way)
        eventually(lambda: fake.left == 1, what="the server hears of it")
        until(page, DONE)
        assert "stopped" in page.inner_text("article.assistant:last-of-type .numbers")
    fake.hold_at = None
    ask(page, "and now?")
    until(page, f"{ANSWER}.includes('That is all')")
    asked = [m["content"][:13] for m in fake.bodies[2]["messages"]]
    assert asked == ["stopped by #s", "Here is a **s", "stopped by Es", "Here is a **s", "and now?"]


def test_retry_and_edit(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page()
    fake.words = ["first"]
    ask(page, "one")
    until(page, DONE)
    fake.words = ["second"]
    page.click("article.assistant .retry")
    until(page, f"{ANSWER} === 'second'")
    assert page.locator("article").count() == 2
    assert fake.bodies[1]["messages"] == fake.bodies[0]["messages"]
    # The last question again, changed: by the arrow, and by its button.
    until(page, DONE)
    page.focus("#question")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#question") == "one"
    assert page.is_visible("#editing")
    page.keyboard.press("Escape")
    assert page.input_value("#question") == ""
    page.click("article.user .edit")
    page.keyboard.type(", two")
    fake.words = ["third"]
    page.keyboard.press("Enter")
    until(page, f"{ANSWER} === 'third'")
    assert [m["content"] for m in fake.bodies[2]["messages"]] == ["one, two"]
    assert page.locator("article").count() == 2
    assert page.is_hidden("#editing")


def test_conversations_are_kept(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page()
    fake.words = ["**an** answer"]
    ask(page, "the first one")
    until(page, DONE)
    page.click("#new")
    assert page.locator("article").count() == 0
    assert page.is_visible("#empty")
    ask(page, "the second one")
    until(page, DONE)
    page.reload()
    entries = "[...document.querySelectorAll('.entry')].map(e => e.textContent)"
    until(page, f'JSON.stringify({entries}) === \'["the second one","the first one"]\'')
    page.click(".entry:text('the first one')")
    assert page.inner_text("article.assistant strong") == "an"
    assert "1 token" in page.inner_text("article.assistant .numbers")
    ask(page, "go on")
    until(page, DONE)
    until(page, "document.querySelectorAll('article').length === 4")
    assert [m["content"] for m in fake.bodies[-1]["messages"]] == ["the first one", "**an** answer", "go on"]
    # Deleting asks once more.
    until(page, f"{entries}[0] === 'the first one'")
    page.hover(".conversations li:first-child")
    page.click(".conversations li:first-child .remove")
    assert page.evaluate(entries) == ["the first one", "the second one"]
    page.click(".conversations li:first-child .remove")
    until(page, f"{entries}.length === 1")
    assert page.locator("article").count() == 0


def test_what_is_kept_is_bounded_and_what_is_damaged_is_passed_over(open_page: Callable[..., Any]) -> None:
    page = open_page()
    found = page.evaluate(
        """async () => {
            const c = await import('/static/conversations.js');
            localStorage.setItem('smolcluster.chat.x', '{"id": 3');
            localStorage.setItem('smolcluster.chat.y', '{"id": "y", "updated": 1, "messages": [{"role": "evil"}, 7]}');
            for (let i = 0; i < 80; i += 1) {
                const content = `${i} ` + 'x'.repeat(i > 70 ? 200000 : 10);
                const one = {...c.create(), updated: 1000 + i, messages: [{role: 'user', content}]};
                if (!c.keep(one)) return 'not kept';
            }
            const size = Object.values(localStorage).reduce((sum, value) => sum + value.length, 0);
            return [c.all().length, c.title(c.all()[0]).slice(0, 2), size < 2100000];
        }"""
    )
    assert found[0] <= 50
    assert found[1:] == ["79", True]
    page.reload()
    page.wait_for_selector(".entry")


def test_settings_reach_the_request(fake: Fake, open_page: Callable[..., Any]) -> None:
    fake.models = ["smollm2", "other"]
    page = open_page()
    ready(page)
    page.click("#open-settings")
    assert page.get_attribute("#set-temperature", "placeholder") == "0.8"  # what /config says
    page.fill("#system", "Answer in rhyme.")
    page.select_option("#model", "other")
    settings = {"temperature": "0.35", "top_p": "0.9", "top_k": "40", "max_tokens": "999999", "seed": "7"}
    for name, value in (settings | {"repetition_penalty": "1.2"}).items():
        page.fill(f"#set-{name}", value)
    page.keyboard.press("Tab")
    ask(page)
    until(page, DONE)
    body = fake.bodies[0]
    assert body.pop("messages") == [
        {"role": "system", "content": "Answer in rhyme."},
        {"role": "user", "content": "hello"},
    ]
    expected = {"model": "other", "temperature": 0.35, "top_p": 0.9, "top_k": 40, "seed": 7, "repetition_penalty": 1.2}
    assert body == expected | {"max_tokens": 2048, "stream": True, "stream_options": {"include_usage": True}}
    page.reload()  # kept
    ready(page)
    assert page.get_attribute("#open-settings", "aria-label") == "Settings, 7 changed"
    page.click("#open-settings")
    assert page.input_value("#set-top_k") == "40"
    slider = page.locator(".field input[type=range]").first
    slider.focus()
    page.keyboard.press("Home")
    assert page.input_value("#set-temperature") == "0"
    page.click("#reset")
    assert page.input_value("#set-temperature") == ""
    assert page.input_value("#system") == ""
    page.keyboard.press("Escape")
    assert page.is_hidden("#settings")
    ask(page)
    until(page, DONE)
    assert set(fake.bodies[1]) == {"model", "messages", "stream", "stream_options"}
    assert len(fake.bodies[1]["messages"]) == 1


def test_keyboard_focus_and_names(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page()
    ready(page)
    page.focus("#theme")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type("a/b")
    assert page.input_value("#question") == "a/b"
    page.keyboard.press("Enter")
    until(page, DONE)
    page.click("#open-settings")
    unnamed = """[...document.querySelectorAll('button, input, select, textarea, a')]
        .filter(n => !(n.textContent.trim() || n.getAttribute('aria-label') || n.closest('label') || n.labels?.length))
        .map(n => n.outerHTML)"""
    assert page.evaluate(unnamed) == []
    assert page.get_attribute("#log", "aria-live") == "polite"
    assert page.inner_text("#said") == "The answer is complete."
    # Every place that the tabulator reaches shows that it is there.
    bare = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen = page.evaluate(
            """() => { const n = document.activeElement; const shown = getComputedStyle(n).outlineStyle !== 'none';
                return [n.id || n.className || n.tagName, shown || n.id === 'question' || n === document.body]; }"""
        )
        if not seen[1]:
            bare.append(seen[0])
    assert bare == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(fake: Fake, open_page: Callable[..., Any], scheme: str) -> None:
    """Text against what is behind it: 4.5 to 1 or more."""
    page = open_page(color_scheme=scheme)
    ready(page)
    fake.words = pieces(STORY + "\n\n> quoted\n\n`code` and [a link](https://example.org)")
    ask(page)
    until(page, DONE)
    page.click("#open-settings")
    fake.tell(stages=[*three_stages()["stages"][:2], {"layers": [23, 29], "machines": [machine("pi5", state="lost")]}])
    page.wait_for_selector(".machine[data-state=lost]")
    weak = page.evaluate(
        """() => {
            const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
            const rgb = (color) => {
                canvas.clearRect(0, 0, 1, 1);
                canvas.fillStyle = color;
                canvas.fillRect(0, 0, 1, 1);
                return canvas.getImageData(0, 0, 1, 1).data;
            };
            const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
            const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => sum + share * linear(c[i] / 255), 0);
            const behind = (node) => {
                const layers = [];
                for (let n = node; n; n = n.parentElement) layers.unshift(rgb(getComputedStyle(n).backgroundColor));
                const mix = (under, over) => [0, 1, 2].map(i => under[i] + (over[i] - under[i]) * over[3] / 255);
                return layers.reduce(mix, [255, 255, 255]);
            };
            const weak = [];
            for (const node of document.querySelectorAll('body *')) {
                const own = [...node.childNodes].some(c => c.nodeType === 3 && c.data.trim());
                if (!own || !node.checkVisibility() || node.closest('.sr, .skip, :disabled')) continue;
                const a = light(rgb(getComputedStyle(node).color)), b = light(behind(node));
                const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
                if (ratio < 4.5) weak.push(`${node.tagName}.${node.className} ${node.textContent.slice(0, 20)} ${ratio}`);
            }
            return weak;
        }"""
    )
    assert weak == []


def test_it_scrolls_along_only_for_whoever_is_at_the_end(fake: Fake, open_page: Callable[..., Any]) -> None:
    fake.words, fake.hold_at = [f"line {i}\n\n" for i in range(80)], 50
    fake.tell(stages=[])
    page = open_page()
    ask(page)
    until(page, f"{ANSWER}.includes('line 49')")
    gap = "(s => s.scrollHeight - s.scrollTop - s.clientHeight)(document.querySelector('#scroller'))"
    until(page, f"{gap} < 5")
    fake.tell(stages=three_stages()["stages"])
    page.wait_for_selector("#strip:not([hidden])")  # it takes its room from the conversation
    until(page, f"{gap} < 5")
    page.hover("#scroller")
    page.mouse.wheel(0, -600)
    until(page, f"{gap} > 300")
    page.wait_for_selector("#to-end:not([hidden])")
    top = page.evaluate("document.querySelector('#scroller').scrollTop")
    fake.go.set()
    until(page, DONE)
    assert page.evaluate("document.querySelector('#scroller').scrollTop") == top
    page.click("#to-end")
    until(page, f"{gap} < 5")


def test_copies(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    ask(page)
    until(page, DONE)
    page.click("article.assistant .code .quiet")
    until(page, "document.querySelector('.code .quiet').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == 'print("hello")'
    page.click("article.assistant .under .quiet:first-child")
    until(page, "document.querySelector('.under .quiet').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == STORY


# When it goes wrong


def test_busy_and_away_are_counted_down(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page()
    fake.next.extend([refuse(429, "as many wait as may", retry_after="1"), refuse(503, "", retry_after="60")])
    ask(page)
    until(page, "document.querySelector('#failure').textContent.startsWith('As many wait as may.')")
    # By itself after a second; then the next refusal, which is retried by hand.
    until(page, "/The model is not ready\\.Next try in \\d+ s/.test(document.querySelector('#failure').textContent)")
    left = "Number(document.querySelector('.count').textContent.match(/\\d+/)[0])"
    first = page.evaluate(left)
    until(page, f"{left} < {first}")
    assert page.locator("article").count() == 1
    page.click("#failure button")
    until(page, f"{ANSWER}.includes('That is all')")
    assert page.is_hidden("#failure")
    assert len(fake.bodies) == 3
    assert fake.bodies[2]["messages"] == fake.bodies[0]["messages"]


def test_an_answer_that_breaks_off(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page()
    fake.next.append(break_off(4))
    ask(page)
    until(page, "document.querySelector('#failure').textContent.includes('The answer broke off')")
    assert page.inner_text("article.assistant .markdown") == "Here is a short"
    assert "broken off" in page.inner_text("article.assistant .numbers")
    fake.next.append(err(2, "the machines of these layers are lost"))
    page.click("#failure button")
    until(page, "document.querySelector('#failure').textContent.includes('The machines of these layers are lost.')")
    page.click("article.assistant .retry")
    until(page, f"{ANSWER}.includes('That is all')")
    assert page.locator("article").count() == 2


def test_a_refusal_is_a_sentence(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page()
    fake.next.append(refuse(400, "the conversation has 9000 tokens; the context is 2048 <b>"))
    ask(page)
    until(page, "document.querySelector('#failure').textContent.includes('context is 2048 <b>.')")
    # It would be refused again, and so would everything after it: it goes back to where it was written.
    assert page.locator("article").count() == 0
    assert page.input_value("#question") == "hello"
    assert page.locator("#failure button").count() == 0
    fake.next.append(refuse(500, ""))
    ask(page, "shorter")
    until(page, "document.querySelector('#failure').textContent.includes('(500)')")
    assert fake.bodies[-1]["messages"] == [{"role": "user", "content": "shorter"}]
    fake.next.append(refuse(500, ""))
    page.click("#failure button")
    until(page, "document.querySelector('#failure').textContent.includes('The server failed to answer (500).')")
    page.keyboard.press("Escape")


def test_the_server_goes_and_comes_back(lone: Any) -> None:
    page = lone
    with serving(Fake()) as fake:
        page.goto(fake.url)
        ready(page)
    until(page, "document.querySelector('#status').textContent === 'reconnecting'")
    ask(page)
    until(page, "document.querySelector('#failure').textContent.includes('The server cannot be reached.')")
    with serving(Fake(), port=int(fake.url.rpartition(":")[2])):
        page.click("#failure button")
        until(page, f"{ANSWER}.includes('That is all')")
        ready(page)


def test_a_key_is_asked_for(fake: Fake, open_page: Callable[..., Any]) -> None:
    fake.key = "a-key-for-the-test"
    page = open_page()
    page.wait_for_selector("#notice input[type=password]")
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#notice').textContent.includes('That is not it')")
    page.fill("#notice input", fake.key)
    page.keyboard.press("Enter")
    ready(page)
    ask(page)
    until(page, DONE)
    page = open_page(f"/#key={fake.key}")  # as the command prints it
    ready(page)
    assert fake.key not in page.url
    page = open_page("/#key=%")  # half of a code: no key at all
    page.wait_for_selector("#notice input[type=password]")
    page.goto(f"{fake.url}/#key={fake.key}")  # the page stays: only what is behind the # is another
    ready(page)
    assert fake.key not in page.url
    assert page.is_hidden("#notice")


def test_a_server_that_is_back_may_have_another_model(lone: Any) -> None:
    page = lone
    with serving(Fake()) as fake:
        page.goto(fake.url)
        ready(page)
        assert page.inner_text("#name") == "smollm2"
    with serving(Fake(models=["other"]), port=int(fake.url.rpartition(":")[2])) as fake:
        until(page, "document.querySelector('#name').textContent === 'other'")
        ask(page)
        until(page, DONE)
        assert fake.bodies[0]["model"] == "other"


def test_a_key_is_for_the_question_that_needed_it(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page()
    ready(page)
    fake.words = ["the first answer"]
    ask(page, "one")
    until(page, DONE)
    page.click("#new")
    fake.key = "a-key-for-the-test"
    ask(page, "two")
    page.wait_for_selector("#notice input[type=password]")
    page.click(".entry:text('one')")
    page.fill("#notice input", fake.key)
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#notice').hidden")
    page.wait_for_timeout(300)
    assert len(fake.bodies) == 1
    assert page.evaluate(ANSWER) == "the first answer"


def test_what_is_refused_while_one_edits_costs_no_other_question(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page()
    fake.words = ["yes"]
    for count, words in enumerate(("one", "two"), start=1):
        ask(page, words)
        until(page, f"document.querySelectorAll('article.assistant:not([aria-busy])').length === {count}")
    page.focus("#question")
    page.keyboard.press("ArrowUp")
    assert page.is_visible("#editing")
    fake.next.append(refuse(400, "too long"))
    page.click("article.assistant:last-of-type .retry")
    until(page, "document.querySelector('#failure').textContent.includes('Too long.')")
    assert page.is_hidden("#editing")
    ask(page, "three")
    until(page, "document.querySelectorAll('article.assistant:not([aria-busy])').length === 2")
    assert [m["content"] for m in fake.bodies[-1]["messages"]] == ["one", "yes", "three"]


# The strip


def test_the_strip_shows_who_holds_what_and_tokens_move_through_it(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page()
    ready(page)
    stages = page.eval_on_selector_all(
        ".stage",
        "n => n.map(s => [s.title, [...s.querySelectorAll('.machine b')].map(b => b.textContent), s.offsetWidth])",
    )
    assert [stage[:2] for stage in stages] == [
        ["layers 0–11", ["mini1", "mini2"]],  # noqa: RUF001 - as it is written
        ["layers 12–22", ["studio"]],  # noqa: RUF001
        ["layers 23–29", ["pi5"]],  # noqa: RUF001
    ]
    assert stages[0][2] > stages[1][2] > stages[2][2]
    assert abs(stages[0][2] / stages[2][2] - 12 / 7) < 0.1
    assert page.inner_text(".spares b") == "laptop"
    fake.pace_s = 0.03
    place = "document.querySelector('.dot')?.getBoundingClientRect().left ?? null"
    ask(page)
    seen = [until(page, place)]
    seen += [until(page, f"(x => x !== null && x !== {seen[0]} ? x : null)({place})")]
    until(page, DONE)
    assert int(page.get_attribute("#strip", "data-tokens")) == len(fake.words)
    until(page, "document.querySelectorAll('.dot').length === 0")  # they do not stay


def test_a_lost_machine_shows_and_fades(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page()
    ready(page)
    state = three_stages()
    state["stages"][2]["machines"] = []
    fake.tell(stages=state["stages"], ready=False)
    page.wait_for_selector(".machine[data-state=lost] b:text('pi5')")
    assert page.inner_text("#status") == "machines missing"
    assert page.inner_text("#notice").startswith("Layers 23–29 of the model are on no machine.")  # noqa: RUF001
    assert page.inner_text("#said") == "pi5 is lost"
    red = page.evaluate("getComputedStyle(document.querySelector('.machine[data-state=lost]')).color")
    assert red == "rgb(194, 42, 42)"
    until(page, "getComputedStyle(document.querySelector('.machine[data-state=lost]')).opacity < 0.9")
    # Its layers go to the spare.
    state["stages"][2]["machines"] = [machine("laptop", state="loading")]
    fake.tell(stages=state["stages"], spares=[])
    until(page, "document.querySelector('#status').textContent === 'loading'")
    state["stages"][2]["machines"] = [machine("laptop")]
    fake.tell(stages=state["stages"], ready=True)
    ready(page)
    assert page.is_hidden("#notice")
    names = "[...document.querySelectorAll('.stage:last-child .machine b')].map(b => b.textContent).join()"
    until(page, f"{names} === 'laptop'")  # after a while the lost one is gone from the page


def test_a_lost_machine_goes_from_a_page_whose_clock_is_behind(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.add_init_script("(now => (Date.now = () => now() - 3600e3))(Date.now)")
    page.reload()
    ready(page)
    fake.tell(lost=[{**machine("pi4", state="lost"), "stage": 2, "at": time.time()}])
    page.wait_for_selector(".machine[data-state=lost] b:text('pi4')")
    until(page, "!document.querySelector('.machine[data-state=lost]')")
    fake.tell(waiting=1)  # the server tells of it for a minute
    until(page, "document.querySelector('#load').textContent.includes('1 waiting')")
    assert page.locator(".machine[data-state=lost]").count() == 0


def test_without_motion_nothing_moves(fake: Fake, open_page: Callable[..., Any]) -> None:
    page = open_page(reduced_motion="reduce")
    ready(page)
    moving = "document.getAnimations().length + document.querySelectorAll('.dot').length"
    fake.hold_at = 0  # the moment before the first token, when a mark waits in the answer's place
    ask(page)
    until(page, "document.querySelector('.assistant[data-live=first] .markdown') !== null")
    moved = [page.evaluate(moving)]
    fake.pace_s = 0.01
    fake.go.set()
    while not page.evaluate(DONE):
        moved.append(page.evaluate(moving))
    assert set(moved) == {0}
    assert int(page.get_attribute("#strip", "data-tokens")) == len(fake.words)


# The service itself


def test_before_the_real_service(lone: Any) -> None:
    """Nothing that the page sends is refused, and what the service sends is understood; with a key, as beyond loopback."""
    key = "a-key-for-the-test"
    page, engine = lone, ScriptedEngine()
    with scripted(engine, place={"key": key}) as port:
        page.goto(f"http://127.0.0.1:{port}/#key={key}")
        ready(page)
        assert page.inner_text("#name") == "tiny"
        page.click("#open-settings")
        for name, value in {"temperature": "0", "top_p": "0.9", "top_k": "40", "max_tokens": "45", "seed": "7"}.items():
            page.fill(f"#set-{name}", value)
        page.fill("#set-repetition_penalty", "1.2")
        page.fill("#system", "Be brief.")
        ask(page)
        until(page, f"{ANSWER} === {json.dumps(SAID.strip())}")
        until(page, DONE)
        assert page.inner_text("article.assistant .numbers").endswith("45 tokens · cut off at the longest answer")
        sampling = engine.asks[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.9, 40, 7)
        assert sampling.repetition_penalty == 1.2
        engine.hold_after = 9
        ask(page)
        until(page, f"{ANSWER} === 'The quick'")
        page.keyboard.press("Escape")
        eventually(lambda: engine.open == 0, what="the engine is free again")
        until(page, DONE)
        engine.hold_after, engine.refuse = None, Unavailable("layers 15 to 29 are on no machine")
        ask(page)
        until(page, "/are on no machine.*Next try in \\d s/.test(document.querySelector('#failure').textContent)")
        engine.refuse, engine.fail = None, (9, Unavailable("the machines are lost"))
        page.click("#failure button")
        until(page, "document.querySelector('#failure').textContent.includes('The machines are lost.')")
        assert page.inner_text("article.assistant:last-of-type .markdown") == "The quick"


# Markdown

DRAW = """async (source) => {
    const { markdown } = await import('/static/markdown.js');
    const node = markdown(source);
    for (const bar of node.querySelectorAll('.codebar')) bar.remove();
    return node.innerHTML;
}"""


@pytest.fixture(scope="module")
def drawing(fake_server: Fake, browser: Any) -> Iterator[Any]:
    """A page to draw on."""
    with lone_page(browser) as page:
        page.goto(fake_server.url)
        yield page


def item(*inside: str) -> str:
    """An item of a tight list: its text, and what lies in it."""
    return f'<li><span class="tight">{inside[0]}</span>{"".join(inside[1:])}</li>'


def code(text: str) -> str:
    return f'<div class="code"><pre tabindex="0"><code>{text}</code></pre></div>'


TABLE = (
    '<div class="wide" tabindex="0" role="group" aria-label="Table"><table>'
    '<thead><tr><th scope="col">a</th><th class="right" scope="col">b</th></tr></thead>'
    '<tbody><tr><td>1</td><td class="right"><code>x|y</code></td></tr>'
    '<tr><td>2</td><td class="right"></td></tr></tbody></table></div>'
)


@pytest.mark.parametrize(
    ("source", "drawn"),
    [
        ("a *b* **c** ***d*** ~~e~~", "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <s>e</s></p>"),
        ("snake_case_word and 2*3*4", "<p>snake_case_word and 2<em>3</em>4</p>"),
        ("**open and *never closed", "<p>**open and *never closed</p>"),
        (r"\*no\* and \\ and \d", r"<p>*no* and \ and \d</p>"),
        ("`a*b*` ``a`b`` `open", "<p><code>a*b*</code> <code>a`b</code> `open</p>"),
        ("one\ntwo  \nthree", "<p>one<br>two<br>three</p>"),
        ("# A #\n## B", '<h3 data-level="1">A</h3><h4 data-level="2">B</h4>'),
        ("###### F\n####### no", '<h6 data-level="6">F</h6><p>####### no</p>'),
        ("#hashtag", "<p>#hashtag</p>"),
        (
            "- a\n- b\n  - c\n    - d\n- e",
            "<ul>"
            + item("a")
            + item("b", "<ul>", item("c", "<ul>", item("d"), "</ul>"), "</ul>")
            + item("e")
            + "</ul>",
        ),
        ("3. a\n4. b", f'<ol start="3">{item("a")}{item("b")}</ol>'),
        ("1. a\n  - b\n2. c", f"<ol>{item('a', '<ul>' + item('b') + '</ul>')}{item('c')}</ol>"),
        ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        ("- a\n\n  more\n\nout", "<ul>" + item("a", '<span class="tight">more</span>') + "</ul><p>out</p>"),
        ("> a\n> > b\nlazy", "<blockquote><p>a</p><blockquote><p>b<br>lazy</p></blockquote></blockquote>"),
        ("a\n\n---\n\n* * *", "<p>a</p><hr><hr>"),
        ("```py\nx = 1\n\n<b>\n```\nafter", code("x = 1\n\n&lt;b&gt;") + "<p>after</p>"),
        ("~~~\n```\n~~~", code("```")),
        ("- a\n  ```\n  x\n  ```\n- b", f"<ul>{item('a', code('x'))}{item('b')}</ul>"),
        ("```\nnever closed\n", code("never closed\n")),
        ("| a | b |\n|---|--:|\n| 1 | `x\\|y` |\n| 2 |", TABLE),
        ("a | b\nc | d", "<p>a | b<br>c | d</p>"),
    ],
)
def test_markdown(drawing: Any, source: str, drawn: str) -> None:
    assert drawing.evaluate(DRAW, source) == drawn


@pytest.mark.parametrize(
    ("source", "address", "words"),
    [
        ("[a *b*](https://example.org/x_(y))", "https://example.org/x_(y)", "a b"),
        ('[t](<https://example.org/a b> "title")', "https://example.org/a%20b", "t"),
        ("see https://example.org/a_b_c.", "https://example.org/a_b_c", "https://example.org/a_b_c"),
        ("(https://example.org/)", "https://example.org/", "https://example.org/"),
        ("<mailto:me@example.org>", "mailto:me@example.org", "mailto:me@example.org"),
        ("![picture](https://example.org/p.png)", "https://example.org/p.png", "picture"),
        ("[`code`](http://x.example)", "http://x.example/", "code"),
    ],
)
def test_links(drawing: Any, source: str, address: str, words: str) -> None:
    links = """async (source) => [...(await import('/static/markdown.js')).markdown(source).querySelectorAll('a')]
        .map(a => [a.href, a.textContent, a.rel, a.target])"""
    assert drawing.evaluate(links, source) == [[address, words, "noopener noreferrer", "_blank"]]


NASTY = [
    "<script>document.title = 'owned'</script>",
    "<img src=x onerror=\"document.title = 'owned'\">",
    "[x](javascript:document.title='owned')",
    "[x](JaVaScRiPt:alert(1)) [y]( java\tscript:alert(1)) [z](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:x) [y](file:///etc/passwd) [z](blob:https://x) [w](//example.org) [v](/login) [u](x.html)",
    "![x](javascript:alert(1)) ![y](data:image/svg+xml,<svg onload=alert(1)>)",
    "<javascript:alert(1)> <https://x.example onclick=alert(1)>",
    '[x](https://example.org" onclick="alert(1))',
    '```<b>" onmouseover=alert(1)\n</code></pre><script>alert(1)</script>\n```',
    "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| <svg onload=alert(1)> | [x](javascript:alert(1)) |",
    "&lt;script&gt; &#x3C;img&#x3E; \u202e \u0000 \ufeff",
    "[a](https://x.example '\"><script>alert(1)</script>')",
]


@pytest.mark.parametrize("source", NASTY)
def test_hostile_text_stays_text(drawing: Any, source: str) -> None:
    found = drawing.evaluate(
        """async (source) => {
            const { markdown } = await import('/static/markdown.js');
            const node = document.body.appendChild(markdown(source));
            await new Promise(done => setTimeout(done));
            const all = [...node.querySelectorAll('*')];
            const result = {
                tags: all.map(n => n.localName),
                listeners: all.flatMap(n => n.getAttributeNames()).filter(n => /^on|^style$|^src/.test(n)),
                addresses: all.filter(n => n.href).map(n => new URL(n.href).protocol),
                title: document.title,
            };
            node.remove();
            return result;
        }""",
        source,
    )
    known = "p br code pre div span button a em strong s table thead tbody tr th td ul ol li blockquote hr"
    assert set(found["tags"]) <= set(known.split())
    assert found["listeners"] == []
    assert set(found["addresses"]) <= {"http:", "https:", "mailto:"}
    assert found["title"] != "owned"


def _everything() -> str:
    return "\n\n".join(
        [
            STORY,
            "1. a\n2. b\n   - c\n\n3. d\n\n10) other",
            "para\n| a | b |\n|-|-x\nnot a table",
            "para\n| a | b |\n|-|-|\n| 1 | 2 |\nafter",
            "> q\n> - x\n>\n> y\nlazy",
            "* * *\n- - x\n***bold***\n---",
            "- a\n\n1",
            "- a\n\n- b\n```\nfence\n\n# no\n````\nstill```\n```\n# yes `x\ny` z",
            "~~~~\nopen [x](https://e.example",
        ]
    )


def test_piece_by_piece_or_at_once_is_the_same(drawing: Any) -> None:
    result = drawing.evaluate(
        """async (source) => {
            const { Markdown, markdown } = await import('/static/markdown.js');
            const html = node => { const copy = node.cloneNode(true); copy.normalize(); return copy.innerHTML; };
            const one = new Markdown();
            const wrong = [];
            for (let end = 1; end <= source.length; end += 1) {
                one.push(source[end - 1]);
                one.draw();
                if (html(one.node) !== html(markdown(source.slice(0, end)))) { wrong.push(source.slice(0, end)); break; }
            }
            for (const size of [2, 3, 7, 31]) {
                const some = new Markdown();
                for (let at = 0; at < source.length; at += size) { some.push(source.slice(at, at + size)); some.draw(); }
                if (html(some.node) !== html(one.node)) wrong.push(size);
            }
            return wrong;
        }""",
        _everything(),
    )
    assert result == []


def test_only_the_last_block_is_drawn_again(drawing: Any) -> None:
    kept = drawing.evaluate(
        """async () => {
            const { Markdown } = await import('/static/markdown.js');
            const one = new Markdown();
            one.push('first\\n\\n```js\\nlet a;\\n'); one.draw();
            const [paragraph, code] = one.node.children;
            const text = code.querySelector('code').firstChild;
            one.push('let b;\\n```\\n\\nlast\\n\\nx'); one.draw();
            const same = one.node.children[0] === paragraph && one.node.children[1] === code;
            return [same, code.querySelector('code').firstChild === text, text.data];
        }"""
    )
    assert kept == [True, True, "let a;\nlet b;"]


HUGE = {
    "words": "word " * 20_000,
    "one word": "x" * 100_000,
    "open fence": "```\n" + "x = 1\n" * 16_000,
    "stars": "*a " * 33_000,
    "nested stars": "*a " * 16_000 + "a* " * 16_000,
    "mixed stars": "**a *b __c " * 9_000,
    "only stars": "*" * 100_000,
    "brackets": "[" * 100_000,
    "open links": "[a](" * 25_000,
    "nested links": "[" * 30_000 + "x" + "](y)" * 15_000,
    "backticks": "".join("`" * (i % 300 + 1) + " " for i in range(660)),
    "quotes": ">" * 100_000,
    "quoted lines": "> " * 50 + "x\n" * 1000 + ">>>>>>>>>>> y\n" * 7_000,
    "deep list": "".join(" " * (2 * i) + "- x\n" for i in range(300)),
    "long list": "- item with *some* words that make it longer\n" * 2_200,
    "table": "|a|b|\n|-|-|\n" + "|one cell of a row|and *another* one|\n" * 2_700,
    "wide table": "|a" * 20_000 + "|\n" + "|-" * 20_000 + "|\n",
    "addresses": "http://" * 14_000,
    "escapes": "\\" * 100_000,
    "spaces": " " * 100_000 + "x",
    "hashes": "#" * 100_000,
    "line ends": "\n" * 100_000 + "x",
    "rule or not": "- " * 50_000 + "x",
    # As long as a paragraph may be to be more than plain text:
    "nested marks": "*a " * 3_200 + "a* " * 3_200,
    "marks of all kinds": "**a *b __c _d ~~e " * 1_000,
    "links that stay open": "[a](" * 4_900,
    "links in links": "[" * 4_000 + "x" + "](https://x.example)" * 700,
    "addresses in a row": "http://" * 2_800,
    "angles": "<http://" * 2_400,
}


@pytest.mark.parametrize("name", HUGE)
def test_a_hundred_kilobytes_of_anything(drawing: Any, name: str) -> None:
    """Drawn and laid out, at once and in pieces, in a time that is not the square of it; never deep; nothing lost but marks."""
    source = HUGE[name]
    took = drawing.evaluate(
        """async (source) => {
            const { Markdown } = await import('/static/markdown.js');
            const one = new Markdown();
            document.body.append(one.node);
            const began = performance.now();
            one.push(source);
            one.draw();
            one.node.getBoundingClientRect();
            const whole = performance.now() - began;
            const letters = one.node.textContent.replace(/[^a-z0-9]/g, '').length;
            one.node.remove();
            const some = new Markdown();
            const size = Math.ceil(source.length / 20);
            const then = performance.now();
            for (let at = 0; at < source.length; at += size) { some.push(source.slice(at, at + size)); some.draw(); }
            const pieces = performance.now() - then;
            let deepest = 0;
            for (const node of some.node.querySelectorAll('*')) {
                let depth = 0;
                for (let n = node; n; n = n.parentElement) depth += 1;
                deepest = Math.max(deepest, depth);
            }
            return {whole, pieces, deepest, letters};
        }""",
        source,
    )
    print(
        f"\n{name}: {took['whole']:.0f} ms at once, {took['pieces']:.0f} ms in twenty pieces, depth {took['deepest']}"
    )
    assert took["whole"] < 6_000
    assert took["pieces"] < 15_000
    assert took["deepest"] < 60
    if name not in ("open fence", "nested links", "links in links", "wide table"):
        assert took["letters"] >= sum(c.isalnum() and c.isascii() for c in source) * 0.99


# How it looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(fake: Fake, open_page: Callable[..., Any], scheme: str) -> None:
    page = open_page(**PHONE, color_scheme=scheme)
    ready(page)
    wide = "word" * 60 + "\n\n| " + " | ".join("column" * 2 for _ in range(9)) + " |\n|" + "---|" * 9
    fake.words = pieces(
        STORY + "\n\n```\n" + "x" * 300 + "\n```\n\n" + wide + "\n\n" + "https://example.org/" + "y" * 200
    )
    state = three_stages()
    state["stages"] = [
        {"layers": [2 * i, 2 * i + 1], "machines": [machine(f"machine-with-a-long-name-{i}")]} for i in range(15)
    ]
    fake.tell(stages=state["stages"])
    ask(page, "z" * 200)
    until(page, DONE)
    for opened in (None, "#menu", "#open-settings"):
        if opened:
            page.click(opened)
        assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
        too_wide = """[...document.querySelectorAll('header, main, .below, #composer, .bubble, .markdown, .code, .wide, aside')]
            .filter(n => n.checkVisibility() && n.getBoundingClientRect().right > innerWidth + 0.5)
            .map(n => n.id || n.className)"""
        assert page.evaluate(too_wide) == []
        if opened:
            page.keyboard.press("Escape")
    # The question stays above the keyboard, which takes the lower half.
    page.set_viewport_size({"width": 360, "height": 380})
    until(page, "document.querySelector('#composer').getBoundingClientRect().bottom <= 380")
    assert page.evaluate("document.querySelector('#scroller').clientHeight") > 60


SHOWN = """A model is a stack of **layers**. Each machine keeps *its own part* of the stack in memory and passes on what it has
computed; only a few kilobytes travel for a token.

1. The first machine turns words into vectors.
2. Those in the middle refine them:
   - attention looks back at the words so far,
   - a small network works on each word alone.
3. The last one chooses the next word.

```python
def forward(tokens, stages):
    x = embed(tokens)
    for stage in stages:  # each on its own machine
        x = stage(x)
    return head(x[-1])
```

| machine | layers | tokens/s |
|---|---|---:|
| mini1 | 0-11 | 41.2 |
| pi5 | 23-29 | 12.9 |

> A chain is as quick as its slowest link.""".replace("has\ncomputed", "has computed")


@pytest.mark.parametrize("name", ["chat", "chat-dark", "chat-phone"])
def test_pictures(fake: Fake, open_page: Callable[..., Any], tmp_path: Path, name: str) -> None:
    """In the middle of an answer, light, dark and on a phone."""
    options: dict[str, Any] = {"viewport": {"width": 1280, "height": 860}, "color_scheme": "light"}
    if name == "chat-dark":
        options["color_scheme"] = "dark"
    if name == "chat-phone":
        options = PHONE | {"viewport": {"width": 390, "height": 800}, "device_scale_factor": 2}
    fake.words, fake.pace_s, fake.hold_at = pieces(SHOWN), 0.02, None
    page = open_page(**options)
    ready(page)
    ask(page, "How does one model run on several machines?")
    until(page, f"{ANSWER}.includes('12.9') && document.querySelectorAll('.dot').length > 2")
    folder = Path(os.environ.get("SMOLCLUSTER_SCREENSHOTS", tmp_path))
    path = folder / f"{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size > 20_000
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(16, 20, 26)" if name == "chat-dark" else "rgb(255, 255, 255)")
    if name == "chat":  # the switch beats the system, and is remembered
        page.click("#theme")
        page.reload()
        ready(page)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 26)"
        assert json.loads(page.evaluate("JSON.stringify(localStorage.getItem('theme'))")) == "dark"
