"""Small tasks for tests. Data is made from a fixed seed; models are a few hundred parameters."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import logging
import math
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smolcluster.comm.contributions import MessageLayout
from smolcluster.compute import precision
from smolcluster.models import SimpleNN
from smolcluster.tasks.base import Task
from smolcluster.tasks.gpt import GPTTask
from smolcluster.tasks.mnist import Classification

SAMPLES = 256


def spirals() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 12, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()
    return x, y


class Tiny(Task):
    """A small classifier in fp32, with LayerNorm, biases and a parameter that decays and one that does not."""

    dtype = torch.float32
    dropout = 0.0

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(12, 24),
            nn.LayerNorm(24),
            nn.Tanh(),
            nn.Dropout(self.dropout),
            nn.Linear(24, 24),
            nn.Tanh(),
            nn.Linear(24, 2),
        ).to(self.dtype)

    def train_data(self) -> tuple[Tensor, Tensor]:
        x, y = spirals()
        return x.to(self.dtype), y

    def val_data(self) -> tuple[Tensor, Tensor]:
        x, y = spirals()
        return x[:50].to(self.dtype), y[:50]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)


class Double(Tiny):
    """The same in fp64: rounding is so small that an equivalence is exact to ten digits, whatever order sums are taken in."""

    dtype = torch.float64


class Dropout(Tiny):
    dropout = 0.3


class Frozen(Double):
    """The first layer stays as it is."""

    def model(self) -> nn.Module:
        model = super().model()
        next(model.parameters()).requires_grad_(False)
        return model


class OneWeight(Double):
    def model(self) -> nn.Module:
        return nn.Linear(12, 2, bias=False).to(self.dtype)


class _Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8, dtype=torch.float64))


class OwnNumber(Double):
    """Each worker changes a number of its own, by the learning rate in each step of SGD: the weights show whose steps counted.

    STALL is a rank and a folder: this worker waits in a step while the folder has a file `stall`.
    """

    def model(self) -> nn.Module:
        return _Vector()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(model, _Vector)
        rank, _, release = os.environ.get("STALL", ":").partition(":")
        if rank == os.environ["TEST_RANK"] and Path(release, "stall").exists():
            Path(release, "stalled").touch()
            while Path(release, "stall").exists():
                time.sleep(0.01)
        return -model.w[int(os.environ["TEST_RANK"])]


class Tied(Double):
    """A weight in two layers of a sequence, under two names."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2))
        model[2].weight = model[0].weight  # type: ignore[assignment]
        return model.to(self.dtype)


class _Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), 4, 6).transpose(1, 2)


class Turned(Double):
    """The output of the middle layer is not contiguous."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 24), _Turn(), nn.Linear(4, 4), nn.Flatten(), nn.Linear(24, 2)).to(self.dtype)


class _Named(nn.Module):
    """The name of one module ends with the name of another."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a/b": nn.Linear(12, 16), "c": nn.Linear(16, 2)})
        self.b = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.parts["c"](torch.tanh(self.parts["a/b"](x))))


class Slashes(Double):
    def model(self) -> nn.Module:
        return _Named().to(self.dtype)


class _ListsOfLists(nn.Module):
    """A list is never called, so it cannot be a part that is gathered for a call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.ModuleList(nn.Linear(12, 12) for _ in range(2)) for _ in range(3))
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            for layer in row:
                x = torch.tanh(layer(x))
        return self.head(x)


class ListsOfLists(Double):
    def model(self) -> nn.Module:
        return _ListsOfLists().double()


class Twice(Double):
    """One layer in two places."""

    def model(self) -> nn.Module:
        layer = nn.Linear(12, 12)
        return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(12, 2)).double()


class _TracedTie(nn.Module):
    """No sequence, so it is traced; two layers beside each other share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.c, self.d = nn.Linear(12, 12), nn.Linear(12, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.d(torch.tanh(self.c(x)))


class TracedTie(Double):
    def model(self) -> nn.Module:
        return _TracedTie().double()


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.layer = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class SingleNumber(Double):
    def model(self) -> nn.Module:
        return _Scaled().double()


class _ByAnotherName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.encode(x)  # type: ignore[operator]
        return self.head(x)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.layer.weight, self.layer.bias))


