"""The options of every built-in strategy: its part of the `strategy` section, with defaults. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Codec = Literal["fp32", "bf16", "fp16", "int8", "topk", "randk", "powersgd"]
Dtype = Literal["fp32", "bf16", "fp16"]
SCHEDULES = ("sequential", "gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")


class Options(BaseModel):
    """A strategy's part of the `strategy` section, with its defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    only_elastic: ClassVar[frozenset[str]] = frozenset()  # options without effect where members stay


class AllReduceOptions(Options):
    only_elastic = frozenset({"step_timeout"})
    staleness_bound: int = Field(0, ge=0, description="averaged gradients in flight; 0 is synchronous")
    on_stale: Literal["drop", "stop"] = Field(
        "drop", description="elastic plane, for gradients that come too late to count: drop them, or stop this worker"
    )
    bucket_mb: float = Field(25.0, gt=0, description="gradients travel in buckets of this size")
    step_timeout: float | None = Field(
        None,
        gt=0,
        description="elastic plane: seconds a worker may compute while others wait, before it is evicted; null: adaptive",
    )


class ElasticFSDPOptions(AllReduceOptions):
    fsdp_stage: int = Field(1, ge=0, le=3, description="0: all-reduce on full replicas; 1: optimizer states sharded")


class FSDPOptions(Options):
    bucket_mb: float = Field(25.0, gt=0, description="stages 0, 1: gradients travel in buckets of this size")
    fsdp_stage: int = Field(3, ge=0, le=3, description="ZeRO stage: what is cut up; 0 nothing, 3 all")
    shard_size: Annotated[int, Field(ge=1)] | Literal["node"] | None = Field(
        None, description="hybrid: workers that share one set of pieces; node: those of a machine; null: all of them"
    )
    param_dtype: Dtype | None = Field(
        None, description="type that parameters are handed out and used in; null: training.precision, in stage 1 fp32"
    )
    reduce_dtype: Dtype | None = Field(None, description="stages 2, 3: type that gradients are averaged in; null: fp32")
    buffer_dtype: Dtype | None = Field(None, description="stages 2, 3: type of buffers; null: as the model has them")
    cpu_offload: bool = Field(
        False, description="stages 2, 3 on a GPU: pieces and optimizer state live in the memory of the machine"
    )
    prefetch: int = Field(1, ge=0, description="stage 3: blocks that are gathered ahead of the one in use")

    @model_validator(mode="before")
    @classmethod
    def _hybrid(cls, said: Any) -> Any:
        if isinstance(said, dict) and said.get("fsdp_stage") == "HYBRID_SHARD":
            return {"shard_size": "node"} | said | {"fsdp_stage": 3}
        return said


class PipelineOptions(Options):
    schedule: str = Field("1f1b", description=f"one of {', '.join(SCHEDULES)}")
    num_microbatches: int | None = Field(None, ge=1, description="per batch; null: twice the stages, if they divide it")
    stages_per_rank: int = Field(2, ge=1, description="interleaved, zero-bubble: pieces of the model on each rank")
    layer_distribution: list[int] | Literal["auto"] | None = Field(
        None, description="layers of each stage; auto: by measured speed and memory; null: evenly"
    )
    draw_schedule: bool = Field(False, description="write schedule.svg: who computed what when, in one step of the run")


class TensorOptions(Options):
    sequence_parallel: bool = Field(True, description="the stream between layers is cut along the sequence")
    tp: int | None = Field(None, ge=1, description="ranks that share a layer; null: all")


class MeshOptions(PipelineOptions, FSDPOptions):
    fsdp_stage: int = Field(0, ge=0, le=3, description="ZeRO stage along dp: what is cut up; 0 nothing, 3 all")
    dp: int | None = Field(None, ge=1, description="data shards; null: what tp and pp leave")
    tp: int = Field(1, ge=1, description="ranks that share each layer")
    sequence_parallel: bool = Field(True, description="tp: the stream between layers is cut along the sequence")
    pp: int = Field(1, ge=1, description="ranks that layers are dealt out to")
    cp: int = Field(1, ge=1, description="ranks that have a piece of each sequence")


class ServedOptions(Options):
    """Of strategies with a parameter server."""

    worker_update_interval: int = Field(10, ge=1, description="steps between pulls of the server's weights")
    codec: Codec = Field("fp32", description="how gradients are encoded on the wire")
    codec_fraction: float = Field(0.01, gt=0, le=1, description="topk, randk: share of the numbers that travels")
    codec_rank: int = Field(2, ge=1, description="powersgd: rank of the approximation")
    use_quantization: bool = Field(False, description="8-bit gradients; the same as codec: int8")
    bucket_mb: float = Field(4.0, gt=0, description="gradients travel in buckets of this size")


class SyncPSOptions(ServedOptions):
    worker_update_interval: int = Field(4, ge=1, description="steps between pulls of the server's weights")
    polyak_alpha: float = Field(1.0, ge=0, le=1, description="share of the server's weights in a pull")
    timeout: float = Field(10.0, gt=0, description="seconds to wait for the others after the first gradient of a step")


class EDPOptions(ServedOptions):
    staleness_weighting: Literal["inverse", "none"] = Field(
        "inverse", description="inverse: a gradient s versions old counts 1/(1+s); none: all count alike"
    )
    staleness_bound: int | None = Field(
        None, ge=0, description="refuse gradients older than this; null: any age counts"
    )
    server_batch: int | None = Field(
        None, ge=1, description="samples that make a step of the server; null: what all live workers read in one step"
    )
