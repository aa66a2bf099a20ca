"""One peer of hivemind, used as documented: `hivemind.Optimizer` around AdamW, gradients averaged every epoch.

python -m benchmarks.peers.hivemind_peer '{"config": ..., "rank": 0, "size": 2, "addresses": [], "lockstep": true, ...}'

An epoch, which is one step of all peers, ends when they have a global batch together, whichever peer computed it. With
`lockstep` it ends when a peer has computed its own batch: every peer computes one for each epoch, as in DDP, instead of further
ones until it has news of the others. Peer 0 writes a row every `every` epochs, then the validation loss. Every `val_every`
epochs its row has `val_loss_now`, over `val_samples`; `paused_s` are the seconds of these evaluations so far.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from typing import Any

import hivemind
import numpy as np
import torch
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization
from hivemind.compression.quantization import Quantization
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.utils import get_dht_time
from torch import Tensor

from benchmarks.peers.work import Row, Work, converse
from smolcluster.config.schema import Config

CODECS = {"fp32": NoCompression, "fp16": Float16Compression, "int8": Uniform8BitQuantization}
TIMEOUT_S, FAR_S = 30.0, 1e6  # of an average, unless the order has `timeout_s`


class ClippedAdamW(torch.optim.AdamW):
    """hivemind averages, then calls this: the one place where the averaged gradient can be clipped."""

    def __init__(self, params: Any, *, clip: float, **options: Any) -> None:
        super().__init__(params, **options)
        self.clip = clip
        for parameter in self.parameters():  # hivemind would make the state by a step without gradients, and count it
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": torch.tensor(0.0), **moments}

    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.clip)
        return super().step(closure)


def extract(codec: Quantization, tensor: Any) -> Tensor:
    """Replace `Quantization.extract`: that of hivemind 1.1.12 uses an array as a number, which NumPy 2.4 refuses."""
    count = int(np.frombuffer(tensor.buffer, count=1, dtype=np.int64)[0])
    codebook = np.frombuffer(tensor.buffer, offset=8, count=count, dtype=codec.codebook_dtype)
    indices = np.frombuffer(tensor.buffer, offset=8 + codebook.nbytes, dtype=codec.indices_dtype)
    return torch.from_numpy(codebook[indices]).reshape(tuple(tensor.size))


def make_optimizer(work: Work, dht: hivemind.DHT, order: Row) -> hivemind.Optimizer:
    recipe, codec = work.recipe, CODECS[order.get("codec", "fp32")]
    timeout_s = order.get("timeout_s", TIMEOUT_S)
    wait = {"request_timeout": 0.8 * order["matchmaking_s"]}  # less than matchmaking, as it asks for
    if "powersgd" in order:
        averager = functools.partial(PowerSGDGradientAverager, averager_rank=order["powersgd"], **wait)
    else:
        averager = functools.partial(GradientAverager, **wait)
    return hivemind.Optimizer(
        dht=dht,
        run_id="work",
        batch_size_per_step=work.batch_size,
        target_batch_size=work.batch_size * (1 if order["lockstep"] else order["size"]),
        params=recipe.groups(work.model),
        optimizer=lambda params: ClippedAdamW(
            params, clip=recipe.clip, lr=recipe.learning_rate, betas=recipe.betas, fused=True
        ),
        scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(
            inner, lambda n: recipe.rate(n) / recipe.learning_rate
        ),
        average_state_every=order.get("average_state_every", 1),
        grad_compression=codec(),
        state_averaging_compression=NoCompression() if codec is NoCompression else Float16Compression(),
        grad_averager_factory=averager,
        averager_opts=wait,
        matchmaking_time=order["matchmaking_s"],
        next_chunk_timeout=timeout_s,  # as short as matchmaking, else: parts of a gradient would be left out
        averaging_timeout=timeout_s,
    )


def meet(optimizer: hivemind.Optimizer, order: Row) -> None:
    """Wait until all peers know of each other: a peer that knows of no other takes its steps alone."""
    tracker = optimizer.tracker
    tracker.report_local_progress(local_epoch=0, samples_accumulated=1)  # a peer without samples is not counted
    while tracker.global_progress.num_peers < order["size"]:
        time.sleep(0.05)  # it looks for others by itself, every few seconds
    if order["lockstep"]:
        # News of the others may be older than the batch just computed, and undo it: then the peer would compute another one.
        tracker.min_refresh_period = tracker.max_refresh_period = FAR_S
        while tracker.global_progress.next_fetch_time < get_dht_time() + FAR_S / 2:
            time.sleep(0.05)


def main() -> None:
    order, tell = converse()
    Quantization.extract = extract
    if order.get("core") is not None:
        os.sched_setaffinity(0, {order["core"]})  # before there are any threads and daemons
    work = Work(Config.model_validate(order["config"]), rank=order["rank"], size=order["size"])
    dht = hivemind.DHT(initial_peers=order["addresses"], host_maddrs=[f"/ip4/{order['host']}/tcp/0"], start=True)
    tell({"addresses": [str(address) for address in dht.get_visible_maddrs()]})
    optimizer = make_optimizer(work, dht, order)
    meet(optimizer, order)
    tell({"ready": True})  # all begin together: a peer that waits too long for the others continues alone

    losses: list[float] = []
    paused_s = 0.0
    while (epoch := optimizer.local_epoch) < order["steps"]:
        losses.append(work.gradient())
        optimizer.step()
        optimizer.zero_grad()
        now = optimizer.local_epoch
        if now != epoch:
            if order["rank"] == 0 and now % order["every"] == 0:
                row = {"step": now, "loss": statistics.mean(losses), "samples": len(losses) * work.batch_size}
                if now % order.get("val_every", order["steps"] + 1) == 0:
                    started = time.monotonic()
                    row["val_loss_now"] = work.validation_loss(samples=order["val_samples"])
                    paused_s += time.monotonic() - started
                    work.model.train()
                tell(row | {"paused_s": paused_s})
            losses.clear()
    tell({"val_loss": work.validation_loss()})


if __name__ == "__main__":
    main()
