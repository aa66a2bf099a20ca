"""The cases of the conformance suite: every registered strategy, on each of its planes, in each of its variants.

They come from the records (`config/strategies.py`), so a strategy of an installed package is among them. What the record does
not say is in SETTINGS: in which setting the strategy computes what `single` computes, and how many workers it takes. A strategy
without an entry is held to its default options. A package adds an entry in a module of its own (docs/strategies/index.md):

    from tests.conformance.cases import SETTINGS, Setting

    SETTINGS["mine"] = Setting(options={"inner_steps": 1})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.world import ElasticWorld, World, run_elastic_world, run_world

from smolcluster.config import load_config, resolve
from smolcluster.config.schema import Config, StrategyConfig
from smolcluster.config.strategies import PlanRequest, all_records
from smolcluster.parallel.placement import Node
from smolcluster.strategies.registry import find_strategy, read_options

PATIENT_S = 120.0  # a gradient that comes later than `timeout` does not count, and the machine may be busy
AT_ONCE = {"worker_update_interval": 1}  # every gradient is computed at the server's weights


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a strategy computes what `single` computes. By plane: more variants, and those that compute something else."""

    options: Mapping[str, Any] = field(default_factory=dict)
    workers: Sequence[int] = (3, 2, 4)  # the first is usual
    # Several workers compute something else, each for itself between exchanges. On the elastic plane a checkpoint does not have
    # what each of them has of its own, and so there is one worker there.
    alone: bool = False
    exact: bool = False  # on the elastic plane too tensors travel in the model's type: a server's are fp32
    rare: Sequence[str] = ()  # variants of its record whose parts the others have: slow
    proof: int = 0  # the variant of its record that tests of several runs usually take
    more: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    unlike: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.alone and self.workers[0] != 1:
            raise ValueError(
                f"alone=True with workers={self.workers}: begin with 1, where it is held to `single`: (1, 3)"
            )


