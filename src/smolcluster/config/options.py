"""The options of every built-in strategy: its part of the `strategy` section, with defaults. Nothing here imports torch.

The section is made from these classes (`config/strategies.py`), so the type of an option has its bounds and spellings.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from smolcluster.config.types import (
    Auto,
    BelowOne,
    Count,
    Fraction,
    Lower,
    Natural,
    NonNegative,
    NotBool,
    Positive,
    Precision,
)

Codec = Annotated[Literal["fp32", "bf16", "fp16", "int8", "int4", "topk", "randk", "powersgd", "blocktopk"], Lower]
Dtype = Annotated[Precision, Lower]
SCHEDULES = ("sequential", "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")


class Options(BaseModel):
    """A strategy's part of the `strategy` section, with its defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    only_elastic: ClassVar[frozenset[str]] = frozenset()  # options without effect on the mesh plane
    only_mesh: ClassVar[frozenset[str]] = frozenset()  # and on the elastic plane

    @property
    def picks_preset(self) -> bool:
        """Whether `preset` is picked by the measured link between machines when a run begins."""
        return False

    @property
    def balanced(self) -> bool:
        """Elastic plane: whether leases follow speed if `cluster.batch_size` is not set.

        More than a worker's batch is cut into micro-batches.
        """
        return False

    @classmethod
    def on(cls, plane: str | None) -> Mapping[str, FieldInfo]:
        """Return the options that have an effect on this plane; None: on any."""
        unused = {"mesh": cls.only_elastic, "elastic": cls.only_mesh}.get(plane or "", frozenset())
        return {key: field for key, field in cls.model_fields.items() if key not in unused}

    def without_effect(self) -> frozenset[str]:
        """Return the options that have no effect given the values of others."""
        return frozenset()


@dataclass(frozen=True, slots=True)
class Written:
    """In the type of an option: the type in a configuration file, where that allows more."""

    type: Any


_CODECS_WITH: Mapping[str, frozenset[str]] = {
    "codec_fraction": frozenset({"topk", "randk"}),
    "codec_rank": frozenset({"powersgd"}),
    "codec_k": frozenset({"blocktopk"}),
    "codec_bits": frozenset({"blocktopk"}),
}


class CodecOptions(Options):
    """Of strategies that encode gradients."""

    codec: Codec = Field("fp32", description="how gradients are encoded on the wire")
    codec_fraction: Annotated[float, Field(gt=0.0, le=1.0), NotBool] = Field(
        0.01, description="topk, randk: share of the numbers that is sent"
    )
    codec_rank: Count = Field(2, description="powersgd: rank of the approximation")
    codec_k: Annotated[int, Field(ge=1, le=4096), NotBool] = Field(
        64, description="blocktopk: numbers sent of each block of 4096"
    )
    codec_bits: Annotated[int, Field(ge=0, le=8), NotBool] = Field(
        2, description="blocktopk: bits of a number that is sent; 0: bf16"
    )
    use_quantization: bool = Field(False, description="8-bit gradients; the same as codec: int8")

    @property
    def chosen(self) -> str:
        """Return the name of the codec in use."""
        return "int8" if self.use_quantization else self.codec

    def without_effect(self) -> frozenset[str]:
        unused = {key for key, codecs in _CODECS_WITH.items() if self.chosen not in codecs}
        return super().without_effect() | unused


class ExchangeOptions(CodecOptions):
    """Of strategies whose workers all-reduce gradients or pseudo-gradients."""

    only_elastic = frozenset({"step_timeout", *CodecOptions.model_fields})
    bucket_mb: Positive = Field(25.0, description="size of a gradient bucket, in MiB")
    step_timeout: Positive | None = Field(
        None,
        description="seconds that a worker may compute while others wait, until it is evicted; null: from measured step times",
    )


class Streaming(NamedTuple):
    """How a model is exchanged in fragments, and overlapped with computing."""

    fragments: int = 1
    overlap: int = 0  # steps from a contribution until its result is applied
    mixing: float = 1.0  # share of the result in the weights then
    eager: bool = False  # a worker takes its own part of the outer step at once

    @property
    def streams(self) -> bool:
        """Whether a worker's weights may differ from the common ones after an exchange."""
        return self != Streaming()