class OtherMethod(Double):
    def model(self) -> nn.Module:
        return _ByAnotherName().double()


class SparseTable(Tiny):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(48, 2))


class BatchNorm(Double):
    """Running means differ between workers; those of rank 0 count."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).to(self.dtype)


class BatchNorm32(BatchNorm):
    dtype = torch.float32


class Unused(Double):
    """A parameter without a gradient in every second step, one that lies in memory by columns, and two types in one model."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 2)).to(torch.float64)
        model.register_parameter("extra", nn.Parameter(torch.ones(3, dtype=torch.float32)))
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        return model

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        use = bool(batch[1].sum() % 2)
        return loss + (model.extra**2).sum().double() * 0.01 if use else loss


class _TwoHeads(nn.Module):
    """A sample goes to the head that its last number names. A batch without samples for a head does not touch it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 12)
        self.heads = nn.ModuleList(nn.Linear(12, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden, second = torch.tanh(self.body(x)), x[:, -1] > 0
        out = x.new_zeros(len(x), 2)
        for head, mine in zip(self.heads, (~second, second), strict=True):
            if mine.any():
                out = out.index_put((mine,), head(hidden[mine]))
        return out


class TwoHeads(Double):
    def model(self) -> nn.Module:
        return _TwoHeads().to(self.dtype)


class _Skips(nn.Module):
    """Three blocks of one size. SKIPS says which are left out: (rank, first step, the one after the last, block)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 2)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        skips = json.loads(os.environ["SKIPS"])
        out = {block for at, first, end, block in skips if at == rank and first <= self.step < end}
        for number, block in enumerate(self.blocks):
            x = x if number in out else x + torch.tanh(block(x))
        self.step += self.training
        return self.head(x)


class Skips(Double):
    def model(self) -> nn.Module:
        return _Skips().to(self.dtype)


class NeverUsed(OneWeight):
    """More of its parameters are unused than used: where they are sharded, one rank owns only unused ones."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("extra", nn.Parameter(torch.ones(40, 2, dtype=self.dtype)))
        return model


class Failing(Tiny):
    """Raises in the third step."""

    calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        Failing.calls += 1
        if Failing.calls == 3 and model.training:
            raise ValueError("the third batch is cursed")
        return super().loss(model, batch)


class Fingerprint(Tiny):
    """Logs a hash of the weights that this rank evaluates."""

    quick_check = False  # those of the beginning would be the first

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        if not self.said:
            flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            logging.getLogger("smolcluster.test").warning(hashlib.sha256(flat.numpy().tobytes()).hexdigest())
            self.said = True
        return super().metrics(model, batch)

    said = False


class Digits(Classification):
    """Real handwriting: scikit-learn's 1,797 digits of 8 x 8 pixels, every fifth held out."""

    def model(self) -> nn.Module:
        return SimpleNN(input_dim=64, hidden=128, out=10)

    def _data(self) -> tuple[Tensor, Tensor]:
        # The file alone: importing scikit-learn takes a second in every process of a world.
        spec = importlib.util.find_spec("sklearn")
        assert spec.origin is not None
        rows = torch.from_numpy(np.loadtxt(Path(spec.origin).parent / "datasets/data/digits.csv.gz", delimiter=","))
        return rows[:, :-1].float() / 16.0, rows[:, -1].long()

    def train_data(self) -> tuple[Tensor, Tensor]:
        x, y = self._data()
        kept = torch.arange(len(x)) % 5 != 0
        return x[kept], y[kept]

    def val_data(self) -> tuple[Tensor, Tensor]:
        x, y = self._data()
        kept = torch.arange(len(x)) % 5 == 0
        return x[kept], y[kept]


class WideDigits(Digits):
    """A state of 15 MB: more than a connection takes in at once."""

    def model(self) -> nn.Module:
        return SimpleNN(input_dim=64, hidden=16384, out=10)


class DoubleGPT(GPTTask):
    """The embedded text in fp64."""

    def model(self) -> nn.Module:
        return super().model().double()


