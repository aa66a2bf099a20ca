"""The choice of a token: against distributions written out by hand, and against transformers' processors."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smolcluster.serve.engine import sampling as sampling_module
from smolcluster.serve.engine.sampling import (
    TokenSampler,
    draw,
    first_beyond,
    likeliest,
    nucleus,
    sample,
    uniform,
    with_logprobs,
)
from smolcluster.serve.engine.types import SamplingParams, Token

VOCAB = 40


def logits(seed: int, size: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def expected(values: torch.Tensor, sampling: SamplingParams, prompt: list[int], generated: list[int]) -> list[float]:
    """The distribution, written out one token at a time."""
    scores = [float(value) for value in values]
    for token in set(prompt + generated):
        s, penalty = scores[token], sampling.repetition_penalty
        scores[token] = s / penalty if s > 0 else s * penalty
    for token, times in Counter(generated).items():
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if sampling.top_k is not None:
        order = order[: sampling.top_k]
    weights = {token: math.exp((scores[token] - max(scores)) / sampling.temperature) for token in order}
    total = sum(weights.values())
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += weights[token] / total
        if mass >= sampling.top_p:
            break
    share = sum(weights[token] for token in kept)
    return [weights[token] / share if token in kept else 0.0 for token in range(len(scores))]


SAMPLINGS = {
    "as it is": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=3.0),
    "top-k": SamplingParams(top_k=5),
    "top-p": SamplingParams(top_p=0.6),
    "penalties": SamplingParams(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.4),
    "all": SamplingParams(
        temperature=1.4, top_k=12, top_p=0.8, repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=0.3
    ),
    "all the vocabulary": SamplingParams(top_k=10 * VOCAB, top_p=0.999),
}
PROMPT, GENERATED = [3, 9, 9, 17, 30], [4, 9, 4, 4, 21]


# ---- the distribution


@pytest.mark.parametrize("name", SAMPLINGS)
def test_draws_follow_the_distribution_exactly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse of the summed distribution: u just below and at each edge gives the token of that side."""
    sampler, values = TokenSampler(SAMPLINGS[name], PROMPT, GENERATED), logits(1)
    probabilities = expected(values, SAMPLINGS[name], PROMPT, GENERATED)
    low = 0.0
    for token, probability in enumerate(probabilities):
        if probability > 1e-6:
            for inside in (
                low + 1e-7 * probability + 1e-9,
                low + probability / 2,
                low + probability * (1 - 1e-6) - 1e-9,
            ):
                monkeypatch.setattr(sampling_module, "uniform", lambda *_, u=inside: u)
                assert sampler.choose(values).token == token
        low += probability
    assert low == pytest.approx(1.0)


@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.05, 5.0),
    top_k=st.none() | st.integers(1, 300),
    top_p=st.floats(0.01, 1.0),
    repetition=st.floats(0.5, 2.0),
    prompt=st.lists(st.integers(0, 199), max_size=30),
)
def test_the_tokens_that_may_come_are_those_of_transformers(
    seed: int, temperature: float, top_k: int | None, top_p: float, repetition: float, prompt: list[int]
) -> None:
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    values = logits(seed, 200).double()  # so that no rounding of theirs moves an edge
    oracle = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(repetition), TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        oracle.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        oracle.append(TopPLogitsWarper(top_p))
    theirs = oracle(torch.tensor([prompt], dtype=torch.int64), values[None])[0].softmax(-1)
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition, seed=seed
    )
    edges = theirs.cumsum(-1)
    u = uniform(seed, len(prompt))
    if (edges - u).abs().min() > 1e-9:
        want = int(torch.searchsorted(edges, torch.tensor(u, dtype=torch.float64), right=True))
        assert TokenSampler(sampling, prompt).choose(values).token == want
    ours = expected(values, sampling, prompt, [])
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs, rtol=1e-6, atol=1e-9)


@given(size=st.integers(1, 2000), seed=st.integers(0, 99), u=st.floats(0, 1, exclude_max=True))
def test_in_blocks_the_sums_are_exceeded_at_the_same_place(size: int, seed: int, u: float) -> None:
    """Small whole numbers, many of them 0: every sum is exact."""
    weights = np.random.default_rng(seed).integers(0, 3, size).astype(np.float64)
    weights[-1 if seed % 2 else 0] = 1
    sums = weights.cumsum()
    place = first_beyond(weights, u)
    assert place == int(np.searchsorted(sums, u * sums[-1], side="right"))
    assert weights[place] > 0
    assert first_beyond(weights, 1.0) == np.flatnonzero(weights)[-1]