SETTINGS: dict[str, Setting] = {
    "single": Setting(workers=(1,)),
    "allreduce": Setting(exact=True, unlike={"mesh": [{"staleness_bound": 2}]}),
    "fsdp": Setting(exact=True, proof=-1, rare=("2",), workers=(3, 1, 2, 4), more={"elastic": [{"fsdp_stage": 0}]}),
    "pipeline": Setting(rare=("gpipe", "zero-bubble"), more={"mesh": [{"schedule": "sequential"}]}),
    "mesh": Setting(workers=(4,), rare=("dp 2 x tp 2",), more={"mesh": [{"tp": 2, "fsdp_stage": 2}]}),
    "tensor": Setting(workers=(2, 4)),  # as many as divide the heads
    "syncps": Setting(options=AT_ONCE | {"polyak_alpha": 1.0}),
    "edp": Setting(options=AT_ONCE, workers=(1,)),  # nobody waits, so two would take turns by chance
    # Where the outer step takes one worker to where it is; some checkpoints fall into the middle of three steps.
    "diloco": Setting(
        options={"inner_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0},
        workers=(1, 3),
        alone=True,
        exact=True,
        more={"mesh": [{"inner_steps": 3}]},
        unlike={plane: [{"preset": "wan"}] for plane in ("mesh", "elastic")},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    strategy: str
    plane: str
    workers: int
    options: Mapping[str, Any]
    tolerance: float  # to `single` in fp64; where tensors travel in the model's type only the order of sums differs
    usual: bool  # with the first number of workers; a variant of its record, or on the elastic plane
    chosen: bool  # usual, for tests that need several runs
    ends: bool  # the first or the last variant of its record
    equals_single: bool

    def __hash__(self) -> int:
        return hash(self.name)

    def on(self, workers: int) -> Case:
        return dataclasses.replace(self, workers=workers)

    @property
    def readers(self) -> int:
        """Workers that read samples of their own."""
        options, _ = read_options(self.config({}).strategy, plane=self.plane)
        strategy = find_strategy(self.strategy, self.plane, options)
        return strategy.plan(options, self.nodes(), None).checked().num_shards

    def nodes(self) -> list[Node]:
        return [Node(name=f"worker-{rank}", stays=self.plane == "mesh") for rank in range(self.workers)]

    def overrides(self, **more: Any) -> dict[str, Any]:
        """The strategy section and the plane, by dotted names. `more` are options to set where the strategy has them."""
        known = find_strategy(self.strategy, plane=self.plane).Config.on(self.plane)
        options = {key: value for key, value in more.items() if key in known}
        if "timeout" in known:
            options["timeout"] = PATIENT_S
        return {"cluster.plane": self.plane} | named(options | dict(self.options))

    def config(self, overrides: Mapping[str, Any]) -> Config:
        run = {"strategy.name": self.strategy, "cluster.num_workers": self.workers, "training.device": "cpu"}
        return resolve(load_config([], overrides={**self.overrides(), **run, **overrides}))

    def train(self, run_dir: Path, overrides: Mapping[str, Any], **world: Any) -> World | ElasticWorld:
        """Run it to its end, over real processes and sockets."""
        run: Callable[..., Any] = run_world if self.plane == "mesh" else run_elastic_world
        ended: World | ElasticWorld = run(
            self.workers, run_dir, {**self.overrides(), **overrides}, strategy=self.strategy, **world
        )
        return ended


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by dotted names; those that the schema does not have stand below `strategy.options`."""
    known = StrategyConfig.model_fields
    return {f"strategy.{'' if key in known else 'options.'}{key}": value for key, value in options.items()}


def assert_good_end(world: World | ElasticWorld) -> None:
    if isinstance(world, ElasticWorld):
        assert set(world.statuses.values()) == {0}, world.story()
        assert world.summary["replicas_agree"] in (True, None), "replicas differ"
    else:
        failed = [rank.failed for rank in world.ranks if rank.failed is not None]
        failed.sort(key=lambda f: f.kind == "peer")  # the first to fail says why, the others only that it is gone
        assert not failed, f"{failed[0].message}\n{failed[0].traceback}"
    assert world.summary["status"] == "finished"


def all_cases() -> list[Case]:
    found = []
    for record in all_records().values():
        setting = SETTINGS.get(record.name, Setting())
        for plane in record.planes:
            made = record.options_on(plane)
            # A round ends soon: on the elastic plane only the end of one is saved.
            short = {"local_steps": 2} if made is not None and "local_steps" in made.model_fields else {}
            for workers in setting.workers[:1] if setting.alone and plane == "elastic" else setting.workers:
                asked = PlanRequest(plane=plane, num_ranks=workers, every=True)
                equals = workers == 1 or not setting.alone
                variants = [(label, dict(options), equals) for label, options in record.variants(asked)]
                own = [label for label, *_ in variants]
                others = ((setting.more.get(plane, ()), equals), (setting.unlike.get(plane, ()), False))
                variants += [
                    (" ".join(f"{key} {value}" for key, value in options.items()), dict(options), equal)
                    for extra, equal in others
                    for options in extra
                ]
                for label, options, equal in variants:
                    usual = workers == setting.workers[0] and label not in setting.rare
                    words = (record.name, label, plane if plane != record.planes[0] else "", f"on {workers}")
                    found.append(
                        Case(
                            name=" ".join(filter(None, words)),
                            strategy=record.name,
                            plane=plane,
                            workers=workers,
                            options={**short, **setting.options, **options},
                            tolerance=1e-9 if plane == "mesh" or setting.exact else 2e-5,
                            usual=usual and (label in own or plane == "elastic"),
                            chosen=usual and (label == own[setting.proof] or not equal),
                            ends=label in (own[0], own[-1]) or not equal,
                            equals_single=equal,
                        )
                    )
    return found


def over(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)