class _Wrapped:
    """A dataset with batches of another."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)


class _WrappedGPT(DoubleGPT):
    wrapped: Any = None

    def train_data(self) -> Any:
        return self.wrapped(super().train_data())

    def val_data(self) -> Any:
        return self.wrapped(super().val_data())


class _Masked(_Wrapped):
    """Of each sequence the first ten targets do not count."""

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        tokens, targets = self._data.batch(indices)
        targets = targets.clone()
        targets[:, :10] = -100
        return tokens, targets


class MaskedGPT(_WrappedGPT):
    wrapped = _Masked


class _Ragged(_Wrapped):
    """Sequences of unlike length: of every fourth nothing counts."""

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        tokens, targets = self._data.batch(indices)
        targets = targets.clone()
        length = targets.shape[1]
        for row, index in enumerate(indices.tolist()):
            targets[row, (index % 4) * length // 5 :] = -100
        return tokens, targets


class RaggedGPT(_WrappedGPT):
    """A mean over the targets of sequences of unlike length, as in finetuning."""

    wrapped = _Ragged


class Weighed(Double):
    """Each sample has a weight, often none; the mean over it is NaN, and so are its gradients, where nothing counts."""

    def train_data(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        x, y = spirals()
        return x, y, (torch.arange(SAMPLES) * 7 % 5 % 3).to(self.dtype) / 4

    def val_data(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(t[:50] for t in self.train_data())

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y, weights = batch
        return (F.cross_entropy(model(x), y, reduction="none") * weights).sum() / weights.sum()

    def count(self, batch: Any) -> Tensor:
        total: Tensor = batch[2].sum()
        return total


class Overclaims(Double):
    """Rank 1 reports more counted targets than its samples can have."""

    def count(self, batch: Any) -> float:
        return 2.0**50 if os.environ.get("TEST_RANK") == "1" else float(len(batch[0]))


class _Shifted(_Wrapped):
    """Augmented: each sequence is turned round by a random number of tokens, whenever it is read."""

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = self._data.batch(indices)
        shifts = torch.randint(inputs.shape[1], (len(inputs),)) + random.randrange(8) + np.random.randint(8)
        where = (torch.arange(inputs.shape[1]) + shifts[:, None]) % inputs.shape[1]
        return inputs.gather(1, where), targets.gather(1, where)


class AugmentedGPT(_WrappedGPT):
    wrapped = _Shifted


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(width, width, 3, padding=1), nn.Conv1d(width, width, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.scale * self.second(F.relu(self.first(x))))


class ResidualNet(nn.Module):
    """No sequence: skips around blocks, functions between modules, a condition on a shape, a buffer that is learned from."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.full((12,), 0.1))
        self.stem = nn.Conv1d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList([ResidualBlock(4) for _ in range(3)])
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(48, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.size(1) != 12:
            raise ValueError("twelve numbers are needed")
        x = self.stem((x - self.centre).view(x.size(0), 1, -1))
        for block in self.blocks:
            x = block(x)
        x = F.dropout(torch.flatten(self.norm(x), 1), 0.5, training=self.training and self.drops)
        return self.head(x)

    drops = False


class Residual(Double):
    def model(self) -> nn.Module:
        return ResidualNet().to(self.dtype)


class BranchesOnValues(Double):
    """Cannot be traced."""

    def model(self) -> nn.Module:
        class Branches(ResidualNet):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x if x.sum() > 0 else -x)

        return Branches().to(self.dtype)


class UnlikeGPT(DoubleGPT):
    """The same, on machines of unlike speed: each block takes 0.2 s longer on rank 1, far more than a loaded machine adds."""

    def model(self) -> nn.Module:
        model = super().model()
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            for block in model.blocks:
                block.register_forward_pre_hook(lambda *_: time.sleep(0.2))
        return model


