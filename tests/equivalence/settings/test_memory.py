"""A memory estimate is what real processes hold: every storage of two ranks, over real sockets, is counted.

Every strategy in fp32 is in tests/conformance. The tolerance of 5 % is for what backends allocate by themselves; here they
agree to the byte but for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.equivalence.same_run import named
from tests.world import forkserver

from smolcluster.config import load_config, resolve
from smolcluster.config.schema import Config
from smolcluster.planner.candidates import Choice
from smolcluster.planner.forecast import Workload, forecast
from smolcluster.planner.memory_estimate import Activations
from smolcluster.tasks.find import find_task

GPT = {
    "model.model_dim": 64,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.max_seq_len": 32,
    "training.batch_size": 4,
    "training.steps": 10,
    "training.device": "cpu",
    "cluster.num_workers": 2,
}


def _be_rank(rank: int, size: int, plain: dict[str, Any], pipe: Any) -> None:
    from benchmarks.programs.p6_rank import measure

    from smolcluster.comm.mesh.rendezvous import RankPlace, connect

    torch.set_num_threads(1)
    port = 0 if rank == 0 else pipe.recv()
    place = RankPlace(rank=rank, world_size=size, local_rank=rank, local_world_size=size, master_port=port)
    config, device = Config.model_validate(plain), torch.device("cpu")
    group = connect(place, device=device, announce=pipe.send)
    pipe.send(measure({"who": "ours", "options": {}}, config, group, device))


def measured(config: Config) -> list[int]:
    """The most bytes of each rank."""
    context, plain, size = forkserver(), config.model_dump(mode="json"), config.cluster.num_workers or 1
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [context.Process(target=_be_rank, args=(n, size, plain, pipes[n][1]), daemon=True) for n in range(size)]
    try:
        for process in ranks:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        port = pipes[0][0].recv() if size > 1 else 0
        for ours, _ in pipes[1:]:
            ours.send(port)
        return [sum(ours.recv()["peak"]["at"].values()) for ours, _ in pipes]
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("strategy", "precision", "options"),
    [
        ("fsdp", "fp32", {"fsdp_stage": 1}),
        ("fsdp", "bf16", {"fsdp_stage": 1, "param_dtype": "bf16"}),
        ("diloco", "fp32", {"preset": "wan"}),
    ],
)
def test_a_real_run_holds_what_was_foretold(strategy: str, precision: str, options: dict[str, Any]) -> None:
    overrides = GPT | named(options) | {"training.precision": precision, "strategy.name": strategy}
    config = resolve(load_config([], overrides=overrides))
    subject = Workload.open(config, find_task(config), num_ranks=2, device=torch.device("cpu"))
    said = forecast(
        subject, Choice(label="", strategy=strategy, options=options), ways=[Activations()], every_seat=True
    )
    foretold = {rank: seat.ways[Activations()].at_peak.total for seat in said.seats for rank in seat.ranks}
    for rank, seen in enumerate(measured(config)):
        assert seen == pytest.approx(foretold[rank], rel=0.05)