def test_a_large_vocabulary_of_equal_tokens_is_cut_to_the_size_asked() -> None:
    flat = np.zeros(20_000)
    assert likeliest(flat, 3).tolist() == [0, 1, 2]
    assert nucleus(np.ones(20_000), 0.01).tolist() == list(range(200))
    assert nucleus(np.ones(20_000), 0.5).tolist() == list(range(10_000))
    assert len(nucleus(np.ones(20_000), 1.0 - 1e-12)) == 20_000
    assert nucleus(np.array([0.1, 0.6, 0.3]), 0.0).tolist() == [1]


@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=40), count=st.integers(1, 45))
def test_the_likeliest_are_found_ties_by_id(values: list[int], count: int) -> None:
    order = sorted(range(len(values)), key=lambda at: (-values[at], at))
    assert likeliest(np.array(values, np.float32), count).tolist() == sorted(order[:count])


@given(values=st.lists(st.integers(0, 4), min_size=1, max_size=60).filter(any), share=st.integers(0, 64))
def test_the_nucleus_is_the_smallest_that_has_its_share(values: list[int], share: int) -> None:
    order = sorted(range(len(values)), key=lambda at: (-values[at], at))
    wanted, kept, mass = Fraction(share, 64) * sum(values), [], 0
    for at in order:
        kept.append(at)
        mass += values[at]
        if mass >= wanted:
            break
    assert nucleus(np.array(values, np.float64), share / 64).tolist() == sorted(kept)


# ---- greedy


def test_temperature_zero_takes_the_likeliest_after_penalties_and_the_lowest_id_among_equals() -> None:
    values = torch.tensor([1.0, 3.0, 2.9, 3.0])
    cold = SamplingParams(temperature=0, top_k=2, top_p=0.1)
    assert TokenSampler(cold, [0]).choose(values) == Token(token=1)
    assert TokenSampler(SamplingParams(temperature=0, repetition_penalty=1.5), [1]).choose(values).token == 3
    assert TokenSampler(SamplingParams(temperature=0, presence_penalty=0.2), [1], [3, 1]).choose(values).token == 2
    # A token of the prompt was not generated.
    assert TokenSampler(SamplingParams(temperature=0, presence_penalty=0.2), [1, 1], [3]).choose(values).token == 1
    assert TokenSampler(SamplingParams(temperature=0, frequency_penalty=0.08), [0], [1, 1, 3]).choose(values).token == 3


def test_top_k_of_one_and_next_to_no_temperature_are_greedy() -> None:
    values = torch.tensor([1.0, 3.0, 2.0, 3.0])
    for seed in range(20):
        assert TokenSampler(SamplingParams(top_k=1, seed=seed), [0]).choose(values).token == 1
        assert TokenSampler(SamplingParams(temperature=5e-324, seed=seed), [0]).choose(values[:3]).token == 1
        assert TokenSampler(SamplingParams(top_p=0.0, seed=seed), [0]).choose(values).token == 1


def test_accepted_tokens_count_as_generated() -> None:
    sampling = SamplingParams(
        temperature=1.3, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, seed=8
    )
    grown, made = TokenSampler(sampling, PROMPT), TokenSampler(sampling, PROMPT, GENERATED)
    for token in GENERATED:
        grown.accept(token)
    assert grown.position == made.position == 10
    values = logits(5)
    assert np.array_equal(grown._penalise(values.numpy()), made._penalise(values.numpy()))
    assert grown.choose(values) == made.choose(values)


def test_choosing_leaves_the_logits_and_the_sequence_alone() -> None:
    for sampling in SAMPLINGS.values():
        values = logits(5)
        chooser = TokenSampler(sampling, PROMPT, GENERATED)
        first = chooser.choose(values)
        assert torch.equal(values, logits(5))
        assert chooser.choose(values) == first


# ---- repeatable


def test_uniform_is_a_function_of_seed_and_position() -> None:
    # Written down: another machine, another version must give the same.
    golden = {
        (0, 0): 0.5471618281007388,
        (0, 1): 0.21953134855538103,
        (1, 0): 0.5692312961489808,
        (9223372036854775808, 1000000): 0.6629489304179533,
        (-5, 77): 0.8869994960289933,
    }
    assert {pair: uniform(*pair) for pair in golden} == golden
    many = np.array([uniform(seed, position) for seed in range(60) for position in range(60)])
    assert len(set(many)) == 3600
    assert many.min() >= 0
    assert many.max() < 1
    assert np.histogram(many, 10, (0, 1))[0] == pytest.approx([360] * 10, abs=80)