class RoundOptions(ExchangeOptions):
    """Of strategies with local steps between exchanges."""

    @property
    @abstractmethod
    def steps_per_round(self) -> int:
        """Return how many local steps a worker does between two exchanges of the whole model."""

    @property
    def streaming(self) -> Streaming:
        return Streaming()

    @property
    def equal_time(self) -> bool:
        """Whether the workers of a round take the number of steps that each has time for, instead of the same number."""
        return False


class LocalStepOptions(RoundOptions):
    local_steps: Count = Field(10, description="local steps of a worker between two exchanges")

    @property
    def steps_per_round(self) -> int:
        return self.local_steps


# Options that are set override them.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "lan": {"codec": "int4", "outer_lr": 0.7, "outer_momentum": 0.9},
    "wan": {
        "codec": "blocktopk",
        "codec_bits": 2,
        "codec_k": 128,
        "inner_steps": 15,
        "outer_lr": 0.9,
        "outer_momentum": 0.5,
    },
}
_OF_OTHER_CODECS = frozenset({"codec_fraction", "codec_rank"})
_IN_PLACE_OF_A_PRESET = frozenset({"preset", *CodecOptions.model_fields, "outer_lr", "outer_momentum", "nesterov"})


INNER_STEPS = 30


class DiLoCoOptions(RoundOptions):
    only_elastic = frozenset({"step_timeout", "quorum", "offline", "max_rounds_apart"}) | _OF_OTHER_CODECS
    only_mesh = _OF_OTHER_CODECS
    preset: Annotated[Literal["lan", "wan"], Lower] | None = Field(
        None,
        description="lan: codec int4; wan: codec blocktopk with 2 bits, codec_k 128, inner_steps 15, outer_lr 0.9, "
        "outer_momentum 0.5; other options override it; null, without codec and outer options: picked by the measured link",
    )
    inner_steps: Count | Auto = Field(
        INNER_STEPS,
        description="local steps of a worker between two exchanges; auto (elastic plane): 30 on the machine of median "
        "speed, on others the number that fits into the same time",
    )
    outer_lr: Positive = Field(0.7, description="learning rate of the outer optimizer")
    outer_momentum: BelowOne = Field(0.9, description="momentum of the outer optimizer; 0: plain SGD")
    nesterov: bool = Field(True, description="Nesterov momentum in the outer optimizer")
    average: Annotated[Literal["senders", "all"], Lower] = Field(
        "senders", description="blocktopk: a number is averaged over the workers that sent it, or over all"
    )
    feedback_decay: Fraction = Field(
        0.95, description="lossy codecs: share of the encoding error that is added to the next round"
    )
    fragments: Count = Field(
        1, description="pieces of strided layers that are exchanged in turn, each once in inner_steps steps"
    )
    overlap: Natural = Field(0, description="steps that a worker computes during an exchange; 0: it waits")
    mixing: Fraction | None = Field(
        None, description="share of the result in the weights when it arrives; null: 0.5 with overlap, 1 without"
    )
    eager: bool = Field(
        False,
        description="results arrive inner_steps steps later, and each worker takes the outer step of its own part at once",
    )
    offline: bool = Field(
        False, description="a worker that loses the coordinator trains on alone, and its work is merged when it returns"
    )
    max_rounds_apart: Count = Field(
        10,
        description="offline: rounds that a worker may be apart; then it stops training, and older work is dropped",
    )
    quorum: Fraction = Field(
        0.5,
        description="a round commits without members that are late if more than this share of them has contributed; 1: it "
        "waits for all, as with overlap and eager",
    )
    inner: Annotated[Literal["single", "fsdp"], Lower] = Field(
        "single", description="what trains between exchanges: each worker, or sites of several, sharded (mesh plane)"
    )
    inner_size: Count | None = Field(None, description="inner fsdp: consecutive workers of a site; null: of a machine")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        preset = given.get("preset") if isinstance(given, dict) else None
        return {**PRESETS.get(preset.lower(), {}), **given} if isinstance(preset, str) else given

    @property
    def picks_preset(self) -> bool:
        return not self.model_fields_set & _IN_PLACE_OF_A_PRESET

    @field_validator("codec")
    @classmethod
    def _codec(cls, codec: str) -> str:
        known = ("fp32", "bf16", "int8", "int4", "blocktopk")
        if codec not in known:
            raise ValueError(f"diloco takes one of {', '.join(known)}")
        return codec

    @model_validator(mode="after")
    def _streaming(self) -> Self:
        steps = self.steps_per_round
        if steps % self.fragments:
            fitting = steps + self.fragments - steps % self.fragments
            raise ValueError(
                f"strategy.fragments is {self.fragments}, which must divide strategy.inner_steps, {steps}; set inner_steps to "
                f"{fitting}, or fragments to a number that divides {steps}"
            )
        if self.eager and self.mixing is not None:
            raise ValueError("strategy.mixing has no effect with strategy.eager; leave out one of them")
        if self.eager and self.overlap not in (0, steps):
            raise ValueError(
                f"strategy.overlap is {self.overlap}; with strategy.eager it is strategy.inner_steps, {steps}: leave it out"
            )
        if self.overlap >= steps and not self.eager:
            raise ValueError(f"strategy.overlap is {self.overlap}; it must be less than strategy.inner_steps, {steps}")
        if (self.overlap or self.eager) and self.equal_time:
            raise ValueError(
                f"strategy.{'eager' if self.eager else 'overlap'} counts steps that are equally long on no two machines with "
                f"strategy.inner_steps auto; set inner_steps to a number, such as {INNER_STEPS}"
            )
        if self.offline and (self.overlap or self.eager):
            raise ValueError("strategy.offline needs rounds that are waited for: leave out strategy.overlap and eager")
        if self.inner == "fsdp" and (self.fragments > 1 or self.overlap or self.eager or self.mixing is not None):
            raise ValueError(
                "strategy.inner fsdp exchanges the whole model and waits: leave out strategy.fragments, overlap, mixing "
                "and eager"
            )
        if self.inner == "fsdp" and self.equal_time:
            raise ValueError(
                f"strategy.inner fsdp needs a number as strategy.inner_steps, such as {INNER_STEPS}, not auto"
            )
        return self

    @property
    def equal_time(self) -> bool:
        return self.inner_steps == "auto"

    @property
    def streaming(self) -> Streaming:
        if self.eager:
            return Streaming(self.fragments, self.steps_per_round, 0.0, eager=True)
        mixing = (0.5 if self.overlap else 1.0) if self.mixing is None else self.mixing
        return Streaming(self.fragments, self.overlap, mixing)

    @property
    def steps_per_round(self) -> int:
        return INNER_STEPS if self.inner_steps == "auto" else self.inner_steps

    def without_effect(self) -> frozenset[str]:
        unused = {
            "average": self.chosen != "blocktopk",
            "feedback_decay": self.chosen == "fp32",
            "nesterov": self.outer_momentum == 0,
            "quorum": self.quorum < 1 and self.streaming.overlap > 0,
            "max_rounds_apart": not self.offline,
            "inner_size": self.inner != "fsdp",
        }
        return super().without_effect() | {key for key, is_unused in unused.items() if is_unused}