class Paced(GPTTask):
    """The embedded text, on a machine whose every step takes PACE_S seconds longer: it sleeps, so that many fit onto one."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            time.sleep(float(os.environ["PACE_S"]))
        return super().loss(model, batch)


class BySample(Double):
    """A sample takes RESTS seconds, by rank. No machine holds more than MOST samples at a time."""

    quick_check = False

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if model.training and "TEST_RANK" in os.environ:
            assert len(batch[0]) <= int(os.environ["MOST"]), "out of memory"
            time.sleep(len(batch[0]) * float(os.environ["RESTS"].split(",")[int(os.environ["TEST_RANK"])]))
        return super().loss(model, batch)


class Metered(Tiny):
    """Every training loss takes 20 ms, every batch of an evaluation 500."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.02 if model.training else 0.5)
        return super().loss(model, batch)


# Broken machines. A task knows its rank from TEST_RANK, which the world sets.


class _Spoil(torch.autograd.Function):
    """Leaves a loss as it is and multiplies its gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class _Spoils(Task):
    """SPOIL is RANK:CALL:FACTOR,...: on this rank the gradient of this training batch (1: the first) is multiplied."""

    quick_check = False
    calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        if not model.training:
            return loss
        _Spoils.calls += 1
        for rank, call, factor in (part.split(":") for part in os.environ["SPOIL"].split(",")):
            if rank == os.environ["TEST_RANK"] and int(call) == _Spoils.calls:
                loss = _Spoil.apply(loss, float(factor))  # type: ignore[no-untyped-call]
        return loss


class Garbles(Digits):
    """GARBLE is RANK:CALL: what this rank sends of its gradient of this training batch is nonsense."""

    quick_check = False
    calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if model.training:
            Garbles.calls += 1
            rank, call = os.environ["GARBLE"].split(":")
            if rank == os.environ["TEST_RANK"] and int(call) == Garbles.calls:
                self._garble()
        return super().loss(model, batch)

    def _garble(self) -> None:
        """The next that leaves, to whomever."""
        written, left = MessageLayout.write, [2]

        def write(layout: MessageLayout, *said: Any, **also: Any) -> Tensor:
            left[0] -= 1
            if left[0] == 0:
                MessageLayout.write = written  # type: ignore[method-assign]
            return torch.full_like(written(layout, *said, **also), 255)

        MessageLayout.write = write  # type: ignore[method-assign]


class Spoiled(_Spoils, Digits):
    """Real handwriting."""


class SpoiledTiny(_Spoils, Double):
    """A few hundred numbers in fp64."""


class SpoiledGPT(_Spoils, DoubleGPT):
    """The embedded text in fp64."""


class SpoiledStatistics(_Spoils, BatchNorm):
    """The data is spoiled instead: on rank R the samples of training batch C hold NaN, with SPOIL=R:C:nan."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        spoiled = f"{os.environ['TEST_RANK']}:{_Spoils.calls + 1}:nan" in os.environ["SPOIL"].split(",")
        return super().loss(model, (x * math.nan if spoiled and model.training else x, y))


class ShortIntervals(Tiny):
    """The loss scale doubles after every third good step instead of the 2000th."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        precision.GROWTH_INTERVAL = 3


class EndsBroken(Tiny):
    """The third step of the optimizer ruins a weight, with a gradient that was finite."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        first, taken = next(model.parameters()), []

        def ruin(*_: Any) -> None:
            taken.append(1)
            if len(taken) == 3:
                first.data[0, 0] = math.nan

        optimizer.register_step_post_hook(ruin)
        return optimizer


class Hangs(Digits):
    """HANG is RANK:CALL:FILE: on this rank the loss of this training batch (1: the first) is there when the file is."""

    calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        rank, call, file = os.environ["HANG"].split(":", 2)
        Hangs.calls += model.training
        if rank == os.environ["TEST_RANK"] and int(call) == Hangs.calls:
            while not Path(file).exists():
                time.sleep(0.05)
        return super().loss(model, batch)


class HoldsTheLock(Digits):
    """HOLD is RANK:CALL:SECONDS: on this rank the loss of this training batch keeps all other threads from running."""

    calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        rank, call, seconds = os.environ["HOLD"].split(":")
        HoldsTheLock.calls += model.training
        if rank == os.environ["TEST_RANK"] and int(call) == HoldsTheLock.calls:
            ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))
        return super().loss(model, batch)


class Odd(Tiny):
    """The worker whose rank is ODD builds another model."""

    def model(self) -> nn.Module:
        width = 32 if os.environ["TEST_RANK"] == os.environ["ODD"] else 24
        return nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 2))