def test_sampling_continues_identically_on_another_machine() -> None:
    """After a failure all that is known are the tokens. Rounding of the logits elsewhere changes nothing here."""
    sampling = SamplingParams(temperature=1.1, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.1, seed=4)

    def goes_on(chooser: TokenSampler, steps: range, noise: float) -> list[int]:
        chosen = []
        for step in steps:
            token = chooser.choose(logits(step) + noise * logits(1000 + step)).token
            chooser.accept(token)
            chosen.append(token)
        return chosen

    all_ = goes_on(TokenSampler(sampling, PROMPT), range(60), 0.0)
    assert len(set(all_)) > 10
    for lost_at in (1, 17, 59):
        assert goes_on(TokenSampler(sampling, PROMPT, all_[:lost_at]), range(lost_at, 60), 1e-6) == all_[lost_at:]
    other = goes_on(TokenSampler(SamplingParams(temperature=1.1, seed=5), PROMPT), range(60), 0.0)
    assert other != all_


def test_a_batch_gives_what_each_gives_alone() -> None:
    choosers = [TokenSampler(sampling, PROMPT, GENERATED) for sampling in SAMPLINGS.values()]
    choosers += [TokenSampler(SamplingParams(temperature=0), PROMPT), TokenSampler(SamplingParams(logprobs=2), PROMPT)]
    batch = torch.stack([logits(i) for i in range(len(choosers))])
    alone = [chooser.choose(line) for chooser, line in zip(choosers, batch, strict=True)]
    assert sample(choosers, batch) == alone
    assert sample(choosers[::-1], batch.flip(0)) == alone[::-1]
    assert sample([], batch[:0]) == []


# ---- log probabilities


def test_logprobs_are_of_the_unmodified_logits() -> None:
    values = logits(3)
    exact = values.double().log_softmax(-1)
    sampling = SamplingParams(temperature=0.2, top_k=3, repetition_penalty=1.9, presence_penalty=1.0, logprobs=4)
    token = TokenSampler(sampling, PROMPT, GENERATED).choose(values)
    assert token.logprob == pytest.approx(exact[token.token].item(), abs=1e-12)
    likely = exact.topk(4)
    assert [one for one, _ in token.top] == likely.indices.tolist()
    assert [logprob for _, logprob in token.top] == pytest.approx(likely.values.tolist(), abs=1e-12)
    bare = TokenSampler(SamplingParams(temperature=0, logprobs=0), []).choose(values)
    assert (bare.token, bare.top) == (likely.indices[0].item(), ())
    assert bare.logprob == pytest.approx(likely.values[0].item(), abs=1e-12)
    assert len(TokenSampler(SamplingParams(logprobs=10 * VOCAB), []).choose(values).top) == VOCAB
    ties = TokenSampler(SamplingParams(logprobs=3), []).choose(torch.tensor([1.0, 2.0, 1.0, 1.0]))
    assert [one for one, _ in ties.top] == [1, 0, 2]


# ---- damage


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=2, logprobs=1)]
)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(sampling: SamplingParams, wrong: float) -> None:
    values = logits(0)
    values[7] = wrong
    chooser = TokenSampler(sampling, [1])
    with pytest.raises(ValueError, match=f"the largest logit is {wrong}"):
        chooser.choose(values)
    with pytest.raises(ValueError, match="the largest logit is"):
        sample([chooser, chooser], torch.stack((logits(0), values)))
    with pytest.raises(ValueError, match="the largest logit is -inf"):
        chooser.choose(torch.full((9,), -math.inf))


def test_impossible_tokens_are_never_drawn() -> None:
    values = torch.full((50,), -math.inf)
    values[20] = 1.0
    values[31] = 0.0
    chosen = {TokenSampler(SamplingParams(seed=seed), []).choose(values).token for seed in range(50)}
    assert chosen == {20, 31}
    assert draw(values.numpy(), 1.0, SamplingParams()) == 31  # beyond the last edge: still one that can be


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_type_are_taken(dtype: torch.dtype) -> None:
    values = logits(0).to(dtype)
    assert TokenSampler(SamplingParams(temperature=0), []).choose(values).token == values.argmax()
    assert sample([TokenSampler(SamplingParams(seed=3), [])], values[None])[0] == TokenSampler(
        SamplingParams(seed=3), []
    ).choose(values.double())


def test_logprobs_of_impossible_tokens_are_finite() -> None:
    """JSON has no infinity, and what a stage cannot say it would never answer."""
    token = with_logprobs(1, np.array([0.0, -np.inf, -np.inf], np.float32), 3)
    assert token == Token(token=1, logprob=-9999.0, top=((0, 0.0), (1, -9999.0), (2, -9999.0)))
