"""One machine's share of a model: any split, any chunks, any company give the logits of the whole."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from smolcluster.models import GPT, GPTConfig, Qwen3Config
from smolcluster.models import ragged as ragged_module
from smolcluster.serve.engine.stage_model import STEP, Row, StageModel, cache_bytes_per_token, cache_capacity

VOCAB, CONTEXT, LAYERS = 61, 150, 4
GPT2 = GPTConfig(vocab_size=VOCAB, model_dim=48, num_layers=LAYERS, num_heads=4, max_seq_len=CONTEXT)
LLAMA = GPTConfig.llama(
    vocab_size=VOCAB, model_dim=48, num_layers=LAYERS, num_heads=6, num_kv_heads=2, ff_dim=80, max_seq_len=CONTEXT
)
QWEN2 = replace(LLAMA, qkv_bias=True, tie_head=False, rope_theta=1e6)
QWEN3 = Qwen3Config(
    vocab_size=VOCAB, model_dim=48, num_layers=LAYERS, num_heads=6, num_kv_heads=2, head_dim=12, max_seq_len=CONTEXT
)
SHAPES = {"gpt2": GPT2, "llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
SPLITS = [(4,), (1, 3), (2, 1, 1), (1, 1, 1, 1)]
CPU = torch.device("cpu")

# The sums are the same in another order. fp64: rounding only. fp32: four layers of sums over 48 to 192 numbers of size 1.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sums this small are not worth sharing out, and on a busy machine cores wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(config: GPTConfig, dtype: torch.dtype) -> GPT:
    """Every parameter away from its initial value, so that no term vanishes."""
    torch.manual_seed(0)
    model = GPT(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


MODELS = {(shape, dtype): make(config, dtype) for shape, config in SHAPES.items() for dtype in TOLERANCE}


def parts_of(model: GPT, split: Sequence[int] = (4,), dtype: torch.dtype = torch.float64) -> list[StageModel]:
    weights, start, parts = model.state_dict(), 0, []
    for count in split:
        layers = range(start, start + count)
        first, last = start == 0, layers.stop == LAYERS
        parts.append(StageModel(model.config, layers, first=first, last=last, weights=weights, device=CPU, dtype=dtype))
        start += count
    return parts


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def through(parts: Sequence[StageModel], rows: Sequence[Row], x: Tensor) -> Tensor:
    for part in parts:
        x = part.run(rows, x)
    return x


def one(sequence: int, start: int, count: int, *, logits: bool = True) -> Row:
    return Row(sequence=sequence, start=start, count=count, logits=logits)


def cache_bytes(part: StageModel) -> int:
    """What the caches take now, room to grow included."""
    return sum(cache.kv.nbytes for cache in part._caches.values())


def whole(model: GPT, sequence: Tensor) -> Tensor:
    with torch.no_grad():
        return model(sequence[None])[0]


# ---- the same logits


@given(
    shape=st.sampled_from(list(SHAPES)),
    dtype=st.sampled_from(list(TOLERANCE)),
    split=st.sampled_from(SPLITS),
    lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=4),
    longest=st.sampled_from([1, 3, 40, CONTEXT]),
    order=st.randoms(use_true_random=False),
)
def test_any_split_any_chunks_and_any_company_give_the_logits_of_the_whole(
    shape: str, dtype: torch.dtype, split: tuple[int, ...], lengths: list[int], longest: int, order: random.Random
) -> None:
    model = MODELS[shape, dtype]
    parts = parts_of(model, split, dtype)
    sequences = {10 * i + 7: tokens(length, seed=i) for i, length in enumerate(lengths)}
    if longest < 40:
        sequences = {name: sequence[: 15 * longest] for name, sequence in sequences.items()}
    expected = {name: whole(model, sequence) for name, sequence in sequences.items()}
    done = dict.fromkeys(sequences, 0)
    while open_ := [name for name in sequences if done[name] < len(sequences[name])]:
        company = order.sample(open_, order.randint(1, len(open_)))
        counts = [min(order.randint(1, longest), len(sequences[name]) - done[name]) for name in company]
        rows = [
            one(name, done[name], count, logits=order.random() < 0.7)
            for name, count in zip(company, counts, strict=True)
        ]
        x = torch.cat([sequences[row.sequence][row.start : row.end] for row in rows])
        logits = through(parts, rows, x)
        asked = [row for row in rows if row.logits]
        assert logits.shape == (len(asked), VOCAB)
        for row, line in zip(asked, logits, strict=True):
            torch.testing.assert_close(
                line, expected[row.sequence][row.end - 1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )
        done |= {row.sequence: row.end for row in rows}
        held = {name: length for name, length in done.items() if length}
        assert all(part.lengths() == held for part in parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision_is_as_near_as_the_model_itself(shape: str, dtype: torch.dtype) -> None:
    exact = MODELS[shape, torch.float64]
    half = make(SHAPES[shape], torch.float64).to(dtype)
    sequence = tokens(40)
    want = whole(exact, sequence)[-1]
    allowed = 2 * (whole(half, sequence)[-1].double() - want).abs().max() + 1e-3
    parts = parts_of(exact, (2, 2), dtype)
    through(parts, [one(1, 0, 30, logits=False)], sequence[:30])
    through(parts, [one(1, 30, 9, logits=False)], sequence[30:39])
    logits = through(parts, [one(1, 39, 1)], sequence[39:])
    assert logits.dtype == torch.float32
    assert (logits[0].double() - want).abs().max() <= allowed
    assert cache_bytes(parts[0]) == 2 * STEP * cache_bytes_per_token(SHAPES[shape], dtype)


def test_between_parts_activations_may_come_in_another_type() -> None:
    model = MODELS["llama", torch.float32]
    first, last = parts_of(model, (1, 3), torch.float32)
    sequence = tokens(12)
    logits = last.run([one(1, 0, 12)], first.run([one(1, 0, 12)], sequence).half())
    torch.testing.assert_close(logits[0], whole(model, sequence)[-1], rtol=0.02, atol=0.02)


# ---- going back, forgetting


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_may_cut_its_cache(shape: str) -> None:
    model = MODELS[shape, torch.float64]
    parts = parts_of(model, (2, 2))
    old, new = tokens(90, seed=1), tokens(90, seed=2)
    through(parts, [one(1, 0, 90), one(2, 0, 5)], torch.cat((old, tokens(5))))
    for start, count in ((60, 20), (80, 1), (30, 60), (0, 7)):
        mixed = torch.cat((old[:start], new[start : start + count]))
        logits = through(parts, [one(1, start, count)], mixed[start:])
        torch.testing.assert_close(logits[0], whole(model, mixed)[-1], rtol=1e-11, atol=1e-11)
        assert [part.lengths() for part in parts] == [{1: start + count, 2: 5}] * 2
        old = mixed


def test_forgetting_frees_at_once() -> None:
    (part,) = parts_of(MODELS["llama", torch.float64])
    assert cache_bytes(part) == 0
    part.run([one(1, 0, 3), one(2, 0, 100)], tokens(103))
    per_token = LAYERS * cache_bytes_per_token(LLAMA, torch.float64)
    assert per_token == LAYERS * 2 * 2 * 8 * 8
    assert cache_bytes(part) == (STEP + 2 * STEP) * per_token
    held = weakref.ref(part._caches[2].kv)
    part.forget(2)
    part.forget(2)
    part.forget(99)
    gc.collect()
    assert held() is None
    assert (cache_bytes(part), part.lengths()) == (STEP * per_token, {1: 3})
    with pytest.raises(ValueError, match="send them again"):
        part.run([one(2, 100, 1)], tokens(1))


def test_a_cache_grows_by_a_quarter_in_steps_up_to_the_context() -> None:
    assert cache_capacity(1, room=0, limit=1000) == STEP
    assert cache_capacity(STEP, room=STEP, limit=1000) == STEP
    assert cache_capacity(STEP + 1, room=STEP, limit=1000) == 2 * STEP
    assert cache_capacity(641, room=640, limit=1000) == 832
    assert cache_capacity(960, room=900, limit=1000) == 1000
    assert cache_capacity(10, room=0, limit=20) == 20
    copied = room = 0
    for length in range(1, 100_000):
        larger = cache_capacity(length, room=room, limit=10**9)
        copied += room if larger > room else 0
        room = larger
    assert room <= 1.25 * 100_000 + STEP
    assert copied <= 5 * room


def test_a_sequence_fills_the_context_to_the_last_token() -> None:
    model = MODELS["gpt2", torch.float64]
    (part,) = parts_of(model)
    sequence = tokens(CONTEXT)
    part.run([one(1, 0, CONTEXT - 1)], sequence[:-1])
    logits = part.run([one(1, CONTEXT - 1, 1)], sequence[-1:])
    torch.testing.assert_close(logits[0], whole(model, sequence)[-1], rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match=f"sequence 1: {CONTEXT + 1} tokens do not fit max_seq_len {CONTEXT}"):
        part.run([one(1, CONTEXT, 1)], tokens(1))


# ---- weights


def test_weights_are_taken_as_they_are_and_only_those_of_the_part() -> None:
    model = MODELS["llama", torch.float64]
    asked: list[str] = []

    class Recording(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            asked.append(name)
            return super().__getitem__(name)

    weights = Recording(model.state_dict())
    part = StageModel(LLAMA, range(1, 3), first=False, last=False, weights=weights, device=CPU, dtype=torch.float64)
    assert {name.split(".")[1] for name in asked} == {"1", "2"}
    assert not any(tensor.is_meta for tensor in part._model.state_dict().values())
    for name, parameter in part._model.named_parameters():
        assert parameter.data_ptr() == weights[name].data_ptr()
        assert not parameter.requires_grad


def test_a_tied_head_far_from_the_embedding_has_its_own() -> None:
    parts = parts_of(MODELS["llama", torch.float64], (2, 2))
    names = [{name for name, _ in part._model.named_parameters() if "blocks" not in name} for part in parts]
    assert names == [{"token_embedding.weight"}, {"token_embedding.weight", "norm.weight"}]


def test_missing_and_misshapen_weights_are_named() -> None:
    weights = MODELS["llama", torch.float64].state_dict()
    missing = {name: tensor for name, tensor in weights.items() if name != "blocks.2.mlp.up.weight"}
    kwargs = {"first": False, "last": False, "device": CPU, "dtype": torch.float64}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"blocks\.2\.mlp\.up\.weight\""):
        StageModel(LLAMA, range(2, 3), weights=missing, **kwargs)
    StageModel(LLAMA, range(3, 4), weights=missing, **kwargs)
    wrong = weights | {"blocks.2.mlp.up.weight": torch.zeros(3, 4)}
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.2\.mlp\.up\.weight: .*\[3, 4\].*\[160, 48\]"):
        StageModel(LLAMA, range(2, 3), weights=wrong, **kwargs)


# ---- refusals, and failures in the middle


REFUSED = {
    "too long": ([one(1, 5, CONTEXT - 4)], tokens(CONTEXT - 4), f"sequence 1: {CONTEXT + 1} tokens do not fit"),
    "holes": (
        [one(1, 6, 1), one(2, 3, 1), one(3, 4, 1)],
        tokens(3),
        "sequence 1 continues at 6, but 5 tokens are cached, sequence 3 continues at 4, but 0 tokens are cached: send them",
    ),
    "too few": ([one(1, 5, 2)], tokens(1), r"got torch.int64 of shape \(1,\), .* token ids of shape \(2,\)"),
    "not ids": ([one(1, 5, 1)], torch.zeros(1), "got torch.float32"),
    "above": (
        [one(2, 3, 2), one(1, 5, 1)],
        torch.tensor([0, 1, VOCAB]),
        f"sequence 1: token {VOCAB} is outside .* {VOCAB}",
    ),
    "below": ([one(2, 3, 2), one(1, 5, 1)], torch.tensor([0, -1, 3]), "sequence 2: token -1 is outside"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case: str) -> None:
    rows, x, message = REFUSED[case]
    model = MODELS["llama", torch.float64]
    (part,) = parts_of(model)
    sequences = {1: tokens(6, seed=1), 2: tokens(4, seed=2)}
    part.run([one(1, 0, 5), one(2, 0, 3)], torch.cat((sequences[1][:5], sequences[2][:3])))
    before = cache_bytes(part)
    with pytest.raises(ValueError, match=message):
        part.run(rows, x)
    assert (part.lengths(), cache_bytes(part)) == ({1: 5, 2: 3}, before)
    logits = part.run([one(1, 5, 1), one(2, 3, 1)], torch.cat((sequences[1][5:], sequences[2][3:])))
    for sequence, line in zip(sequences.values(), logits, strict=True):
        torch.testing.assert_close(line, whole(model, sequence)[-1], rtol=1e-11, atol=1e-11)


def test_later_stages_refuse_invalid_activations() -> None:
    last = parts_of(MODELS["llama", torch.float64], (2, 2))[1]
    for x in (tokens(2), torch.zeros(2, 47), torch.zeros(1, 48)):
        with pytest.raises(ValueError, match=r"these rows take activations of shape \(2, 48\)"):
            last.run([one(1, 0, 2)], x)


@pytest.mark.parametrize("where", ["a layer in the middle", "no memory for a cache"])
def test_a_failure_leaves_consistent_caches(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama", torch.float64]
    (part,) = parts_of(model)
    sequences = {name: tokens(CONTEXT, seed=name) for name in (1, 2, 3, 4)}
    before = {1: 50, 2: 30, 3: 9}
    part.run(
        [one(name, 0, count) for name, count in before.items()],
        torch.cat([sequences[n][:c] for n, c in before.items()]),
    )
    rows = [one(1, 20, 5), one(4, 0, 2), one(2, 10, 90), one(3, 4, 1)]
    calls = []

    def fail(original: object) -> object:
        def wrapped(*args: object, **kwargs: object) -> object:
            calls.append(args)
            if len(calls) == 7:
                raise torch.OutOfMemoryError("none left")
            return original(*args, **kwargs)  # type: ignore[operator]

        return wrapped

    with monkeypatch.context() as broken:
        if where == "a layer in the middle":
            broken.setattr(ragged_module.Passage, "attend", fail(ragged_module.Passage.attend))
        else:
            calls.extend([()] * 5)  # the second that is made: the first is of sequence 4
            broken.setattr(Tensor, "new_empty", fail(Tensor.new_empty))
        with pytest.raises(torch.OutOfMemoryError):
            part.run(rows, tokens(98, seed=9))
    assert len(calls) == 7
    left = part.lengths()
    assert left == ({1: 20, 2: 10, 3: 4} if where == "a layer in the middle" else {1: 20, 2: 10, 3: 9})
    # Each goes on from what it says it holds; one that held nothing starts again.
    again = [one(name, left.get(name, 0), 3) for name in sequences]
    logits = part.run(again, torch.cat([sequences[row.sequence][row.start : row.end] for row in again]))
    for row, line in zip(again, logits, strict=True):
        torch.testing.assert_close(line, whole(model, sequences[row.sequence][: row.end])[-1], rtol=1e-11, atol=1e-11)


def test_nothing_is_kept_for_a_gradient() -> None:
    (part,) = parts_of(MODELS["gpt2", torch.float64])
    logits = part.run([one(1, 0, 3), one(2, 0, 2, logits=False)], tokens(5))
    assert logits.shape == (1, VOCAB)
    assert logits.is_inference()
    assert part.run([one(1, 3, 2, logits=False)], tokens(2)).shape == (0, VOCAB)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_excludes_cudnn(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN builds a plan for every new length of a cache. Prompts, chunks behind a prompt and single tokens alike."""
    enabled: list[bool] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def attention(*args: Tensor, **options: object) -> Tensor:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    (part,) = parts_of(MODELS[shape, torch.float32], dtype=torch.float32)
    for start, count in ((0, 5), (5, 3), (8, 1)):
        part.run([one(0, start, count)], tokens(count))
    with pytest.raises(ValueError):
        part.run([one(0, 99, 1)], tokens(1))
    assert enabled == [False] * 3 * LAYERS
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