# Mistakes


class DiesInEvaluation(Tiny):
    """The first process that evaluates is killed there; DIED is the file that says so."""

    quick_check = False

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        died = Path(os.environ["DIED"])
        if not model.training and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


class OwnMetrics(Double):
    """Measures what it likes, and no loss; keeps running means, and draws random numbers."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2)).to(
            self.dtype
        )

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        x, y = batch
        right = (model(x).argmax(dim=-1) == y).double()
        found = {"right": right.mean(), "seen": random.random() + np.random.rand()}
        return found | ({"positives": right[y == 1].mean()} if bool((y == 1).any()) else {})

    def sample(self, model: nn.Module) -> tuple[str, str]:
        return "x", str(float(model(torch.randn(1, 12, dtype=self.dtype)).sum()) + random.random())


class Unchecked(OwnMetrics):
    quick_check = False


class MetricsFail(Double):
    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": batch[7]}  # type: ignore[misc]


class MetricsAreALoss(Double):
    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return self.loss(model, batch)  # type: ignore[return-value]


class MetricIsAVector(Double):
    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"scores": batch[1]}


class SampleFails(Double):
    def sample(self, model: nn.Module) -> tuple[str, str]:
        raise KeyError("prompt")


class SampleIsText(Double):
    def sample(self, model: nn.Module) -> tuple[str, str]:
        return "once upon a time"  # type: ignore[return-value]


class _NoGradient(torch.autograd.Function):
    """Has a forward pass only."""

    @staticmethod
    def forward(_ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Tensor:
        raise NotImplementedError("not written yet")


class BackwardFails(Double):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return _NoGradient.apply(super().loss(model, batch))  # type: ignore[no-any-return, no-untyped-call]


class CountIsNegative(Double):
    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return -1


class LossIsAnInt(Tiny):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 3  # type: ignore[return-value]


class LossIsAVector(Tiny):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0])


class LossIsDetached(Tiny):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(model, batch).detach()


class NoParameters(Tiny):
    def model(self) -> nn.Module:
        return nn.Tanh()


class NotAModel(Tiny):
    def model(self) -> nn.Module:
        return None  # type: ignore[return-value]


class Lazy(Tiny):
    def model(self) -> nn.Module:
        return nn.LazyLinear(2)


class NoData(Tiny):
    def train_data(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(0, 12), torch.zeros(0, dtype=torch.long)


class TurnsToNan(Tiny):
    """The weights do, in the fourth step: by the task's own hand, as no gradient could."""

    quick_check = False
    calls = 0

    def val_data(self) -> None:  # type: ignore[override]
        return None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        TurnsToNan.calls += 1
        if TurnsToNan.calls > 3:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        return super().loss(model, batch)


class NanInBetween(Tiny):
    """Its first evaluation is the best, the second has no result, and the others become better again."""

    quick_check = False
    calls = 0

    def val_data(self) -> tuple[Tensor, Tensor]:
        x, y = super().val_data()
        return x[:1], y[:1]

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        NanInBetween.calls += 1
        return {"loss": torch.tensor([1.0, math.nan, 3.0, 2.0][min(NanInBetween.calls, 4) - 1])}


class SavedBeforeEvaluated(Tiny):
    """An evaluation goes on as soon as there is a checkpoint in the folder SAVED, and fails if none comes."""

    quick_check = False

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        deadline = time.monotonic() + 20.0
        while not any(Path(os.environ["SAVED"]).glob("step-*")):
            assert time.monotonic() < deadline, "nothing is saved yet"
            time.sleep(0.01)
        return super().metrics(model, batch)


class LongEvaluation(Tiny):
    """Evaluations begin when the file ASKED is there, and have fifty batches of a fifth of a second."""

    quick_check = False

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        while not Path(os.environ["ASKED"]).exists():
            time.sleep(0.01)
        time.sleep(0.2)
        return super().metrics(model, batch)


