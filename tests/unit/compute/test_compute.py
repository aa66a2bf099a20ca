"""What one machine does alone, against plain PyTorch."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from smolcluster.compute.buffers import RunningStatistics
from smolcluster.compute.device import choose_device, peak_memory_bytes, share_cores
from smolcluster.compute.optim import make_optimizer, named_state, warmup_cosine, without_state
from smolcluster.compute.precision import MAX_OVERFLOWS_OF_MEMBER, MAX_SCALE, AgreedScale, LossScale
from smolcluster.compute.replica import MAX_SKIPPED, Batch, Replica, to_device
from smolcluster.compute.rng import derive_seed, seed_everything
from smolcluster.config.schema import TrainingConfig
from smolcluster.errors import SmolclusterError, UserError

CPU = torch.device("cpu")
# What a process of the elastic plane does until its first step, and what it must not have imported then.
STARTS = """
import sys
import torch
import smolcluster.engine.process.warm_elastic
from smolcluster.compute.optim import make_optimizer
from smolcluster.config.schema import TrainingConfig
from smolcluster.models import GPT, GPTConfig

with torch.device("meta"):
    GPT(GPTConfig(vocab_size=9, model_dim=8, num_layers=1, num_heads=1, max_seq_len=4))
model = torch.nn.Linear(2, 2)
for kind in ("adamw", "sgd"):
    optimizer = make_optimizer(model, TrainingConfig(optimizer=kind))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