class AllReduceOptions(ExchangeOptions):
    only_elastic = frozenset({"on_stale"}) | ExchangeOptions.only_elastic
    staleness_bound: Natural = Field(0, description="averaged gradients in flight; 0: synchronous")
    on_stale: Annotated[Literal["drop", "stop"], Lower] = Field(
        "drop", description="gradients that arrive too late to be used: drop them, or stop this worker"
    )


def _stage_name(value: Any) -> Any:
    stages = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": "HYBRID_SHARD"}
    return stages.get(value.upper(), value) if isinstance(value, str) else value


_Stage = Annotated[int, Field(ge=0, le=3), NotBool]
_StageOrName = Annotated[
    _Stage | Literal["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"], BeforeValidator(_stage_name)
]
Stage = Annotated[_Stage, Written(_StageOrName)]  # of ZeRO, or its name in FSDP


class ShardOptions(Options):
    """Of strategies that shard optimizer state, gradients and parameters along the data axis (ZeRO)."""

    fsdp_stage: Stage = Field(
        3, description="ZeRO stage: what is sharded; 0 nothing, 3 all; HYBRID_SHARD: stage 3 with shard_size node"
    )
    shard_size: Count | Annotated[Literal["node"], Lower] | None = Field(
        None, description="hybrid: workers that share one set of shards; node: those of a machine; null: all of them"
    )
    bucket_mb: Positive = Field(25.0, description="stages 0, 1: size of a gradient bucket, in MiB")
    param_dtype: Dtype | None = Field(
        None, description="dtype in which parameters are sent and used; null: training.precision, in stage 1 fp32"
    )
    reduce_dtype: Dtype | None = Field(
        None, description="stages 2, 3: dtype in which gradients are averaged; null: fp32"
    )
    buffer_dtype: Dtype | None = Field(None, description="stages 2, 3: dtype of buffers; null: that of the model")
    cpu_offload: bool = Field(False, description="stages 2, 3 on a GPU: keep shards and optimizer state in CPU memory")
    prefetch: Natural = Field(1, description="stage 3: blocks that are gathered ahead of the one in use")

    @model_validator(mode="before")
    @classmethod
    def _hybrid(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("fsdp_stage") == "HYBRID_SHARD":
            return {"shard_size": "node"} | given | {"fsdp_stage": 3}
        return given


class FSDPOptions(ShardOptions, AllReduceOptions):
    only_elastic = frozenset({"staleness_bound"}) | AllReduceOptions.only_elastic
    only_mesh = frozenset(ShardOptions.model_fields) - {"fsdp_stage", "bucket_mb"}


class ElasticFSDPOptions(FSDPOptions):
    fsdp_stage: Stage = Field(1, description="0: all-reduce on full replicas; 1: optimizer states sharded")
    bucket_mb: Positive = Field(25.0, description="size of a gradient bucket, in MiB")


class PipelineOptions(Options):
    schedule: str = Field("1f1b", description=f"one of {', '.join(SCHEDULES)}")
    num_microbatches: Count | None = Field(
        None,
        description="micro-batches of a batch, whose size they must divide; null: the most that do, up to twice the stages",
    )
    stages_per_rank: Count = Field(2, description="interleaved, zero-bubble: stages on each rank")
    layer_distribution: list[Count] | Auto | None = Field(
        None, description="layers of each stage; auto: by measured speed and memory; null: evenly"
    )
    draw_schedule: bool = Field(
        False, description="write schedule.svg, the timeline of one step, into the run directory"
    )


class TensorOptions(Options):
    sequence_parallel: bool = Field(True, description="shard the residual stream between layers along the sequence")
    tp: Count | None = Field(None, description="ranks that share a layer; null: all")


class MeshOptions(PipelineOptions, ShardOptions):
    fsdp_stage: Stage = Field(0, description="ZeRO stage along dp: what is sharded; 0 nothing, 3 all")
    dp: Count | None = Field(None, description="data-parallel ranks; null: the ranks that tp, pp and cp leave")
    tp: Count = Field(1, description="tensor-parallel ranks, which share each layer")
    sequence_parallel: bool = Field(True, description="shard the residual stream between layers along the sequence")
    pp: Count = Field(1, description="pipeline-parallel ranks, which have different layers")
    cp: Count = Field(1, description="context-parallel ranks, which share each sequence")


class ServedOptions(CodecOptions):
    """Of strategies with a parameter server."""

    worker_update_interval: Count = Field(10, description="steps between pulls of the server's weights")
    bucket_mb: Positive = Field(4.0, description="size of a gradient bucket, in MiB")


class SyncPSOptions(ServedOptions):
    worker_update_interval: Count = Field(4, description="steps between pulls of the server's weights")
    polyak_alpha: Fraction = Field(
        1.0, description="weight of the server's weights in a pull; the rest is the worker's"
    )
    timeout: Positive = Field(10.0, description="seconds to wait for the others after the first gradient of a step")


class EDPOptions(ServedOptions):
    staleness_weighting: Annotated[Literal["inverse", "none"], Lower] = Field(
        "inverse", description="inverse: a gradient s versions old has weight 1/(1+s); none: all have weight 1"
    )
    staleness_bound: Natural | None = Field(None, description="refuse gradients older than this; null: accept any age")
    server_batch: Count | None = Field(
        None, description="samples in an update of the server; null: those that all live workers read in one step"
    )
    balance: bool = Field(
        True,
        description="the samples of a worker's step follow its measured speed, in micro-batches of at most its batch size; "
        "false, or with server_batch: all take their batch size",
    )
    max_wait: NonNegative = Field(
        2.0,
        description="times its own step: how long a worker waits for the update with its gradient; 0, or interval 1: never",
    )

    @property
    def balanced(self) -> bool:
        return self.balance and self.server_batch is None
