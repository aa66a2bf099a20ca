"""Codecs by example: sizes, edges, refusals, feedback and buckets. The bounds, for any input: test_codec_properties.py."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.comm.codecs.payloads import encode, random_tensor, round_trip

from smolcluster.comm.codecs import CODECS, CodecError, Feedback, Packer, make_codec
from smolcluster.comm.codecs.feedback import tensors_of
from smolcluster.comm.codecs.packer import ODD
from smolcluster.comm.codecs.sparse import draw_places, pack_places, places_nbytes, unpack_places
from smolcluster.config.schema import StrategyConfig
from smolcluster.errors import UserError

VARIANTS = [
    ("fp32", {}),
    ("fp16", {}),
    ("bf16", {}),
    ("int8", {}),
    ("int8", {"block": 7}),
    ("int8", {"unbiased": True}),
    ("int4", {}),
    ("int4", {"block": 7, "unbiased": True}),
    ("blocktopk", {}),
    ("blocktopk", {"k": 4096, "bits": 4}),
    ("blocktopk", {"k": 700, "bits": 0}),
    ("topk", {}),
    ("topk", {"fraction": 0.3, "values": "fp16"}),
    ("topk", {"fraction": 1.0, "values": "fp32"}),
    ("randk", {}),
    ("randk", {"fraction": 0.3, "unbiased": True}),
    ("randk", {"fraction": 1.0, "values": "bf16"}),
    ("powersgd", {}),
    ("powersgd", {"rank": 3, "values": "fp32"}),
    ("powersgd", {"rank": 1, "values": "fp16"}),
]
LOSSY = [v for v in VARIANTS if v[0] != "fp32"]


def ids(variant):
    return f"{variant[0]}-{'-'.join(map(str, variant[1].values()))}" if isinstance(variant, tuple) else None


every = pytest.mark.parametrize("variant", VARIANTS, ids=ids)
every_lossy = pytest.mark.parametrize("variant", LOSSY, ids=ids)


def make(variant):
    return make_codec(variant[0], **variant[1])


# Names and options


def test_the_names_are_those_of_the_configuration():
    assert set(CODECS) == {"fp32", "bf16", "fp16", "int8", "int4", "topk", "randk", "powersgd", "blocktopk"}
    for name in CODECS:
        assert StrategyConfig(name="edp", codec=name).codec == make_codec(name).name == name


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("topkk", {}, "unknown codec 'topkk'; did you mean 'topk'?"),
        ("topk", {"fractoin": 0.1}, "codec topk has no option 'fractoin'; did you mean 'fraction'?"),
        ("fp32", {"block": 8}, "codec fp32 has no option 'block'; it has none"),
        ("topk", {"fraction": 0}, "codec topk: fraction = 0 must be a number above 0 and at most 1"),
        ("randk", {"fraction": 1.5}, "fraction = 1.5 must be"),
        ("randk", {"fraction": math.nan}, "fraction = nan must be"),
        ("topk", {"fraction": "a lot"}, "fraction = 'a lot' must be"),
        ("topk", {"values": "fp8"}, "codec topk: values = 'fp8'; known: bf16, fp16, fp32"),
        ("int8", {"block": 0}, "codec int8: block = 0 must be a whole number of at least 1"),
        ("powersgd", {"rank": 1.5}, "codec powersgd: rank = 1.5 must be a whole number"),
        ("powersgd", {"rank": True}, "rank = True must be"),
    ],
)
def test_a_wrong_option_is_named(name, options, says):
    with pytest.raises(UserError, match=re.escape(says)):
        make_codec(name, **options)


def test_which_codecs_need_feedback():
    needs = {ids(v): make(v).feedback for v in VARIANTS}
    biased = {"int8", "int4", "topk", "randk", "powersgd", "blocktopk"}
    assert {name.split("-")[0] for name, need in needs.items() if need} == biased
    assert not make_codec("int8", unbiased=True).feedback
    assert not make_codec("randk", unbiased=True).feedback


# Sizes: the formulas of the docstrings


@pytest.mark.parametrize(
    ("name", "options", "shape", "size"),
    [
        ("fp32", {}, (3, 5), 60),
        ("fp16", {}, (3, 5), 30),
        ("bf16", {}, (), 2),
        ("int8", {}, (1024,), 1024 + 4),
        ("int8", {}, (1025,), 1025 + 8),
        ("int8", {"block": 256}, (1000, 1000), 10**6 + 4 * 3907),
        ("topk", {"values": "fp32"}, (1000, 1000), 40_000 + 10_000 + math.ceil((10_000 + 3906) / 8)),
        ("topk", {}, (1000, 1000), 20_000 + 10_000 + math.ceil((10_000 + 3906) / 8)),
        ("topk", {"fraction": 0.5}, (1000, 1000), 10**6 + math.ceil((500_000 + 999_999) / 8)),
        ("topk", {"fraction": 1.0, "values": "fp32"}, (7,), 28),
        ("topk", {}, (), 2),
        ("randk", {}, (1000, 1000), 40_000 + 8),
        ("randk", {}, (), 4),
        ("powersgd", {}, (300, 20, 10), 2 * 2 * (300 + 200)),
        ("powersgd", {"values": "fp32"}, (300, 200), 4 * 2 * (300 + 200)),
        ("powersgd", {"rank": 4}, (3, 500), 2 * 3 * (3 + 500)),
        ("powersgd", {}, (4096,), 4 * 4096),
        ("powersgd", {}, (2, 2), 16),
    ],
)
def test_bytes_on_the_wire(name, options, shape, size):
    assert make_codec(name, **options).nbytes(shape) == size


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_cast(variant, dtype):
    tensor = random_tensor(40, 30).to(dtype)
    assert torch.equal(encode(make(variant), tensor, key=1), encode(make(variant), tensor.float(), key=1))


@every
def test_strides_gradients_and_offsets_do_not_matter(variant):
    codec, tensor = make(variant), random_tensor(40, 30)
    payload = encode(codec, tensor, key=1)
    strided = torch.empty(30, 80)[:, ::2].t().copy_(tensor).requires_grad_()
    assert torch.equal(encode(codec, strided, key=1), payload)
    expected, target = torch.empty(40, 30), torch.empty(30, 80)[:, ::2].t()
    codec.decode(payload, expected)
    for offset in range(4):  # as parts of a bucket lie: off every boundary
        most = codec.nbytes(tensor.shape)
        room = torch.zeros(most + 8, dtype=torch.uint8)
        part = room[offset : offset + most]
        used = codec.encode(tensor, part, key=1)
        assert torch.equal(part[:used], payload)
        assert not room[:offset].any()
        assert not room[offset + used :].any()
        assert codec.decode(part, target) == used
        assert torch.equal(target, expected)


@every
def test_the_callers_mistakes(variant):
    codec, tensor = make(variant), random_tensor(40, 30)
    payload = torch.zeros(codec.nbytes(tensor.shape), dtype=torch.uint8)
    codec.encode(tensor, payload)
    with pytest.raises(ValueError, match="contiguous bytes"):
        codec.encode(tensor, payload[:-1])
    with pytest.raises(ValueError, match="floating point"):
        codec.encode(tensor.long(), payload)
    with pytest.raises(ValueError, match="into float32, not"):
        codec.decode(payload, tensor.double())


@every
def test_another_length_or_type_is_refused(variant):
    codec, tensor = make(variant), random_tensor(40, 30)
    payload = encode(codec, tensor)
    longer = [] if codec.bounded else [torch.cat([payload, payload[:1]])]  # what follows may be the next tensor's
    for wrong in (payload.float(), payload.view(1, -1), payload[:-1], payload[:0], *longer):
        with pytest.raises(CodecError, match=r"is not a \w+ payload of shape \(40, 30\)|it has \d+ (bytes|positions)"):
            codec.decode(wrong, tensor)


# Numbers that are not


@every_lossy
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_lossy_codecs_refuse_what_is_not_finite(variant, bad):
    tensor = random_tensor(40, 30)
    tensor[17, 3] = bad
    state = {}
    with pytest.raises(CodecError, match="NaN" if math.isnan(bad) else "infinity"):
        encode(make(variant), tensor, state=state)
    assert not state
    with pytest.raises(CodecError):  # a double that float32 cannot hold
        encode(make(variant), torch.full((40, 30), 1e300, dtype=torch.float64))


def test_fp32_passes_everything_through():
    tensor = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45, 3.4e38])
    assert torch.equal(round_trip(make_codec("fp32"), tensor).view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize(
    ("name", "options", "largest"),
    [
        ("fp16", {}, 65504.0),
        ("bf16", {}, torch.finfo(torch.bfloat16).max),
        ("topk", {"fraction": 1.0, "values": "fp16"}, 65504.0),
        ("powersgd", {}, 2.0**100),
    ],
)
def test_beyond_the_range_is_refused_not_clipped(name, options, largest):
    codec = make_codec(name, **options)
    tensor = torch.tensor([1.0, -largest])
    assert torch.equal(round_trip(codec, tensor)[1], tensor[1])
    with pytest.raises(CodecError, match=r"carries (up to|finite numbers)"):
        round_trip(codec, tensor * 1.01)


def test_an_unbiased_randk_refuses_what_its_factor_makes_infinite():
    codec = make_codec("randk", fraction=0.01, unbiased=True)
    with pytest.raises(CodecError, match="infinity"):
        encode(codec, torch.full((1000,), 1e38))


@pytest.mark.parametrize(
    ("name", "options", "dtype", "places", "value", "says"),
    [
        ("fp16", {}, torch.float16, slice(2, 3), math.inf, "infinity"),
        ("bf16", {}, torch.bfloat16, slice(2, 3), math.inf, "infinity"),
        *(("int8", {}, torch.float32, slice(1), scale, "scale|NaN|infinity") for scale in (math.nan, math.inf, -1.0)),
        ("int8", {}, torch.uint8, slice(100, 101), 0x80, "a level beyond 127"),
        ("powersgd", {"values": "fp32"}, torch.float32, slice(None), 3e38, "infinity"),
        ("powersgd", {"values": "bf16"}, torch.bfloat16, slice(None), 3e38, "infinity"),
    ],
)
def test_bytes_that_no_sender_writes_are_refused(name, options, dtype, places, value, says):
    codec = make_codec(name, **options)
    payload = encode(codec, random_tensor(32, 32))
    payload.view(dtype)[places] = value
    with pytest.raises(CodecError, match=says):
        codec.decode(payload, torch.empty(32, 32))


# Exactness and edges


@every
def test_zeros_are_exact(variant):
    assert not round_trip(make(variant), torch.zeros(70, 33)).any()


def test_topk_keeps_the_largest_and_the_first_among_equals():
    codec = make_codec("topk", fraction=0.5)
    assert round_trip(codec, torch.tensor([1.0, -8.0, 2.0, 0.5, 4.0, -2.0])).tolist() == [0, -8, 2, 0, 4, 0]
    assert round_trip(codec, torch.ones(6)).tolist() == [1, 1, 1, 0, 0, 0]


def test_randk_draws_one_of_each_stretch_and_every_key_draws_anew():
    places, lengths = draw_places(5, 10, 1003)
    assert lengths.sum() == 1003
    assert set(lengths) == {100, 101}
    ends = np.cumsum(lengths)
    assert ((places < ends) & (places >= ends - lengths)).all()
    assert len({tuple(draw_places(k, 10, 1003)[0]) for k in range(50)}) == 50
    # Both ends draw: a change here breaks every mixed cluster, and must be meant.
    assert draw_places(1, 4, 1000)[0].tolist() == [137, 255, 738, 916]


@pytest.mark.parametrize(
    ("kept", "count"),
    [(1, 1), (1, 2), (1, 300), (3, 3), (2, 70_000), (100, 10_000), (9_000, 10_000), (5, 2**24), (3, 2**33)],
)
def test_places_come_back(kept, count):
    rng = np.random.default_rng(kept)
    for places in (
        np.sort(rng.choice(min(count, 10**6), kept, replace=False)).astype(np.int64),
        np.arange(kept, dtype=np.int64),
        np.arange(count - kept, count, dtype=np.int64),
    ):
        data = pack_places(places, count)
        assert len(data) == places_nbytes(kept, count)
        assert np.array_equal(unpack_places(data, kept, count), places)


def test_impossible_places_are_refused():
    places = np.array([3, 4, 600], dtype=np.int64)
    data = pack_places(places, 1000)
    assert len(data) == 3 + 1
    for change, says in (
        ((0, 4), "not increasing"),  # 4, 4, 600
        ((0, 5), "not increasing"),
        ((3, 0xFF), "8 positions, expected 3"),
        ((3, 0), "0 positions, expected 3"),
        ((3, 0b1000_0011), "not below 1000"),  # the last place's rest is beyond the end
    ):
        bad = data.copy()
        bad[change[0]] = change[1]
        with pytest.raises(CodecError, match=says):
            unpack_places(bad, 3, 1000)


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-20, 1.0, 1e20, 1e30])
def test_powersgd_at_any_scale(scale):
    codec, state = make_codec("powersgd", values="fp32"), {}
    matrix = (random_tensor(60, 2) @ random_tensor(2, 50, seed=1)).clamp(-1, 1) * scale
    for step in range(3):
        decoded = round_trip(codec, matrix, key=step, state=state)
        assert (decoded.double() - matrix).norm() <= matrix.double().norm() * (1 + 1e-5)


def test_powersgd_converges_from_step_to_step_and_begins_from_the_key():
    codec, state = make_codec("powersgd", values="fp32"), {}
    matrix = random_tensor(60, 50) * 0.1 + 3 * random_tensor(60, 2) @ random_tensor(2, 50, seed=1)
    u, s, v = torch.linalg.svd(matrix)
    best = (u[:, :2] * s[:2]) @ v[:2]
    apart = [float((round_trip(codec, matrix, key=k, state=state) - best).norm()) for k in range(6)]
    assert apart[-1] < 1e-3 * best.norm() < apart[0]
    assert set(state) == {"q"}
    assert torch.equal(encode(codec, matrix, key=1), encode(codec, matrix, key=1))
    assert not torch.equal(encode(codec, matrix, key=1), encode(codec, matrix, key=2))


def test_powersgd_wakes_up_after_zeros():
    # A step without a gradient (an embedding nobody read) leaves Q at zero, from where it must come back.
    codec, state = make_codec("powersgd", values="fp32"), {}
    assert not round_trip(codec, torch.zeros(60, 50), state=state).any()
    matrix = torch.zeros(60, 50)
    matrix[30:] = random_tensor(30, 1) @ random_tensor(1, 50, seed=1)
    assert torch.allclose(round_trip(codec, matrix, key=1, state=state), matrix, atol=1e-4)


def test_powersgd_begins_anew_with_a_state_of_another_rank():
    state = {"q": torch.ones(50, 7)}
    round_trip(make_codec("powersgd"), random_tensor(60, 50), state=state)
    assert state["q"].shape == (50, 2)


# Buckets

LAYOUT = [("w", (40, 30)), ("scale", ()), ("nothing", (0, 3)), ("a/b", (41,)), ("conv", (8, 3, 3, 3))]


def bucket(seed=0):
    return [random_tensor(*shape, seed=seed + i) for i, (_, shape) in enumerate(LAYOUT)]


@every
def test_a_bucket_is_its_tensors_in_a_row(variant):
    codec, tensors = make(variant), bucket()
    packer = Packer(LAYOUT, codec)
    assert packer.nbytes == sum(codec.nbytes(shape) for _, shape in LAYOUT)
    payload = packer.encode(tensors, key=7)
    out = torch.empty(packer.nbytes, dtype=torch.uint8)
    again = packer.encode(tensors, out, key=7)
    assert again.data_ptr() == out.data_ptr()
    assert torch.equal(again, payload)
    assert len(payload) == packer.nbytes or codec.bounded
    outs = [torch.empty_like(t) for t in tensors]
    packer.decode(payload, outs)
    assert all(o.isfinite().all() for o in outs)
    if codec.lossless:
        assert all(torch.equal(o, t) for o, t in zip(outs, tensors, strict=True))


@every
def test_a_bucket_has_the_bytes_and_residuals_of_its_tensors_one_at_a_time(variant):
    codec = make(variant)
    packer, feedback, alone = Packer(LAYOUT, codec), Feedback(decay=0.9), Feedback(decay=0.9)
    for step in range(3):
        tensors = bucket(seed=10 * step)
        payload, parts = packer.encode(tensors, key=0, feedback=feedback), []
        for index, (each, tensor) in enumerate(zip(LAYOUT, tensors, strict=True)):
            # The key of a bucket's tensor has its place in it.
            parts.append(
                Packer([each], codec).encode([tensor], key=index * pow(ODD, -1, 2**64), feedback=alone).clone()
            )
        assert torch.equal(payload, torch.cat([part.view(torch.uint8) for part in parts]))
    assert feedback.memories.keys() == alone.memories.keys()
    for name, memory in feedback.memories.items():
        assert torch.equal(memory.residual, alone.memories[name].residual), name


@pytest.mark.parametrize("name", ["int8", "int4", "powersgd"])
def test_a_bucket_that_cannot_be_encoded_leaves_the_residuals(name):
    packer, feedback = Packer(LAYOUT, make_codec(name)), Feedback()
    packer.encode(bucket(), key=0, feedback=feedback)
    feedback.commit()
    before = residuals(feedback)
    tensors = bucket(seed=5)
    tensors[-1][0, 0, 0, 0] = math.inf
    with pytest.raises(CodecError, match=r"^conv: "):
        packer.encode(tensors, key=1, feedback=feedback)
    assert same(residuals(feedback), before)
    feedback.undo()
    assert same(residuals(feedback), before)


def test_tensors_of_a_bucket_and_steps_draw_from_keys_of_their_own():
    packer = Packer([("a", (1000,)), ("b", (1000,))], make_codec("randk"))
    keys = set()
    for step in range(20):
        payload = packer.encode([torch.ones(1000)] * 2, key=step)
        keys |= {bytes(payload[:8].tolist()), bytes(payload[48:56].tolist())}
    assert len(keys) == 40


def test_errors_name_the_tensor():
    packer = Packer(LAYOUT, make_codec("int8"))
    tensors = bucket()
    payload = packer.encode(tensors, key=0)
    tensors[3][5] = math.nan
    with pytest.raises(CodecError, match=r"^a/b: there is a NaN in it; int8 carries finite numbers"):
        packer.encode(tensors, key=0)
    payload[-1] = 0x80
    with pytest.raises(CodecError, match=r"^conv: a level beyond 127"):
        packer.decode(payload, bucket())
    with pytest.raises(CodecError, match="this bucket's payload"):
        packer.decode(payload[:-1], bucket())
    bounded = Packer(LAYOUT, make_codec("blocktopk"))
    with pytest.raises(CodecError, match=r"payload ends after \d+ of \d+ bytes"):
        bounded.decode(torch.cat([bounded.encode(bucket(), key=0), payload[:1]]), bucket())
    with pytest.raises(ValueError, match="this bucket holds shapes"):
        packer.decode(payload, bucket()[:-1])
    with pytest.raises(ValueError, match="the buffer has shape"):
        packer.encode(bucket(), payload[1:], key=0)
    with pytest.raises(ValueError, match="same name"):
        Packer([("a", (1,)), ("a", (2,))], make_codec("fp32"))


def test_an_empty_bucket():
    packer = Packer([], make_codec("int8"))
    assert packer.encode([], key=0).numel() == packer.nbytes == 0
    packer.decode(torch.empty(0, dtype=torch.uint8), [])


# Feedback


def residuals(feedback):
    return {k: t.clone() for k, t in tensors_of(feedback.memories).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@every_lossy
def test_the_residual_is_what_was_left_out(variant):
    packer, feedback = Packer(LAYOUT, make(variant)), Feedback()
    total = [torch.zeros(shape) for _, shape in LAYOUT]
    sent = [torch.zeros(shape) for _, shape in LAYOUT]
    for step in range(5):
        gradients, outs = bucket(step), [torch.empty(shape) for _, shape in LAYOUT]
        packer.decode(packer.encode(gradients, key=step, feedback=feedback), outs)
        feedback.commit()
        total = [a + b for a, b in zip(total, gradients, strict=True)]
        sent = [a + b for a, b in zip(sent, outs, strict=True)]
    for (name, _), wanted, arrived in zip(LAYOUT, total, sent, strict=True):
        assert torch.allclose(arrived + feedback.state_dict()[f"residual/{name}"], wanted, atol=1e-4)


def test_buckets_share_a_feedback():
    feedback = Feedback()
    packers = [Packer([part], make_codec("powersgd")) for part in LAYOUT]
    for packer, tensor in zip(packers, bucket(), strict=True):
        packer.encode([tensor], key=0, feedback=feedback)
    whole = Feedback()
    Packer(LAYOUT, make_codec("powersgd", rank=2)).encode(bucket(), key=0, feedback=whole)
    names = {f"residual/{n}" for n, _ in LAYOUT} | {"q/w", "q/conv"}
    assert residuals(feedback).keys() == residuals(whole).keys() == names
    feedback.undo()
    assert residuals(feedback) == feedback.state_dict() == {}


def test_a_resumed_sender_sends_the_same_bytes():
    packer, feedback = Packer(LAYOUT, make_codec("powersgd")), Feedback()
    for step in range(3):
        packer.encode(bucket(step), key=step, feedback=feedback)
        feedback.commit()
    resumed = Feedback()
    resumed.load_state_dict(residuals(feedback))
    assert same(resumed.state_dict(), feedback.state_dict())
    payloads = [packer.encode(bucket(3), key=3, feedback=f) for f in (feedback, resumed)]
    assert torch.equal(*payloads)


def test_feedback_of_another_model_is_refused():
    feedback = Feedback()
    feedback.load_state_dict({"residual/w": torch.zeros(3)})
    with pytest.raises(UserError, match=r"residual of w has shape \(3,\), its gradient \(4,\)"):
        Packer([("w", (4,))], make_codec("topk")).encode([torch.ones(4)], key=0, feedback=feedback)
    with pytest.raises(UserError, match="no residual for w"):
        feedback.load_state_dict({"q/w": torch.zeros(3)})


def test_the_gradients_are_not_changed():
    packer, feedback, tensors = Packer(LAYOUT, make_codec("topk")), Feedback(), bucket()
    for step in range(2):
        packer.encode(tensors, key=step, feedback=feedback)
    assert all(torch.equal(a, b) for a, b in zip(tensors, bucket(), strict=True))


# The page


def test_the_example_of_the_page_runs():
    page = (Path(__file__).parents[4] / "docs" / "codecs.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "docs/codecs.md", "exec"), names)
    received, gradients = names["received"], names["gradients"]
    assert [r.count_nonzero().item() for r in received] == [math.ceil(0.05 * g.numel()) for g in gradients]
