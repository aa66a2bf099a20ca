"""The pure parts of the mesh strategies: who sits where, who has which layers, which rows, and what is refused."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from smolcluster.config import load_config, resolve
from smolcluster.config.options import FSDPOptions, MeshOptions, PipelineOptions, TensorOptions
from smolcluster.config.schema import TrainingConfig
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import UserError
from smolcluster.models.gpt import GPT, GPTConfig
from smolcluster.parallel.axes import Axes
from smolcluster.parallel.fsdp2 import blocks_of
from smolcluster.parallel.placement import Node, Shape
from smolcluster.parallel.stages import Cut, layers_of, num_microbatches
from smolcluster.parallel.tensor_styles import Fusions
from smolcluster.planner.dry_run import describe_run
from smolcluster.strategies.fsdp import FSDP
from smolcluster.strategies.fsdp_sharded import ShardedFSDP
from smolcluster.strategies.mesh import Mesh
from smolcluster.strategies.pipeline import Pipeline
from smolcluster.strategies.registry import read_options
from smolcluster.strategies.tensor import TensorParallel


def nodes(count: int, **sizes: int) -> list[Node]:
    return [Node(name=f"n{i}", batch_size=sizes.get(f"n{i}", 4)) for i in range(count)]


@pytest.mark.parametrize(
    ("pp", "replicas", "shards", "cp", "tp"), list(itertools.product((1, 3), (1, 2), (1, 3), (1, 2), (1, 2)))
)
def test_ranks_and_coordinates_are_the_same_thing(pp: int, replicas: int, shards: int, cp: int, tp: int) -> None:
    axes = Axes(pp=pp, replicas=replicas, shards=shards * cp, cp=cp, tp=tp)
    assert [axes.rank(**axes.coords(rank)) for rank in range(axes.size)] == list(range(axes.size))
    for axis, length in (("pp", pp), ("dp", replicas * shards), ("cp", cp), ("tp", tp)):
        lines = axes.lines(axis)
        assert sorted(itertools.chain(*lines)) == list(range(axes.size))
        assert {len(line) for line in lines} == {length}
        assert all([axes.coords(r)[axis] for r in line] == list(range(length)) for line in lines)


def test_neighbours_share_a_layer() -> None:
    seats = Mesh.plan(MeshOptions(tp=2, pp=2), nodes(8), None).seats
    assert [(s.coords["pp"], s.coords["dp"], s.coords["tp"]) for s in seats] == [
        *((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)),
        *((1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)),
    ]
    assert [s.shard for s in seats] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_ranks_that_compute_the_same_draw_the_same_numbers() -> None:
    alike = TensorParallel.plan(TensorOptions(sequence_parallel=False), nodes(4), None).seats
    assert [s.stream for s in alike] == [0, 0, 0, 0]
    cut = TensorParallel.plan(TensorOptions(sequence_parallel=True), nodes(4), None).seats
    assert [s.stream for s in cut] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("strategy", "options", "count", "said"),
    [
        (Mesh, MeshOptions(tp=3), 8, "tp 3 x pp 1 does not divide 8 workers; the product must be one of 1, 2, 4, 8"),
        (Mesh, MeshOptions(tp=2, dp=2), 8, "dp 2 x tp 2 x pp 1 = 4 and there are 8 workers; .* dp must be 4"),
        (Mesh, MeshOptions(cp=2, pp=2), 8, "cp 2 x pp 2: a pipeline has whole sequences"),
        (Mesh, MeshOptions(cp=3), 8, "tp 1 x cp 3 does not divide 8 workers"),
        (Mesh, MeshOptions(shard_size=4, fsdp_stage=1), 8, "shard_size is for stages 2 and 3, not 1"),
        (Mesh, MeshOptions(shard_size=3, fsdp_stage=3), 8, "shard_size = 3 does not divide dp 8; try 1, 2, 4, 8"),
        (ShardedFSDP, FSDPOptions(shard_size=4), 6, "shard_size = 4 does not divide 6 workers; try 1, 2, 3, 6"),
        (FSDP, FSDPOptions(shard_size=2, fsdp_stage=1), 4, "shard_size is for stages 2 and 3, not 1"),
        (TensorParallel, TensorOptions(tp=2), 4, "tp = 2 on 4 workers: .* use --strategy mesh"),
        (Pipeline, PipelineOptions(schedule="1f1"), 2, "unknown strategy.schedule '1f1'; did you mean '1f1b'"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(strategy: Any, options: Any, count: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        strategy.plan(options, nodes(count), None).checked()


@pytest.mark.parametrize(
    ("strategy", "options", "batch_size", "said"),
    [
        (Pipeline, PipelineOptions(schedule="gpipe"), 4, "4 stages .* and only 3 layers: .* use fewer workers"),
        (Mesh, MeshOptions(pp=4, schedule="gpipe"), 4, "4 stages .* and only 3 layers"),
        (Mesh, MeshOptions(pp=2), 1, "1f1b on 2 ranks needs as many micro-batches, and a batch of 1 samples"),
        (TensorParallel, TensorOptions(), 4, "tp = 4 does not divide 6 heads; try 1, 2, 3, 6"),
        (Mesh, MeshOptions(tp=4), 4, "tp = 4 does not divide 6 heads"),
    ],
)
def test_a_plan_refuses_a_model_that_cannot_be_shared_out(
    strategy: Any, options: Any, batch_size: int, said: str
) -> None:
    """As data, before anything is built; without the model it is not known yet."""
    four = [replace(node, batch_size=batch_size) for node in nodes(4)]
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=8, model_dim=12, num_heads=6, num_kv_heads=6, num_layers=3, max_seq_len=8))
    refused = strategy.plan(options, four, Shape.of(model, TrainingConfig()))
    assert re.search(said, "; ".join(refused.refusals))
    with pytest.raises(UserError, match=said):
        refused.checked()
    assert len(strategy.plan(options, four, None).checked().seats) == 4


@pytest.mark.parametrize(
    ("strategy", "options", "machines", "shape"),
    [
        (ShardedFSDP, {}, "aabb", (2, 2)),
        (ShardedFSDP, {}, "aaaa", (1, 4)),
        (ShardedFSDP, {}, "abcd", (4, 1)),
        (ShardedFSDP, {"shard_size": 4}, "aabb", (1, 4)),
        (Mesh, {"tp": 2}, "aaaabbbb", (2, 2)),
        (Mesh, {"pp": 2}, "aabbccdd", (2, 2)),
        (Mesh, {"tp": 2}, "aabbccdd", (4, 1)),
    ],
)
def test_hybrid_cuts_up_inside_a_machine(strategy: Any, options: dict[str, Any], machines: str, shape: Any) -> None:
    axes = strategy.axes(strategy.Config(fsdp_stage="HYBRID_SHARD", **options), list(machines))
    assert (axes.replicas, axes.shards) == shape
    assert strategy.sharding(strategy.Config(fsdp_stage="HYBRID_SHARD")).fsdp_stage == 3


@pytest.mark.parametrize(("machines", "said"), [("aaab", "3 on a, 1 on b"), ("abab", "1 on a, 1 on b")])
def test_hybrid_needs_as_many_neighbours_on_each_machine(machines: str, said: str) -> None:
    found = [Node(name=f"worker-{i}", machine=machine) for i, machine in enumerate(machines)]
    with pytest.raises(
        UserError, match=f"consecutive ranks are {said}; use the same number on each machine, with consecutive ranks"
    ):
        ShardedFSDP.plan(FSDPOptions(shard_size="node"), found, None).checked()


def test_ranks_on_the_same_samples_have_one_batch_size() -> None:
    with pytest.raises(UserError, match=r"n1 and n0 work on the same samples .* not 3 and 4"):
        TensorParallel.plan(TensorOptions(), nodes(2, n1=3), None).checked()


# Layers


@pytest.mark.parametrize(
    ("schedule", "ranks", "layers", "spans", "holders"),
    [
        ("1f1b", 2, 5, [(0, 3), (3, 5)], (0, 1)),
        ("gpipe", 3, 3, [(0, 1), (1, 2), (2, 3)], (0, 1, 2)),
        ("interleaved", 2, 6, [(0, 2), (2, 4), (4, 5), (5, 6)], (0, 1, 0, 1)),
        ("zbv", 2, 4, [(0, 1), (1, 2), (2, 3), (3, 4)], (0, 1, 1, 0)),
    ],
)
def test_layers_are_dealt_out(
    schedule: str, ranks: int, layers: int, spans: list[tuple[int, int]], holders: tuple[int, ...]
) -> None:
    cut = Cut.plan(layers, ranks, PipelineOptions(schedule=schedule))
    assert [(span.start, span.stop) for span in cut.layers] == spans
    assert cut.ranks == holders
    assert [stage for rank in range(ranks) for stage in cut.of(rank)] == sorted(
        range(len(spans)), key=lambda stage: (holders[stage], stage)
    )


def test_layers_as_they_are_said() -> None:
    cut = Cut.plan(6, 2, PipelineOptions(layer_distribution=[1, 5]))
    assert [len(span) for span in cut.layers] == [1, 5]


@pytest.mark.parametrize(
    ("layers", "ranks", "options", "said"),
    [
        (3, 4, {}, "4 stages .* and only 3 layers: every stage needs one"),
        (3, 2, {"schedule": "zbv"}, "4 stages .* and only 3 layers"),
        (6, 2, {"layer_distribution": [2, 2, 2]}, "has 3 entries and schedule 1f1b on 2 ranks has 2 stages"),
        (6, 2, {"layer_distribution": [2, 2]}, "adds up to 4 layers; the model has 6"),
    ],
)
def test_layers_that_do_not_fit(layers: int, ranks: int, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Cut.plan(layers, ranks, PipelineOptions(**options))


def test_micro_batches_divide_the_batch() -> None:
    assert num_microbatches(PipelineOptions(), [12], 2) == 4
    assert num_microbatches(PipelineOptions(), [7], 4) == 7
    assert num_microbatches(PipelineOptions(schedule="gpipe"), [11], 4) == 1
    with pytest.raises(
        UserError, match=r"1f1b on 4 ranks needs as many micro-batches, and a batch of 11 .* cut into 1"
    ):
        num_microbatches(PipelineOptions(), [11], 4)
    assert num_microbatches(PipelineOptions(schedule="sequential", num_microbatches=4), [12], 2) == 1
    with pytest.raises(
        UserError, match="num_microbatches = 5 does not divide a batch of 12 samples; try 1, 2, 3, 4, 6, 12"
    ):
        num_microbatches(PipelineOptions(num_microbatches=5), [12], 2)
    # Two stages on each of three ranks: three rounds of ten would not be equally long.
    assert num_microbatches(PipelineOptions(schedule="interleaved"), [10], 6) == 5
    with pytest.raises(UserError, match="num_microbatches = 10 cannot be divided into equal rounds of 3 or more"):
        num_microbatches(PipelineOptions(schedule="interleaved", num_microbatches=10), [10], 6)


def test_pipelines_beside_each_other_have_as_many_micro_batches() -> None:
    assert num_microbatches(PipelineOptions(), [8, 12, 8], 2) == 4
    assert num_microbatches(PipelineOptions(schedule="gpipe"), [8, 9], 2) == 1
    with pytest.raises(UserError, match=r"needs as many micro-batches, and batches of 8, 9 samples are cut into 1"):
        num_microbatches(PipelineOptions(), [8, 9], 2)
    with pytest.raises(UserError, match=r"num_microbatches = 8 does not divide batches of 8, 12 samples; try 1, 2, 4"):
        num_microbatches(PipelineOptions(num_microbatches=8), [12, 8], 2)


def test_a_sequence_is_cut_between_its_children_and_keeps_their_names() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.Linear(4, 1))
    assert layers_of(model).count == 4
    part = layers_of(model).stage(model, range(2, 4), first=False, last=True)
    assert [name for name, _ in part.named_parameters()] == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert part(torch.ones(5, 3)).shape == (5, 1)


def test_blocks_are_what_a_model_repeats() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(1, 1)])
            self.layers = nn.ModuleList([nn.Linear(1, 1) for _ in range(3)])

    model = Model()
    assert blocks_of(model) == list(model.layers)
    sequence = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    assert blocks_of(sequence) == [sequence[0]]
    assert blocks_of(nn.Linear(1, 1)) == []
    twice = nn.Sequential(layer := nn.Linear(2, 2), nn.Tanh(), layer)
    assert blocks_of(twice) == [layer]
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    tied[2].weight = tied[0].weight  # type: ignore[assignment]
    assert blocks_of(tied) == [tied[1]]
    rows = nn.ModuleList(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]) for _ in range(3))
    holder = nn.Module()
    holder.rows = rows
    assert blocks_of(holder) == [layer for row in rows for layer in row.children()]


# Rows


def test_fused_rows_are_dealt_out_section_by_section() -> None:
    fusions = Fusions({"blocks.*.qkv": (4, 2, 2)}, 2)
    whole = torch.arange(8.0)[:, None].repeat(1, 3)
    arranged = fusions.arranged("blocks.7.qkv.weight", whole)
    # The first rank's queries, keys, values; then the second's.
    assert arranged[:, 0].tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    assert torch.equal(fusions.restored("blocks.7.qkv.weight", arranged), whole)
    assert torch.equal(fusions.arranged("blocks.7.out.weight", whole), whole)
    counter = torch.tensor(3.0)
    assert fusions.arranged("blocks.7.qkv.weight", counter) is counter


# What a step costs


@pytest.mark.parametrize(
    ("strategy", "options", "count", "parameters", "optimizer", "moved"),
    [
        (FSDP, FSDPOptions(fsdp_stage=0), 4, 4800, 9600, 7200),
        (FSDP, FSDPOptions(fsdp_stage=1), 4, 4800, 2400, 7200),
        (ShardedFSDP, FSDPOptions(fsdp_stage=2), 4, 4800 + 1200, 2400, 7200),  # FSDP2 keeps its pieces beside the whole
        (ShardedFSDP, FSDPOptions(fsdp_stage=3), 4, 1200, 2400, 10800),
        (ShardedFSDP, FSDPOptions(fsdp_stage=3, shard_size=2), 4, 2400, 4800, 7200 + 2400),
        (TensorParallel, TensorOptions(), 4, 1200, 2400, 0),
        (Pipeline, PipelineOptions(), 2, 2400, 4800, 0),
        (Mesh, MeshOptions(tp=2, fsdp_stage=3), 8, 600, 1200, 5400),
    ],
)
def test_the_formulas(strategy: Any, options: Any, count: int, parameters: int, optimizer: int, moved: int) -> None:
    cost = strategy.plan(options, nodes(count), Shape(parameters=1200)).cost
    assert (cost.parameter_bytes, cost.optimizer_bytes, cost.bytes_sent) == (parameters, optimizer, moved)
    assert cost.activations_travel == (strategy not in (FSDP, ShardedFSDP))


@pytest.mark.parametrize(
    ("strategy", "options", "parameters", "gradients", "moved"),
    [
        (FSDP, FSDPOptions(fsdp_stage=0), 4800, 4800, 7200),  # autocast rounds at every use
        (FSDP, FSDPOptions(fsdp_stage=1), 4800, 4800, 7200),
        (FSDP, FSDPOptions(fsdp_stage=1, param_dtype="bf16"), 2400 + 1200, 2400, 900 * (4 + 2)),
        (ShardedFSDP, FSDPOptions(fsdp_stage=2), 2400 + 1200, 1200, 900 * (2 + 4)),
        (ShardedFSDP, FSDPOptions(fsdp_stage=3), 1200, 1200, 900 * (2 + 2 + 4)),
        (ShardedFSDP, FSDPOptions(fsdp_stage=3, reduce_dtype="bf16"), 1200, 1200, 900 * (2 + 2 + 2)),
        # Six micro-batches: seven times gathered, once summed.
        (Mesh, MeshOptions(pp=2, fsdp_stage=3, num_microbatches=6), 1200, 1200, 300 * (7 * 2 + 4)),
        # Pieces of layers stay in fp32, and so does what a pipeline adds up.
        (Mesh, MeshOptions(tp=2, fsdp_stage=1, param_dtype="bf16"), 2400, 2400, 300 * (4 + 4)),
        (Mesh, MeshOptions(pp=2, fsdp_stage=1, param_dtype="bf16"), 2400, 2400, 300 * (4 + 4)),
    ],
)
def test_the_formulas_in_bf16(strategy: Any, options: Any, parameters: int, gradients: int, moved: int) -> None:
    four = [replace(node, batch_size=6) for node in nodes(4)]
    cost = strategy.plan(options, four, Shape(parameters=1200, used_bytes=2)).cost
    assert (cost.parameter_bytes, cost.gradient_bytes, cost.bytes_sent) == (parameters, gradients, moved)


# What a run would do


def test_a_dry_run_counts_a_data_shard_once(tmp_path: Path) -> None:
    config = resolve(
        load_config(
            [],
            overrides=[
                *("strategy.name=mesh", "strategy.tp=2", "strategy.pp=2"),
                *("training.batch_size=8", "training.device=cpu"),
            ],
        )
    )
    said = describe_run(config, workers=8, run_dir=RunDir(tmp_path / "run"), backend=None)
    assert "steps of 16 samples" in said
    assert "and activations, which are not counted here" in said
    assert "rank 5: worker on worker-5, data shard 0, pp 1, tp 1" in said


# Names


@pytest.mark.parametrize(
    ("name", "stage"),
    [("NO_SHARD", 0), ("shard_grad_op", 2), ("FULL_SHARD", 3), ("1", 1), ("hybrid_shard", "HYBRID_SHARD")],
)
def test_stages_have_names(name: str, stage: int | str) -> None:
    config = load_config([], overrides=[f"strategy.fsdp_stage={name}"])
    assert config.strategy.fsdp_stage == stage


def test_a_bucket_has_a_size_in_bytes_or_in_numbers() -> None:
    config = load_config([], overrides=["strategy.name=fsdp", "strategy.reduce_bucket_size=262144"])
    assert read_options(config.strategy)[0].bucket_mb == 1.0
    config.strategy.bucket_mb = 2.0
    with pytest.raises(UserError, match=r"bucket_mb and strategy\.reduce_bucket_size are the same"):
        read_options(config.strategy)