class FailingGPT(GPTTask):
    """Rank 1 fails in its third step."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == 3 and torch.distributed.get_rank() == 1:
            raise ValueError("the third batch is cursed")
        return super().loss(model, batch)


class _Held(_Wrapped):
    """From the call HOLD_FROM on (1: the first) a batch is there when the file HOLD_UNTIL is."""

    _calls = 0

    def batch(self, indices: Any) -> Any:
        self._calls += 1
        while self._calls >= int(os.environ["HOLD_FROM"]) and not Path(os.environ["HOLD_UNTIL"]).exists():
            time.sleep(0.02)
        return self._data.batch(indices)


class HeldGPT(GPTTask):
    """Waits in the middle of a run, on every worker."""

    quick_check = False  # it would read a batch

    def train_data(self) -> Any:
        return _Held(super().train_data())


class _Slow(Task):
    """Takes a third of a second longer for each training loss, and more and more from the tenth on, until the file SLOW_UNTIL
    is there: a few steps are enough for a script that a loaded machine holds up."""

    calls = 0
    pace = 0.03

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training and not Path(os.environ["SLOW_UNTIL"]).exists():
            self.calls += 1
            time.sleep(self.pace * max(10, self.calls))
        return super().loss(model, batch)


class SlowDoubleGPT(_Slow, DoubleGPT):
    """The embedded text in fp64."""


class SlowTiny(_Slow, Tiny):
    """A few hundred numbers."""


class Unlike(Double):
    """Machines of unlike speed, where the usual one takes 6 steps in a round.

    REST            seconds that each rank rests in a training step
    LATER, RESTS    from that training batch on it rests so many times as long
    UNTIL           nobody rests any more when this file is there
    TIMES           instead of what is measured, the coordinator takes these seconds per step, and nobody is late
    WEIGHTS         a folder for a line of each worker after each round, with a hash of its weights
    """

    quick_check = False  # a server has no time to rest
    calls = 0

    def __init__(self, config: Any) -> None:
        from smolcluster.config import options
        from smolcluster.engine.elastic.coordination import local_rounds
        from smolcluster.strategies.base.local_steps import LocalSteps

        super().__init__(config)
        options.INNER_STEPS = 6
        if "TIMES" in os.environ:
            times = [float(seconds) for seconds in os.environ["TIMES"].split(",")]
            local_rounds.DEADLINE_FACTOR = 1e9
            local_rounds.LocalRounds._time_of = lambda _, member: times[member.rank]  # type: ignore[method-assign]
        if "WEIGHTS" in os.environ:
            LocalSteps.apply = _told(LocalSteps.apply)  # type: ignore[method-assign]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if model.training and "REST" in os.environ and not Path(os.environ.get("UNTIL", "-")).exists():
            self.calls += 1
            later = self.calls >= int(os.environ.get("LATER", 10**9))
            rest_s = float(os.environ["REST"].split(",")[int(os.environ["TEST_RANK"])])
            time.sleep(rest_s * (float(os.environ["RESTS"]) if later else 1.0))
        return super().loss(model, batch)


def _told(apply: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Apply the result of a round, and write the hash of the weights to a file."""

    def applied(strategy: Any, result: Any) -> None:
        from smolcluster.engine.checkpoint.safetensors_writer import weights_sha256

        apply(strategy, result)
        said = f"{result.step} {weights_sha256(strategy.state('weights').weights)}\n"
        with Path(os.environ["WEIGHTS"], os.environ["TEST_RANK"]).open("a") as file:
            file.write(said)

    return applied


class HashedTiny(SlowTiny):
    """Slower and slower, with a hash of the weights in the folder WEIGHTS after each round of each worker."""

    pace = 0.01

    def __init__(self, config: Any) -> None:
        from smolcluster.strategies.base.local_steps import LocalSteps

        super().__init__(config)
        LocalSteps.apply = _told(LocalSteps.apply)  # type: ignore[method-assign]


def another_size(*args: Any, **kwargs: Any) -> dict[str, str]:
    """Return what a rank with another --world-size reports."""
    return {"world size": "5"}


def gpu_of_its_own(*args: Any, **kwargs: Any) -> str:
    """Return what a rank that could use NCCL reports."""
    return f"cuda {os.getpid()}"


def nothing(*args: Any, **kwargs: Any) -> None:
    pass
