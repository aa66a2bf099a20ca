"""DiLoCo over real processes computes what a loop in one process computes, which is written here apart."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.equivalence.same_run import named
from tests.equivalence.test_local_steps import BATCHES, averaged
from tests.equivalence.test_local_steps import CONFIG as PLAIN_SGD
from tests.faults.elastic_history import assert_sound, commits, lines_of
from tests.tasks import Double
from tests.world import ElasticWorld, World, run_elastic_world, run_world
from torch import Tensor, nn

from smolcluster.comm.codecs import make_codec
from smolcluster.comm.contributions import HEAD
from smolcluster.compute.rng import seed_everything
from smolcluster.config.options import DiLoCoOptions
from smolcluster.data.leases import Range, indices
from smolcluster.data.sampler import Sampler, ShardedSampler
from smolcluster.engine.checkpoint.snapshot import read_checkpoint
from smolcluster.errors import UserError
from smolcluster.observe.events import Notice
from smolcluster.parallel.placement import Node, Shape
from smolcluster.strategies.base import State
from smolcluster.strategies.diloco import DiLoCo

SEED, STEPS, RATE, H = 5, 8, 0.01, 2
COUNTS = (6, 2)  # samples of each worker
CONFIG: dict[str, Any] = {
    "training.steps": STEPS,
    "training.seed": SEED,
    "training.learning_rate": RATE,
    "training.weight_decay": 0.0,
    "training.grad_clip_norm": 0.0,
    "training.batch_size": COUNTS[1],
    "cluster.workers": ["a", "b"],
    "cluster.batch_size": {"a": COUNTS[0]},
    "lr_schedule.min_lr": RATE,
    "lr_schedule.warmup_iters": 0,
    "training.eval_steps": 0,
    "training.checkpoint_steps": 100,
    "strategy.inner_steps": H,
}
WAN = {"strategy.preset": "wan", "strategy.outer_lr": 1.0, "strategy.outer_momentum": 0.0}  # SparseLoCo's outer SGD


def train(
    plane: str, run_dir: Path, overrides: dict[str, Any], *, workers: int = len(COUNTS), **world: Any
) -> World | ElasticWorld:
    run = run_world if plane == "mesh" else run_elastic_world
    arguments = {"task": "Double", "strategy": "diloco", **world}
    return run(workers, run_dir, CONFIG | {"cluster.plane": plane} | overrides, **arguments)  # type: ignore[operator]


def weights(world: World | ElasticWorld, step: int = STEPS) -> dict[str, Tensor]:
    return dict(read_checkpoint(world.run_dir / "checkpoints" / f"step-{step:08d}").weights)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance)


def local_models() -> tuple[Double, list[nn.Module], list[torch.optim.Optimizer], tuple[Tensor, Tensor]]:
    """The task, a model and an inner optimizer for each worker, and the samples."""
    task = Double(config=None)  # type: ignore[arg-type]
    seed_everything(SEED, "weights", device=torch.device("cpu"))
    models = [task.model()]
    models += [copy.deepcopy(models[0]) for _ in COUNTS[1:]]
    inner = [torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0) for model in models]
    return task, models, list(inner), task.train_data()


def mesh_reads(steps: int) -> list[list[Any]]:
    """What each worker reads in each step on the mesh plane."""
    length = len(Double(config=None).train_data()[0])  # type: ignore[arg-type]
    shards = [ShardedSampler(Sampler(length, seed=SEED), counts=COUNTS, shard=shard) for shard in range(len(COUNTS))]
    return [[shard.next() for _ in range(steps)] for shard in shards]


def simulated(
    *,
    codec: str = "fp32",
    senders: bool = False,
    decay: float = 0.95,
    rate: float = 0.7,
    momentum: float = 0.9,
    steps: int = STEPS,
    h: int = H,
    fragments: int = 1,
    overlap: int = 0,
    mixing: float = 1.0,
    again: bool = False,
    reads: Sequence[Sequence[Any]] | None = None,
) -> dict[str, Tensor]:
    """One model for each worker, in turn; Nesterov's rule, error feedback, the mean and the fragments are written out.

    `again`: the mean is encoded again, with error feedback of its own. `reads`: the samples of each worker in each step; None:
    those of the mesh plane.
    """
    task, models, inner, (x, y) = local_models()
    reads = mesh_reads(steps) if reads is None else reads
    theta = [p.detach().clone() for p in models[0].parameters()]
    velocity = [torch.zeros_like(p) for p in theta]
    residuals: list[list[Tensor | float]] = [[0.0] * len(theta) for _ in COUNTS]
    of_means: list[Tensor | float] = [0.0] * len(theta)
    of_fragment = [place // 2 % fragments for place in range(len(theta))]  # a weight and a bias make a layer
    under_way: list[tuple[int, int, Tensor]] = []  # since when, which tensor, the mean

    def arrive(until: int) -> None:
        for since, place, mean in list(under_way):
            if since <= until:
                velocity[place] = momentum * velocity[place] + mean
                theta[place] -= rate * (mean + momentum * velocity[place])
                for model in models:
                    mine = list(model.parameters())[place].data
                    mine.copy_((1 - mixing) * mine + mixing * theta[place])
        under_way[:] = [item for item in under_way if item[0] > until]

    for t in range(1, steps + 1):
        for model, optimizer, mine in zip(models, inner, reads, strict=True):
            read = torch.from_numpy(mine[t - 1])
            optimizer.zero_grad()
            task.loss(model, (x[read], y[read])).backward()
            optimizer.step()
        if t == steps:
            arrive(t)
        for place, anchor in enumerate(theta):
            if t < steps and t % h != h * of_fragment[place] // fragments:
                continue
            sent = []
            for worker, model in enumerate(models):
                delta = anchor - list(model.parameters())[place].detach()
                if codec == "fp32":
                    sent.append(delta)
                    continue
                wanted = delta.float() + decay * residuals[worker][place]
                sent.append(through(codec, wanted))
                residuals[worker][place] = wanted - sent[-1]
            total = sum(count * tensor for count, tensor in zip(COUNTS, sent, strict=True))
            who = sum(count * ((tensor != 0) if senders else 1) for count, tensor in zip(COUNTS, sent, strict=True))
            mean = total / torch.as_tensor(who).clamp(min=1)
            if again:
                wanted = mean + decay * of_means[place]
                mean = through(codec, wanted)
                of_means[place] = wanted - mean
            under_way.append((t, place, mean))
        arrive(t if t == steps else t - overlap)
    return models[0].state_dict() | dict(zip(models[0].state_dict(), theta, strict=True))


def leased(world: ElasticWorld) -> list[list[Any]]:
    """The samples of each worker in each step, as the run's history has them."""
    x, _ = Double(config=None).train_data()  # type: ignore[arg-type]
    reads: list[list[Any]] = [[] for _ in world.workers]
    for line in commits(lines_of(world)):
        for part in line["contributors"]:
            samples = indices(Sampler(len(x), seed=SEED), [Range(*each) for each in part["ranges"]])
            reads[part["rank"]] += np.array_split(samples, line.get("steps", 1))
    return reads


