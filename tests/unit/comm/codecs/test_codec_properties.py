"""The error bounds, sizes and purity that the codecs' docstrings state, for generated inputs."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.comm.codecs.payloads import decode, encode, random_tensor, round_trip

from smolcluster.comm.codecs import CODECS, CodecError, Feedback, Packer, make_codec
from smolcluster.comm.codecs.block_topk import BlockTopK
from smolcluster.comm.codecs.sparse import draw_places

keys = st.integers(0, 2**64 - 1)
seeds = st.integers(0, 2**31)
fractions = st.floats(0.001, 1.0)
value_types = st.sampled_from(["fp32", "fp16", "bf16"])
dims = st.lists(st.integers(0, 20), max_size=3).map(tuple)
TINY = 2.0**-149  # the smallest float32 above 0
LARGEST = torch.finfo(torch.float32).max


def floats(limit):
    """Mostly ordinary numbers, with zeros, denormals and the ends of the range among them."""
    limit = float(torch.tensor(limit, dtype=torch.float32))
    edges = st.sampled_from([0.0, -0.0, TINY, -(2.0**-126), 1.0, limit, -limit])
    return st.floats(-limit, limit, width=32) | st.floats(-1, 1, width=32) | edges


def tensors(limit=LARGEST):
    return st.lists(floats(limit), min_size=1, max_size=70).map(torch.tensor)


def some_codec():
    def options(name):
        return {
            "int8": st.fixed_dictionaries({"block": st.integers(1, 100), "unbiased": st.booleans()}),
            "int4": st.fixed_dictionaries({"block": st.integers(1, 100), "unbiased": st.booleans()}),
            "blocktopk": st.fixed_dictionaries({"k": st.integers(1, 4096), "bits": st.integers(0, 8)}),
            "topk": st.fixed_dictionaries({"fraction": fractions, "values": value_types}),
            "randk": st.fixed_dictionaries({"fraction": fractions, "values": value_types, "unbiased": st.booleans()}),
            "powersgd": st.fixed_dictionaries({"rank": st.integers(1, 6), "values": value_types}),
        }.get(name, st.just({}))

    return st.sampled_from(list(CODECS)).flatmap(lambda n: options(n).map(lambda o: make_codec(n, **o)))


# Errors are within their bounds


@pytest.mark.parametrize(("name", "relative", "least"), [("fp16", 2**-11, 2**-25), ("bf16", 2**-8, 2**-126)])
@given(st.data())
def test_error_of_casts(name, relative, least, data):
    codec = make_codec(name)
    tensor = data.draw(tensors(codec.limit))
    error = (round_trip(codec, tensor).double() - tensor).abs()
    assert (error <= (tensor.double().abs() * relative).clamp(min=least)).all()


@given(st.sampled_from([("int8", 127), ("int4", 7)]), tensors(), st.integers(1, 80), st.booleans(), keys)
def test_error_of_levels(codec, tensor, block, unbiased, key):
    name, most = codec
    decoded = round_trip(make_codec(name, block=block, unbiased=unbiased), tensor, key=key)
    for source, result in zip(tensor.double().split(block), decoded.double().split(block), strict=True):
        scale = source.abs().max()
        assert ((source - result).abs() <= scale / (most if unbiased else 2 * most) * (1 + 1e-4) + TINY).all()
        extreme = (source.abs() == scale) | (source == 0)
        assert torch.equal(result[extreme], source[extreme])


@given(tensors(), fractions)
def test_topk_error(tensor, fraction):
    decoded = round_trip(make_codec("topk", fraction=fraction, values="fp32"), tensor)
    kept = max(1, math.ceil(fraction * len(tensor)))
    error, norm = (tensor.double() - decoded).square().sum(), tensor.double().square().sum()
    assert error <= (1 - kept / len(tensor)) * norm * (1 + 1e-9)
    # Kept numbers are exact, and nothing left out is larger than one of them.
    chosen = decoded != 0
    assert torch.equal(decoded[chosen], tensor[chosen])
    if chosen.sum() == kept and not chosen.all():
        assert tensor[~chosen].abs().max() <= tensor[chosen].abs().min()


@given(tensors(), fractions, keys)
def test_randk_error(tensor, fraction, key):
    codec = make_codec("randk", fraction=fraction)
    decoded = round_trip(codec, tensor, key=key)
    places, _ = draw_places(key, max(1, math.ceil(fraction * len(tensor))), len(tensor))
    expected = torch.zeros_like(tensor)
    expected[places] = tensor[places]
    assert torch.equal(decoded, expected)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 5), value_types, seeds, keys)
def test_powersgd_error(rows, columns, rank, values, seed, key):
    codec = make_codec("powersgd", rank=rank, values=values)
    matrix = random_tensor(rows, columns, seed=seed)
    rounding = {"fp32": 1e-5, "fp16": 2**-11, "bf16": 2**-8}[values] * (1 + rank**0.5) * 1.1
    assert (round_trip(codec, matrix, key=key) - matrix).norm() <= (1 + rounding) * matrix.norm()
    low = random_tensor(rows, 1, seed=seed) @ random_tensor(1, columns, seed=seed + 1)
    assert (round_trip(codec, low, key=key) - low).norm() <= rounding * low.norm()


@given(some_codec(), st.floats(width=16, allow_nan=False, allow_infinity=False), st.integers(1, 40), st.booleans())
def test_fine_and_coarse_numbers_never_become_others(codec, value, count, negate):
    # A tensor of one number and its negative decodes to that number, its negative, and zero; scaled where unbiased says so.
    tensor = torch.full((count,), value)
    if negate:
        tensor[::2] *= -1
    try:
        decoded = round_trip(codec, tensor).abs()
    except CodecError:  # randk's factor may leave the range of fp16
        return
    factors = {1.0} | ({float(x) for x in range(1, count + 1)} if getattr(codec, "unbiased", False) else set())
    near = torch.tensor([0.0, *(abs(value) * f for f in factors)])
    assert ((decoded[:, None] - near).abs().amin(dim=1) <= near.max() * 2**-8 + 2**-25).all()


# Pure functions, of known size


@given(some_codec(), dims, seeds, keys)
def test_encoding_is_a_pure_function_and_decoding_is_deterministic(codec, shape, seed, key):
    tensor = random_tensor(*shape, seed=seed)
    states = [{}, {}]
    for step in range(3):
        torch.manual_seed(step)  # what others draw in between does not matter
        before = [dict(s) for s in states]
        first, second = (encode(codec, tensor * (step + 1), key=key, state=s) for s in states)
        assert torch.equal(first, second)
        assert first.numel() == codec.nbytes(shape) or (codec.bounded and first.numel() < codec.nbytes(shape))
        # State tensors are replaced, not changed: encoding again from the old ones gives the same.
        assert torch.equal(encode(codec, tensor * (step + 1), key=key, state=before[0]), first)
        decoded = decode(codec, first, shape)
        assert decoded.isfinite().all()
        assert torch.equal(decoded, decode(codec, first.clone(), shape))


@given(some_codec(), dims, seeds)
def test_no_codec_is_larger_than_the_numbers_by_more_than_its_head(codec, shape, seed):
    count = math.prod(shape)
    codebook = 2 * 2**codec.bits if isinstance(codec, BlockTopK) else 0
    assert codec.nbytes(shape) <= 4 * count + 8 + count + codebook


# Hostile bytes


def guarded(shape):
    """A tensor in the middle of a larger one, so that a write beyond its ends is seen."""
    room = torch.full((math.prod(shape) + 64,), 7.0)
    return room, room[32:-32].view(shape)


def check_decodes_or_refuses(codec, data, shape):
    room, out = guarded(shape)
    before = data.clone()
    try:
        codec.decode(data, out)
    except CodecError:
        pass
    else:
        assert codec.lossless or out.isfinite().all()
    assert (room[:32] == 7).all()
    assert (room[-32:] == 7).all()
    assert torch.equal(data, before)


@given(some_codec(), dims, seeds, st.integers(-5, 5))
def test_random_bytes_decode_or_are_refused(codec, shape, seed, extra):
    generator = torch.Generator().manual_seed(seed)
    length = max(0, codec.nbytes(shape) + (extra if seed % 3 == 0 else 0))
    check_decodes_or_refuses(codec, torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator), shape)


@given(some_codec(), dims, seeds, st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), max_size=4))
def test_flipped_bits_decode_or_are_refused(codec, shape, seed, flips):
    data = encode(codec, random_tensor(*shape, seed=seed), key=seed)
    for place, bit in flips if len(data) else []:
        data[place % len(data)] ^= 1 << bit
    check_decodes_or_refuses(codec, data, shape)


@given(st.lists(dims, max_size=4), some_codec(), seeds, st.integers(1, 30))
def test_a_truncated_bucket_is_refused(shapes, codec, seed, missing):
    packer = Packer([(str(i), shape) for i, shape in enumerate(shapes)], codec)
    parts = [random_tensor(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    payload = packer.encode(parts, key=seed)
    if len(payload):
        with pytest.raises(CodecError):
            packer.decode(payload[: max(0, len(payload) - missing)], parts)


# Statistics: keys are fixed, so that these pass or fail for ever


def mean_decoded(codec, tensor, *, times):
    out, total = torch.empty_like(tensor), torch.zeros(tensor.shape, dtype=torch.float64)
    data = torch.empty(codec.nbytes(tensor.shape), dtype=torch.uint8)
    for key in range(times):
        codec.encode(tensor, data, key=key)
        codec.decode(data, out)
        total += out
    return total / times


def test_unbiased_int8_is_right_on_average():
    tensor = random_tensor(1000, seed=3)
    apart = (mean_decoded(make_codec("int8", block=100, unbiased=True), tensor, times=900) - tensor).abs()
    step = tensor.view(10, 100).abs().amax(dim=1).repeat_interleave(100) / 127
    # One draw has a deviation of at most half a step, the mean of 900 a sixtieth; 5 of those for the worst of 1000.
    assert (apart <= 5 * step / 60).all()
    assert apart.mean() < step.mean() / 60
    # Rounding to nearest is not: the same error every time, up to half a step.
    biased = (mean_decoded(make_codec("int8", block=100), tensor, times=2) - tensor).abs()
    assert biased.max() > step.mean() / 3


def test_unbiased_randk_is_right_on_average():
    tensor = random_tensor(205, seed=4)
    codec = make_codec("randk", fraction=0.1, unbiased=True)
    apart = (mean_decoded(codec, tensor, times=4000) - tensor).abs()
    # Kept once in 10 times, tenfold: a deviation of 3 |x| for one draw.
    assert (apart <= 5 * 3 * tensor.abs() / 4000**0.5).all()


# Error feedback


@pytest.mark.parametrize(
    ("codec", "contraction"),
    [
        (make_codec("int8"), 0.99),
        (make_codec("topk", fraction=0.1), 0.1),
        (make_codec("randk", fraction=0.1), 0.05),  # on average 0.1
        (make_codec("powersgd", rank=1), 1 / 20),  # the mean share of one of 20 directions
    ],
    ids=lambda c: getattr(c, "name", None),
)
def test_with_feedback_the_mean_of_what_arrives_is_the_mean_of_what_was_meant(codec, contraction):
    shape, steps = (20, 30), 400
    true_mean, seen_mean = torch.zeros(shape), torch.zeros(shape)
    packer, feedback, out = Packer([("w", shape)], codec), Feedback(), torch.empty(shape)
    steady, largest = random_tensor(*shape, seed=0), 0.0
    apart = []
    for step in range(steps):
        gradient = steady + 0.3 * random_tensor(*shape, seed=step + 1)
        packer.decode(packer.encode([gradient], key=step, feedback=feedback), [out])
        feedback.commit()
        true_mean += gradient
        seen_mean += out
        largest = max(largest, float(gradient.norm()))
        apart.append(float((true_mean - seen_mean).norm()) / (step + 1))
    # |r| <= sqrt(1-c) (|r| + |g|) at every step, so |r| <= 2 |g| / c; the means differ by r / steps.
    residual = feedback.state_dict()["residual/w"].norm()
    assert residual <= 2 * largest / contraction
    assert apart[-1] == pytest.approx(float(residual) / steps, rel=0.05, abs=1e-4)
    assert apart[-1] < min(apart[10], 0.15 * float(steady.norm()))


@given(some_codec(), st.lists(st.sampled_from(["commit", "undo", "nothing"]), min_size=1, max_size=8), seeds)
def test_only_what_was_not_undone_counts(codec, fates, seed):
    """A sender whose payloads are refused now and then is, afterwards, a sender that never made those."""
    shape = (6, 7)
    packer = Packer([("w", shape)], codec)
    real, ideal, pending = Feedback(), Feedback(), []
    for step, fate in itertools.chain(enumerate(fates), [(len(fates), "commit")]):
        gradient = random_tensor(*shape, seed=seed + step)
        pending.append((step, gradient, packer.encode([gradient], key=step, feedback=real).clone()))
        if fate == "undo":
            real.undo()
            pending = []
        if fate == "commit":
            real.commit()
            real.undo()  # nothing to take back
            for key, given, payload in pending:
                assert torch.equal(payload, packer.encode([given], key=key, feedback=ideal))
            ideal.commit()
            pending = []
    assert real.state_dict().keys() == ideal.state_dict().keys()
    assert all(torch.equal(t, ideal.state_dict()[k]) for k, t in real.state_dict().items())