print(*(name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules))
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def batch(seed: int, *, parts: int = 1, size: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(parts * size, 5, generator=generator), torch.randint(0, 3, (parts * size,), generator=generator)
    return Batch(parts=list(zip(x.split(size), y.split(size), strict=True)), samples=parts * size, tokens=0, step=1)


def replica(*, optimizer: Literal["adamw", "sgd"] = "adamw", **changes: Any) -> Replica:
    config = TrainingConfig(learning_rate=0.01, weight_decay=0.1, optimizer=optimizer, momentum=0.9)
    model = network()
    settings = {"loss": loss, "grad_clip_norm": 0.3, "learning_rate": lambda n: 0.01 / (n + 1)} | changes
    return Replica(model=model, optimizer=make_optimizer(model, config), device=CPU, **settings)


def test_steps_equal_a_hand_written_loop() -> None:
    ours, model = replica(), network()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    plain = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    for n in range(5):
        for group in plain.param_groups:
            group["lr"] = 0.01 / (n + 1)
        plain.zero_grad()
        expected = loss(model, batch(n).parts[0])
        expected.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        plain.step()
        assert ours.compute(batch(n)).item() == expected.item()
        assert ours.apply().item() == norm.item()
    for name, tensor in model.state_dict().items():
        assert torch.equal(ours.weights()[name], tensor)
    assert ours.updates == 5


def test_accumulation_is_the_gradient_of_the_whole_batch() -> None:
    whole, parts = replica(), replica()
    together = batch(1, parts=3)
    joined = Batch(parts=[tuple(torch.cat(t) for t in zip(*together.parts, strict=True))], samples=18, tokens=0, step=1)
    assert parts.compute(together).item() == pytest.approx(whole.compute(joined).item(), rel=1e-6)
    for a, b in zip(whole.parameters, parts.parameters, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_a_step_that_was_abandoned_leaves_nothing_in_the_next_gradient() -> None:
    ours, other = replica(), replica()
    ours.compute(batch(1))
    ours.compute(batch(2))
    other.compute(batch(2))
    for a, b in zip(ours.parameters, other.parameters, strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_before_last_runs_once_just_before_the_last_backward() -> None:
    ours = replica()
    seen: list[bool] = []
    ours.compute(batch(1, parts=3), before_last=lambda: seen.append(ours.parameters[0].grad is not None))
    assert seen == [True]
    alone = replica()
    alone.compute(batch(1), before_last=lambda: seen.append(alone.parameters[0].grad is None))
    assert seen == [True, True]


def test_fp16_scale_is_exact_and_an_overflow_changes_nothing() -> None:
    ours, plain = replica(precision="fp16"), replica()
    start = ours.scale.value
    ours.compute(batch(1))
    plain.compute(batch(1))
    scaled, unscaled = ours.parameters[0].grad, plain.parameters[0].grad
    assert scaled is not None
    assert unscaled is not None
    torch.testing.assert_close(scaled / start, unscaled, rtol=2e-2, atol=1e-3)  # fp16 forward
    ours.apply()

    before = {n: t.clone() for n, t in ours.weights().items()}
    ours.compute(batch(2))
    ours.parameters[0].grad.fill_(float("inf"))
    ours.apply()
    assert all(torch.equal(before[n], t) for n, t in ours.weights().items())
    assert ours.scale.value == start / 2
    assert ours.updates == 2


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("spoiled", [1, 3])
def test_a_step_that_the_optimizer_skips_by_a_flag_is_as_one_that_the_host_skips(
    monkeypatch: pytest.MonkeyPatch, optimizer: Literal["adamw", "sgd"], spoiled: int
) -> None:
    """As on a GPU, where nobody waits for the norm. The same to the bit, in every step and in the optimizer's state."""
    waiting, deferring = replica(optimizer=optimizer), replica(optimizer=optimizer)
    for step in range(1, 6):
        norms = []
        for ours, device in ((waiting, "cuda"), (deferring, "cpu")):
            monkeypatch.setattr("smolcluster.compute.replica.SKIPS_ON", device)
            ours.compute(batch(step))
            if step == spoiled:
                ours.parameters[0].grad.view(-1)[0] = math.nan
            before = {n: t.clone() for n, t in ours.weights().items()}
            norms.append(ours.apply())
            assert (step == spoiled) == all(torch.equal(before[n], t) for n, t in ours.weights().items())
        assert torch.equal(*norms) or step == spoiled
    assert isinstance(deferring._skipped, Tensor), "the host has looked at every step"
    assert (waiting.skipped, deferring.skipped) == (1, 1)
    assert (waiting.updates, deferring.updates) == (5, 5)
    for a, b in zip(waiting.state_dict()[0].items(), deferring.state_dict()[0].items(), strict=True):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1]), a[0]
    for name, tensor in waiting.weights().items():
        assert torch.equal(tensor, deferring.weights()[name])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_too_many_skipped_steps_in_a_row_are_an_error(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("smolcluster.compute.replica.SKIPS_ON", device)
    ours = replica()

    def take(*, spoiled: bool) -> None:
        ours.compute(batch(1))
        if spoiled:
            ours.parameters[0].grad.fill_(math.inf)
        ours.apply()
        ours.check_progress()

    for spoiled in [False, *[True] * (MAX_SKIPPED - 1), False, *[True] * (MAX_SKIPPED - 1)]:
        take(spoiled=spoiled)
    with pytest.raises(SmolclusterError, match=rf"last {MAX_SKIPPED} steps had NaN or infinite values"):
        take(spoiled=True)
    assert ours.skipped == 2 * MAX_SKIPPED - 1


def test_resuming_after_skipped_steps_only() -> None:
    """There is no optimizer state yet, which is no sign of another optimizer."""
    ours, later = replica(), replica()
    ours.compute(batch(1))
    ours.parameters[0].grad.fill_(math.nan)
    ours.apply()
    optimizer, numbers = ours.state_dict()
    assert (optimizer, numbers) == ({}, {"updates": 1, "skipped": 1})
    later.load_state_dict(ours.weights(), optimizer, numbers)
    assert (later.updates, later.skipped) == (1, 1)


class Statistics(nn.Module):
    """A running mean, one that is a new tensor each time, and a table that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.ones(1000))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.norm(self.layer(x))


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("spoiled", [{1}, {3}, {3, 4}])
def test_running_statistics_that_are_not_finite_are_undone(delayed: bool, spoiled: set[int]) -> None:
    """On a GPU the verdict comes a step later: some good steps may go too, and never more than those."""
    torch.manual_seed(0)
    model = Statistics()
    buffers = RunningStatistics(model, CPU)
    if delayed:
        buffers._flag, buffers._delayed = Later(), True  # type: ignore[assignment]
    for step in range(1, 8):
        buffers.save()
        model(torch.randn(6, 4) * (math.nan if step in spoiled else 1.0))
        buffers.check()
    buffers.settle()
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())
    counted = int(model.norm.num_batches_tracked)
    assert 7 - len(spoiled) - 2 * delayed <= counted <= 7 - len(spoiled)
    assert model.norm.running_mean.abs().max() > 0
    assert sum(copy.numel() for copy in buffers._saved.values()) < 1000, "what never changes is not copied again"

    last = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers.save()
    model(torch.full((6, 4), math.inf))
    buffers.check()
    buffers.settle()
    assert all(torch.equal(last[name], buffer) for name, buffer in model.named_buffers())


class Later:
    """A flag that is read one step later, as on a GPU."""

    def __init__(self) -> None:
        self.last = False

    def read(self, value: Tensor) -> bool:
        self.last, earlier = bool(value), self.last
        return earlier


def test_a_loss_scale_is_lowered_once_for_all_gradients_that_it_broke() -> None:
    scale = LossScale(value=1024.0)
    assert [scale.update(overflow=True, used=1024.0) for _ in range(3)] == [True, False, False]
    assert scale.value == 512.0
    assert scale.update(overflow=True, used=128.0)  # it has grown since
    assert scale.value == 64.0


def test_one_member_alone_does_not_lower_the_scale_of_all_for_ever() -> None:
    scale = AgreedScale(growth_interval=1000)
    for _ in range(20):
        scale.overflowed("broken", scale.value)
        scale.committed(["a", "b"])
    assert scale.value == 2.0**16 / 2**MAX_OVERFLOWS_OF_MEMBER
    for _ in range(10):  # but when nobody's gradient counts, the scale is too high for all
        used = scale.value
        assert [scale.overflowed(member, used) for member in "ab"] == [True, True]
    assert scale.value == 2.0**16 / 2**MAX_OVERFLOWS_OF_MEMBER / 2**10
    assert not any(scale.overflowed("c", used) for used in (1.0, math.nan, -math.inf, "2", None, [8]))


@given(st.lists(st.booleans(), max_size=60))
def test_loss_scale_stays_a_power_of_two_of_at_least_one(overflows: list[bool]) -> None:
    scale = LossScale(value=4.0, growth_interval=3)
    for overflow in overflows:
        scale.update(overflow=overflow)
        assert scale.value >= 1.0
        assert math.log2(scale.value).is_integer()
    assert scale.value <= MAX_SCALE
    copy = LossScale()
    copy.load_state_dict(scale.state_dict())
    assert (copy.value, copy.good_steps) == (scale.value, scale.good_steps)


def test_bf16_runs_forward_in_bf16_and_keeps_fp32_weights() -> None:
    seen: list[torch.dtype] = []

    def watching(model: nn.Module, part: Any) -> Tensor:
        logits = model(part[0])
        seen.append(logits.dtype)
        return F.cross_entropy(logits, part[1])

    ours = replica(loss=watching, precision="bf16")
    ours.compute(batch(1))
    ours.apply()
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in ours.parameters} == {torch.float32}


def test_gradient_norms_per_parameter() -> None:
    ours = replica(track_gradients=True, grad_clip_norm=None)
    ours.compute(batch(1))
    expected = {n: p.grad.norm().item() for n, p in ours.model.named_parameters()}
    total = ours.apply()
    assert {n: t.item() for n, t in ours.gradient_norms.items()} == expected
    assert total.item() == pytest.approx(math.sqrt(sum(v**2 for v in expected.values())), rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_state_by_name_resumes_bitwise(optimizer: Literal["adamw", "sgd"]) -> None:
    straight, first, second = (replica(optimizer=optimizer) for _ in range(3))

    def train(ours: Replica, steps: range) -> None:
        for n in steps:
            ours.compute(batch(n))
            ours.apply()

    train(straight, range(6))
    train(first, range(3))
    tensors, numbers = first.state_dict()
    second.load_state_dict(
        {n: t.clone() for n, t in first.weights().items()}, {n: t.clone() for n, t in tensors.items()}, numbers
    )
    train(second, range(3, 6))
    assert all(torch.equal(straight.weights()[n], t) for n, t in second.weights().items())
    assert all("/" in name for name in tensors)
    assert named_state(second.model, second.optimizer).keys() == tensors.keys()


def test_a_worker_starts_without_torchs_compiler() -> None:
    """It would be much of the work of starting."""
    said = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout.strip() == ""


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_our_optimizers_are_torchs_to_the_last_bit(kind: str) -> None:
    ours, theirs = network(), network()
    config = TrainingConfig(optimizer=kind, learning_rate=0.05, momentum=0.8, weight_decay=0.1)
    one = make_optimizer(ours, config)
    groups = [
        {**group, "params": list(params)} for group, params in zip(one.param_groups, _grouped(theirs), strict=True)
    ]
    other = (torch.optim.AdamW if kind == "adamw" else torch.optim.SGD)(groups)
    assert isinstance(one, type(other))
    for step in range(4):
        for model, optimizer in ((ours, one), (theirs, other)):
            loss(model, batch(step).parts[0]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert mine.grad is None


def _grouped(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices, then vectors."""
    return [p for p in model.parameters() if p.ndim >= 2], [p for p in model.parameters() if p.ndim < 2]


@given(warmup=st.integers(0, 50), steps=st.integers(1, 200), peak=st.floats(1e-5, 1.0), share=st.floats(0.0, 1.0))
def test_schedule_rises_then_falls_between_its_bounds(warmup: int, steps: int, peak: float, share: float) -> None:
    rate = warmup_cosine(peak=peak, floor=peak * share, warmup=warmup, steps=steps)
    rates = [rate(n) for n in range(steps + 5)]
    warmup = top = min(warmup, steps // 2)
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(rates[:top]))
    assert all(a >= b * (1 - 1e-9) for a, b in itertools.pairwise(rates[top:]))
    assert all(0 < r <= peak * (1 + 1e-9) for r in rates[:top])
    assert max(rates) == pytest.approx(peak)  # a short run reaches it too
    if steps - 1 > warmup:
        assert rate(warmup) == pytest.approx(peak)
        assert rate(steps - 1) == pytest.approx(peak * share, abs=1e-12)


def test_the_reported_rate_is_the_one_the_optimizer_applied() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["lr_scale"] = 0.5 / 1e-3  # as for a task with an optimizer of its own
    made = Replica(model=model, loss=loss, optimizer=optimizer, learning_rate=lambda n: 1e-3 / (n + 1), device=CPU)
    for _ in range(3):
        reported = made.learning_rate
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        made.apply()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(reported)
    assert made.rate_of(1) == pytest.approx(0.25)


def test_schedule_by_hand() -> None:
    rate = warmup_cosine(peak=1.0, floor=0.0, warmup=2, steps=7)
    assert [round(rate(n), 6) for n in range(8)] == [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]


def test_seeds_depend_on_every_part_and_never_change() -> None:
    assert derive_seed(1, 2) != derive_seed(12)
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert derive_seed(42, 1, 0) == 5689687752019390874  # golden: changing it changes every run
    seed_everything(1, "weights", device=CPU)
    first = torch.rand(3)
    torch.rand(100)
    seed_everything(1, "weights", device=CPU)
    assert torch.equal(first, torch.rand(3))


def test_devices() -> None:
    assert choose_device("cpu") == CPU
    with pytest.raises(UserError, match="not a device"):
        choose_device("gpu0")
    with pytest.raises(UserError, match="not supported"):
        choose_device("meta")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no NVIDIA GPU"):
            choose_device("cuda:0")
    assert peak_memory_bytes(CPU) > 10 * 2**20


def test_cores_are_shared_unless_the_user_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        share_cores(1)
        assert torch.get_num_threads() == before
        monkeypatch.delenv("OMP_NUM_THREADS")
        share_cores(10**6)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_which_parameters_have_no_optimizer_state() -> None:
    ours = replica()
    ours.compute(batch(1))
    ours.apply()
    tensors, numbers = ours.state_dict()
    names = [name for name, _ in ours.model.named_parameters()]
    part = {key: tensor for key, tensor in tensors.items() if not key.endswith(f"/{names[0]}")}
    assert ours.missing_state(tensors, numbers) == []
    assert ours.missing_state(part, numbers) == [names[0]]
    assert ours.missing_state({}, {"updates": 0}) == []
    ours.model.get_parameter(names[0]).requires_grad_(False)
    assert (
        without_state(ours.model, make_optimizer(ours.model, TrainingConfig()), part) == []
    )  # a frozen one needs none
    plain = make_optimizer(ours.model, TrainingConfig(optimizer="sgd", momentum=0.0))
    assert without_state(ours.model, plain, []) == []
    assert without_state(ours.model, torch.optim.Adagrad(ours.model.parameters()), []) == []


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_to_device_keeps_the_structure_of_a_batch() -> None:
    """Named tuples too, as torch's collate does."""
    moved = to_device(
        {"b": [torch.zeros(2), "text"], "c": (torch.ones(1),), "d": Pair(torch.ones(2), torch.zeros(1))}, CPU
    )
    assert moved["b"][1] == "text"
    assert type(moved["c"]) is tuple
    assert type(moved["d"]) is Pair
    assert moved["d"].x.tolist() == [1.0, 1.0]