def through(name: str, tensor: Tensor) -> Tensor:
    """What comes out of a codec."""
    codec = make_codec(name)
    data, decoded = torch.zeros(codec.nbytes(tensor.shape), dtype=torch.uint8), torch.empty(tensor.shape)
    codec.decode(data[: codec.encode(tensor, data)], decoded)
    return decoded


def test_dense_rounds_are_those_of_a_loop(tmp_path: Path) -> None:
    """AdamW inside keeps its state from round to round, and each worker has its own."""
    assert_close(weights(train("mesh", tmp_path, {})), simulated())


@pytest.mark.usual(when=lambda plane, streams: streams == (2, 3) or (plane, streams) == ("mesh", (2, 0)))
@pytest.mark.parametrize("streams", [(2, 3), (2, 0), (2, 1), (4, 2), (1, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_streams_as_a_loop_does(tmp_path: Path, plane: str, streams: tuple[int, int]) -> None:
    """Fragments and overlap; the last round is shorter in all of them. Nothing is exchanged twice, and the most at the end.

    However early the elastic plane commits a result, the weights get it as many steps after it was contributed.
    """
    fragments, overlap = streams
    options = named({"inner_steps": 4, "fragments": fragments, "overlap": overlap})
    world, reads = train(plane, tmp_path, options | {"training.steps": 11}), None
    if isinstance(world, ElasticWorld):
        assert_sound(world, steps=11)
        assert world.summary["replicas_agree"] is True
        reads = leased(world)
    mixing = 0.5 if overlap else 1.0
    expected = simulated(steps=11, h=4, fragments=fragments, overlap=overlap, mixing=mixing, reads=reads)
    assert_close(weights(world, 11), expected)


@pytest.mark.usual(when=lambda overlap: overlap == 0)
@pytest.mark.parametrize("overlap", [0, 3])
def test_encoded_fragments_are_those_of_a_loop(tmp_path: Path, overlap: int) -> None:
    """Each with its error feedback. An exchange sends its fragment, and the last one all. Workers end with the same numbers."""
    streams = {"strategy.inner_steps": 4, "strategy.fragments": 2, "strategy.overlap": overlap, "strategy.mixing": 1.0}
    overrides = streams | {"strategy.codec": "blocktopk", "training.steps": 11, "logging.log_interval": 1}
    expected = simulated(codec="blocktopk", senders=True, steps=11, h=4, fragments=2, overlap=overlap)
    world = train("mesh", tmp_path, overrides)
    assert_close(weights(world, 11), expected, tolerance=1e-6)
    saved = read_checkpoint(world.run_dir / "checkpoints" / "step-00000011")
    for name, theta in weights(world, 11).items():
        for rank in range(len(COUNTS)):
            assert torch.equal(saved.extra[f"{rank}/weights/{name}"], theta)
    if overlap == 0:
        codec, tensors = make_codec("blocktopk"), [tuple(tensor.shape) for tensor in expected.values()]
        fragments = [[shape for place, shape in enumerate(tensors) if place // 2 % 2 == f] for f in range(2)]
        messages = [HEAD.size + len(fragment) + sum(map(codec.nbytes, fragment)) + 1 for fragment in fragments]
        assert isinstance(world, World)
        sent = {row.step: row.bytes_sent for row in world.ranks[0].rows()}
        turns = [messages[1], 0, messages[0], 0]  # of steps 2 to 5
        assert [sent[step] - sent[step - 1] for step in range(2, 11)] == (turns * 3)[:9]


@pytest.mark.usual(when=lambda average, codec: (average, codec) == ("senders", "blocktopk"))
@pytest.mark.parametrize("average", ["senders", "all"])
@pytest.mark.parametrize("codec", ["blocktopk", "int4", "int8", "bf16"])
def test_lossy_rounds_are_those_of_a_loop(tmp_path: Path, average: str, codec: str) -> None:
    """Sums are taken in fp32."""
    overrides = {"strategy.codec": codec, "strategy.average": average, "logging.log_interval": 1}
    senders, decay = average == "senders" and codec == "blocktopk", 0.0 if codec == "bf16" else 0.95
    expected = simulated(codec=codec, senders=senders, decay=decay)
    world = train("mesh", tmp_path, overrides)
    assert_close(weights(world), expected, tolerance=1e-6)
    # One message a round: weight, flags, the tensors as they are encoded, and whether to stop.
    tensors = [tuple(tensor.shape) for tensor in expected.values()]
    message = HEAD.size + len(tensors) + sum(map(make_codec(codec).nbytes, tensors)) + 1
    assert isinstance(world, World)
    sent = {row.step: row.bytes_sent for row in world.ranks[0].rows()}
    assert [sent[step] - sent[step - 1] for step in range(2, STEPS)] == [message, 0] * (STEPS // 2 - 1)


FEW = {rank: [("smolcluster.strategies.diloco", "MAX_GATHERED", 1)] for rank in range(len(COUNTS))}


@pytest.mark.usual(when=lambda options: options.get("overlap") == 3)
@pytest.mark.parametrize(
    "options",
    [
        {"codec": "blocktopk"},
        {"codec": "int4"},
        {"codec": "blocktopk", "overlap": 1},
        {"codec": "blocktopk", "fragments": 2, "overlap": 3},
        {"codec": "bf16", "fragments": 2},
    ],
    ids=str,
)
def test_means_that_are_encoded_again_are_those_of_a_loop(tmp_path: Path, options: dict[str, Any]) -> None:
    """As among many workers. Resumed, also with a round in flight, to the bit."""
    overrides = named(options) | {"strategy.inner_steps": 4, "strategy.mixing": 1.0, "training.steps": 11}
    senders, decay = options["codec"] == "blocktopk", 0.0 if options["codec"] == "bf16" else 0.95
    expected = simulated(**options, senders=senders, decay=decay, steps=11, h=4, again=True)
    saves = {"training.checkpoint_steps": 4, "training.max_checkpoints_to_keep": 9}
    whole = train("mesh", tmp_path / "whole", overrides | saves, tweaks=FEW)
    assert_close(weights(whole, 11), expected, tolerance=1e-6)
    saved = whole.run_dir / "checkpoints" / "step-00000004"
    again = train("mesh", tmp_path / "again", overrides, resume=saved, tweaks=FEW)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.slow
def test_many_workers_of_the_elastic_plane(tmp_path: Path) -> None:
    """Nine at the start: means are encoded again, also when fewer are left."""

    def script(world: ElasticWorld) -> None:
        world.wait_for_step(4)
        world.kill(8)

    overrides = WAN | {"cluster.workers": [], "cluster.batch_size": {}, "training.batch_size": 2, "training.steps": 20}
    world = train("elastic", tmp_path, overrides, workers=9, script=script)
    assert isinstance(world, ElasticWorld)
    assert world.summary["replicas_agree"] is True
    assert world.summary["members_lost"] == 1


@pytest.mark.usual(when=lambda plane: plane == "mesh")
@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_rounds_of_one_step_of_plain_sgd_are_single(tmp_path: Path, plane: str) -> None:
    """And with more steps federated averaging: batches differ, and the last round is shorter."""
    averaging = PLAIN_SGD | {"strategy.outer_lr": 1.0, "strategy.outer_momentum": 0.0}
    for inner_steps in (1, 3) if plane == "mesh" else (1,):
        overrides = averaging | {"strategy.inner_steps": inner_steps}
        world = train(plane, tmp_path / str(inner_steps), overrides, workers=len(BATCHES))
        assert_close(weights(world, 7), averaged(inner_steps))
        if inner_steps == 1:
            big = {"cluster.batch_size": {}, "cluster.workers": ["a"], "training.batch_size": sum(BATCHES)}
            one = run_world(1, tmp_path / "one", PLAIN_SGD | big, task="Double", strategy="single")
            assert_close(weights(world, 7), weights(one, 7))


@pytest.mark.usual(when=lambda plane, options: options == WAN)
@pytest.mark.parametrize("options", [{}, WAN], ids=["dense", "wan"])
@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_resumed_to_the_bit(tmp_path: Path, plane: str, options: dict[str, Any]) -> None:
    """Each worker goes on with its own moments and error feedback; on the mesh plane in the middle of a round."""
    overrides = options | {"strategy.inner_steps": 3 if plane == "mesh" else 2, "training.checkpoint_steps": 4}
    whole = train(plane, tmp_path / "whole", overrides)
    if isinstance(whole, ElasticWorld):
        assert whole.summary["replicas_agree"] is True
        # What workers have of their own is in the run's own directory.
        half = train(plane, tmp_path / "again", overrides | {"training.steps": 4})
        again = train(plane, tmp_path / "again", overrides, resume=half.run_dir / "checkpoints" / "step-00000004")
    else:
        saved = whole.run_dir / "checkpoints" / "step-00000004"
        again = train(plane, tmp_path / "again", overrides, resume=saved)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


STREAMS = {"strategy.inner_steps": 4, "strategy.fragments": 2, "strategy.overlap": 3, "training.steps": 11}


@pytest.mark.usual(when=lambda options: options == WAN)
@pytest.mark.parametrize("options", [{}, WAN, {"strategy.codec": "int8"}], ids=["dense", "wan", "int8"])
def test_streaming_is_resumed_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    """With exchanges in flight, and each worker's own weights between them; to save and to evaluate changes nothing."""
    overrides = STREAMS | options
    saves = {"training.checkpoint_steps": 5, "training.eval_steps": 3, "training.max_checkpoints_to_keep": 9}
    whole = train("mesh", tmp_path / "whole", overrides)
    looked = train("mesh", tmp_path / "looked", overrides | saves)
    assert looked.summary["weights_sha256"] == whole.summary["weights_sha256"]
    saved = looked.run_dir / "checkpoints" / "step-00000005"
    assert read_checkpoint(saved).state["strategy"]["in_flight"]
    again = train("mesh", tmp_path / "again", overrides, resume=saved)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.usual(when=lambda options, overlap: options == WAN and overlap)
@pytest.mark.parametrize("overlap", [0, 3])
@pytest.mark.parametrize("options", [{}, WAN], ids=["dense", "wan"])
def test_streaming_is_resumed_to_the_bit_on_the_elastic_plane(
    tmp_path: Path, options: dict[str, Any], overlap: int
) -> None:
    """Workers go on in the run's directory with their own weights, as they were when the round of the checkpoint ended."""
    overrides = STREAMS | options | {"strategy.overlap": overlap, "training.checkpoint_steps": 6}
    whole = train("elastic", tmp_path / "whole", overrides)
    assert isinstance(whole, ElasticWorld)
    assert whole.summary["replicas_agree"] is True
    # The last round of a run is of all fragments, so the run that is continued must have been cut off.
    saved = whole.run_dir / "checkpoints" / "step-00000006"
    again = train("elastic", whole.run_dir, overrides, resume=saved)
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.parametrize("fragments", [1, 4])
def test_resuming_with_other_fragments_is_refused(fragments: int) -> None:
    """Nothing is loaded."""
    strategy = object.__new__(DiLoCo)
    strategy.options = DiLoCoOptions(inner_steps=4, fragments=fragments)
    state = State(weights={}, optimizer={}, numbers={"fragments": [2, 2]})
    with pytest.raises(UserError, match=r"was made with strategy\.fragments 2 and inner_steps 4"):
        strategy.load_state(state)


@pytest.mark.parametrize("plane", ["mesh", "elastic"])
def test_a_run_with_other_fragments_does_not_continue(tmp_path: Path, plane: str) -> None:
    """Nothing is trained, and the checkpoint is good for a run that fits it: that says what else is another."""
    overrides = STREAMS | {"training.checkpoint_steps": 6, "training.steps": 8}
    saved = train(plane, tmp_path / "whole", overrides).run_dir / "checkpoints" / "step-00000006"
    ends: dict[str, Any] = (
        {"start": [], "script": lambda world: world.wait_for_exit("server")} if plane == "elastic" else {}
    )
    again = train(plane, tmp_path / "again", overrides | {"strategy.fragments": 4}, resume=saved, **ends)
    said = "the checkpoint was made with strategy.fragments 2 and inner_steps 4, and this run has 4 and 4; resume with those"
    if isinstance(again, World):
        assert said in again.refusal
    else:
        assert again.server.failed is not None
        assert said in again.server.failed.message
    assert not (again.run_dir / "checkpoints").exists() or not list((again.run_dir / "checkpoints").iterdir())
    fits = train(plane, tmp_path / "fits", overrides | {"strategy.codec": "int8"}, resume=saved)
    assert fits.summary["status"] == "finished"
    leads = fits.ranks[0] if isinstance(fits, World) else fits.server
    said = "resumed at step 6; not as in the checkpoint: strategy.codec 'int8' (was not set)"
    assert said in [e.message for e in leads.events if isinstance(e, Notice)]


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "blocktopk"])
def test_bytes_are_those_of_the_formula(codec: str) -> None:
    """Of every round; what crosses sockets is held to this in tests/conformance."""
    shape = Shape(parameters=100 * 100 + 77, bytes_per_parameter=4, tensors=[(100, 100), (77,)])
    encoded = sum(make_codec(codec).nbytes(tensor) for tensor in shape.tensors)
    options = DiLoCoOptions(codec=codec, inner_steps=5)
    for stays in (True, False):
        nodes = [Node(name=f"n{i}", stays=stays) for i in range(4)]
        costs = DiLoCo.plan(options, nodes, shape).costs
        assert {(cost.bytes_sent, cost.bytes_received) for cost in costs} == {(3 * encoded // 5, 3 * encoded // 5)}


@pytest.mark.parametrize("stays", [True, False])
def test_above_eight_workers_bytes_do_not_grow_with_their_number(stays: bool) -> None:
    """Up to eight as before."""
    shape = Shape(parameters=40 * 4096, bytes_per_parameter=4, tensors=[(64, 64)] * 40)
    encoded = 40 * make_codec("int4").nbytes((64, 64))
    for n in (8, 10, 20, 40):
        nodes = [Node(name=f"n{i}", stays=stays) for i in range(n)]
        costs = DiLoCo.plan(DiLoCoOptions(codec="int4", inner_steps=5), nodes, shape).costs
        moved = (n - 1) * encoded if n == 8 else 2 * (n - 1) * encoded // n
        assert {(cost.bytes_sent, cost.bytes_received) for cost in costs} == {(moved // 5, moved // 5)}


def test_presets_and_what_wins_over_them() -> None:
    wan = DiLoCoOptions(preset="WAN")
    assert (wan.codec, wan.codec_bits, wan.outer_lr, wan.outer_momentum) == ("blocktopk", 2, 0.9, 0.5)
    assert (wan.inner_steps, wan.codec_k) == (15, 128)
    assert DiLoCoOptions(preset="lan").codec == "int4"
    assert DiLoCoOptions(preset="wan", codec_bits=4, outer_momentum=0.5).codec_bits == 4
    assert DiLoCoOptions(preset="wan", outer_momentum=0.0).outer_momentum == 0.0
    with pytest.raises(ValueError, match="takes one of fp32, bf16, int8, int4, blocktopk"):
        DiLoCoOptions(codec="powersgd")
