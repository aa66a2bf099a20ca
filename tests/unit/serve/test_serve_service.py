"""The service without HTTP: what is checked, what is asked of the engine, what becomes of its tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scripted_engine import END, SAID, ScriptedEngine, service_of

from smolcluster.serve.engine.types import Busy, SamplingParams, SequenceRequest, Token, Unavailable
from smolcluster.serve.http.service import BadRequest, CompletionRequest, Service, TextChunk

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


def says(text: str, *, end: bool = True) -> ScriptedEngine:
    """An engine that says this, and then its end."""
    return ScriptedEngine(lambda ask: [*text.encode(), *([END] if end else [])][: ask.max_tokens + 1])


async def answer(service: Service, **fields: Any) -> SimpleNamespace:
    job = await service.prepare(CompletionRequest(**{"prompts": ["hello"], **fields}))
    return SimpleNamespace(choices=await service.complete(job), usage=job.usage)


async def pieces(service: Service, **fields: Any) -> list[TextChunk]:
    job = await service.prepare(CompletionRequest(**{"prompts": ["hello"], **fields}))
    return [piece async for piece in service.stream(job)]


# What comes back


def test_a_stop_token_ends_the_answer() -> None:
    engine = says("well, hello")
    found = run(answer(service_of(engine)))
    (choice,) = found.choices
    assert (choice.text, choice.finish) == ("well, hello", "stop")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 11)
    assert choice.timing.first_token_s is not None
    assert choice.timing.first_token_s >= 0
    assert engine.open == 0


def test_the_context_limits_max_tokens() -> None:
    engine = ScriptedEngine(context=20)
    found = run(answer(service_of(engine), temperature=0, max_tokens=20))
    assert engine.asks[0].max_tokens == 15
    assert (found.choices[0].text, found.choices[0].finish) == (SAID[:15], "length")


@pytest.mark.parametrize(("context", "most", "expected"), [(100, 1024, 95), (100, 10, 10)])
def test_the_default_of_max_tokens(context: int, most: int, expected: int) -> None:
    engine = ScriptedEngine(context=context)
    run(answer(service_of(engine, max_tokens=most)))
    assert engine.asks[0].max_tokens == expected


def test_a_stop_string_frees_the_sequence_before_the_last_chunk() -> None:
    engine = says("one two three four", end=False)

    async def look() -> list[tuple[str, str | None, int]]:
        service = service_of(engine)
        job = await service.prepare(CompletionRequest(prompts=["x"], stop=["three", "fo"], max_tokens=18))
        return [(piece.text, piece.finish, engine.open) async for piece in service.stream(job)]

    found = run(look())
    assert "".join(text for text, _, _ in found) == "one two "
    assert found[-1] == ("", "stop", 0)
    assert all(finish is None for _, finish, _ in found[:-1])


def test_an_incomplete_stop_string_is_part_of_the_answer() -> None:
    found = run(answer(service_of(says("one two thr")), stop=["three"]))
    assert (found.choices[0].text, found.choices[0].finish) == ("one two thr", "stop")
    found = run(answer(service_of(says("one two thr", end=False)), stop=["three"], max_tokens=11))
    assert (found.choices[0].text, found.choices[0].finish) == ("one two thr", "length")


def test_multi_byte_characters_are_sent_whole() -> None:
    said = "naïve 🦊 fin"
    found = run(pieces(service_of(says(said))))
    assert "".join(piece.text for piece in found) == said
    assert "�" not in "".join(piece.text for piece in found)
    cut = run(answer(service_of(says("🦊", end=False)), max_tokens=3))
    assert cut.choices[0].text == "�"
    assert cut.usage.completion_tokens == 3


def test_the_leading_space_is_dropped_in_chats_only() -> None:
    engine = says(" there")
    assert run(answer(service_of(engine))).choices[0].text == " there"
    chat = {"prompts": None, "messages": [{"role": "user", "content": "hi"}]}
    assert run(answer(service_of(engine), **chat)).choices[0].text == "there"


def test_a_model_that_ends_at_once() -> None:
    found = run(answer(service_of(says(""))))
    assert (found.choices[0].text, found.choices[0].finish, found.usage.completion_tokens) == ("", "stop", 0)
    assert found.choices[0].timing.first_token_s is None


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_text_up_to_the_first_stop_string(said: str, stop: list[str]) -> None:
    tokens = said.encode()
    engine = ScriptedEngine(lambda _: [*tokens, END])
    found = run(pieces(service_of(engine), stop=stop, logprobs=2))
    ends = [(at + len(s), at) for s in stop if (at := said.find(s)) >= 0]
    cut = min(ends)[1] if ends else len(said)  # the first that is whole
    assert "".join(piece.text for piece in found) == said[:cut]
    told = [token for piece in found for token in piece.logprobs]
    spelled = b"".join(token.token for token in told)
    assert spelled.startswith(said[:cut].encode())  # a token that is cut in two is told whole
    if cut == len(said):
        assert spelled == said.encode()
    assert [token.offset for token in told] == sorted(token.offset for token in told)


def test_logprobs_wait_for_their_text() -> None:
    found = run(pieces(service_of(says("ab##c", end=False)), stop=["##"], logprobs=1, max_tokens=5))
    assert [(piece.text, [t.token for t in piece.logprobs]) for piece in found] == [
        ("a", [b"a"]),
        ("b", [b"b"]),
        ("", []),
    ]
    (only,) = found[0].logprobs
    assert (only.logprob, only.top, only.offset) == (-0.5, ((b"a", -0.5),), 0)


# What is asked of the engine


def test_choices_are_what_their_seeds_alone_give() -> None:
    together = run(answer(service_of(ScriptedEngine()), n=3, seed=41, max_tokens=8))
    alone = [run(answer(service_of(ScriptedEngine()), seed=41 + j, max_tokens=8)).choices[0].text for j in range(3)]
    assert [choice.text for choice in together.choices] == alone
    assert len(set(alone)) == 3
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (5, 24)


def test_each_prompt_is_a_sequence() -> None:
    engine = ScriptedEngine()
    found = run(answer(service_of(engine), prompts=["a", [98, 99]], n=2, seed=7, max_tokens=4))
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert sorted(ask.tokens for ask in engine.asks) == [(97,), (97,), (98, 99), (98, 99)]
    assert found.choices[0].text == found.choices[2].text  # the same seed
    assert found.usage.prompt_tokens == 3


def test_without_a_seed_one_is_drawn_and_reported() -> None:
    async def seeds() -> set[int]:
        service = service_of(ScriptedEngine())
        jobs = [await service.prepare(CompletionRequest(prompts=["x"])) for _ in range(8)]
        assert all(job.seed == job.sequences[0].sampling.seed for job in jobs)
        return {job.seed for job in jobs}

    assert len(run(seeds())) > 1


def test_sampling_of_the_request_overrides_the_servers() -> None:
    engine = ScriptedEngine()
    service = service_of(engine)
    service.defaults = SamplingParams(temperature=0.7, top_p=0.9)
    run(answer(service, top_p=0.5, top_k=40, repetition_penalty=1.1, presence_penalty=1, frequency_penalty=-1, seed=-1))
    sampling = engine.asks[0].sampling
    assert sampling == SamplingParams(
        temperature=0.7,
        top_p=0.5,
        top_k=40,
        repetition_penalty=1.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        seed=2**63 - 1,
    )
    for everything in (0, -1, 258, 10**30):
        run(answer(service, top_k=everything))
        assert engine.asks[-1].sampling.top_k is None
    run(answer(service, top_p=0.0))
    assert 0 < engine.asks[-1].sampling.top_p < 1e-6  # the most likely alone
    assert engine.asks[0].stop_tokens == frozenset({END})


def test_a_long_prompt_is_tokenized() -> None:
    engine = ScriptedEngine(context=10_000)
    run(answer(service_of(engine), prompts=["é" * 3000], max_tokens=1))
    assert len(engine.asks[0].tokens) == 6000


# What is wrong


def test_a_prompt_beyond_the_context() -> None:
    with pytest.raises(BadRequest, match="600 tokens; the model's context is 512") as caught:
        run(answer(service_of(ScriptedEngine()), prompts=["x" * 600]))
    assert caught.value.code == "context_length_exceeded"


def test_machines_with_little_memory_limit_the_context() -> None:
    engine = ScriptedEngine()
    engine.context = 100  # of 512
    run(answer(service_of(engine), prompts=["x" * 60], max_tokens=500))
    assert [asked.max_tokens for asked in engine.asks] == [40]
    with pytest.raises(BadRequest, match="200 tokens; the connected machines have memory for 100"):
        run(answer(service_of(engine), prompts=["x" * 200]))
    with pytest.raises(BadRequest, match="max_tokens is 513; it must be 1 to 512"):
        run(answer(service_of(engine), max_tokens=513))


# Who comes, waits and leaves


def test_the_number_of_sequences_is_limited() -> None:
    async def story() -> None:
        engine = ScriptedEngine()
        engine.hold_after = 1
        service = service_of(engine, sequences=3)
        job = await service.prepare(CompletionRequest(prompts=["x"], n=2))
        async with contextlib.aclosing(service.stream(job)) as stream:
            await anext(stream)
            assert service.sequences == 2
            await service.prepare(CompletionRequest(prompts=["x"]))
            with pytest.raises(Busy):
                await service.prepare(CompletionRequest(prompts=["x"], n=2))
            other = await service.prepare(CompletionRequest(prompts=["x"]))
            async with contextlib.aclosing(service.stream(other)) as second:
                await anext(second)
                with pytest.raises(Busy):
                    await anext(service.stream(other))
        assert (service.sequences, engine.open) == (0, 0)

    run(story())


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_a_stream_that_is_closed_or_cancelled_frees_the_engine_at_once(n: int, cancel: bool) -> None:
    async def story() -> None:
        engine = ScriptedEngine()
        engine.hold_after = 2
        service = service_of(engine)
        job = await service.prepare(CompletionRequest(prompts=["x"], n=n))
        if cancel:
            working = asyncio.create_task(service.complete(job))
            await asyncio.to_thread(engine.begun.acquire)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        else:
            stream = service.stream(job)
            await anext(stream)
            await stream.aclose()
        assert (engine.open, service.sequences) == (0, 0)

    run(story())


@pytest.mark.parametrize("n", [1, 4])
def test_a_failed_choice_ends_the_others(n: int) -> None:
    async def story() -> None:
        engine = ScriptedEngine()
        engine.fail = (3, Unavailable("pi5 is lost"))
        service = service_of(engine)
        with pytest.raises(Unavailable, match="pi5"):
            await answer(service, n=n)
        assert (engine.open, service.sequences) == (0, 0)

    run(story())


def test_a_slow_reader_applies_backpressure() -> None:
    """Of several choices: each waits until its piece was taken."""

    async def story() -> None:
        told: list[int] = []

        class Counting(ScriptedEngine):
            def _told(self, token: int, ask: SequenceRequest, *, last: bool) -> Token:
                told.append(token)
                return super()._told(token, ask, last=last)

        engine = Counting(context=100_000)
        service = service_of(engine, max_tokens=50_000)
        async with contextlib.aclosing(
            service.stream(await service.prepare(CompletionRequest(prompts=["x"], n=4)))
        ) as stream:
            await anext(stream)
            for _ in range(200):
                await asyncio.sleep(0)
            assert len(told) < 20

    run(story())


def test_refused_prompts_are_not_counted() -> None:
    """Clients ask again and again while there is nobody."""
    engine = says("four", end=False)
    service = service_of(engine)
    engine.refuse = Unavailable("nobody is there")
    with pytest.raises(Unavailable):
        run(answer(service, max_tokens=4))
    assert service.metrics.prompt_tokens == 0
