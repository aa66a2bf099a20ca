"""Rules between keys, which no single field can check. Each names the keys it concerns and says how to mend it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from smolcluster.config.schema import Config
from smolcluster.config.tree import KeyPath


class Conflict(NamedTuple):
    """Keys that do not go together. The first that the user wrote is where the error points."""

    paths: tuple[KeyPath, ...]
    text: str


def conflicts(config: Config) -> Iterator[Conflict]:
    """Everything in a valid `Config` that cannot run."""
    if config.model.type == "gpt":
        yield from _shape(config)
    yield from _rates(config)
    yield from _machines(config)
    yield from _codec(config)


def _shape(config: Config) -> Iterator[Conflict]:
    model = config.model
    dim, heads, kv_heads = ("model", "model_dim"), ("model", "num_heads"), ("model", "num_kv_heads")
    if model.model_dim % model.num_heads:
        text = f"model.num_heads = {model.num_heads}: must divide model.model_dim = {model.model_dim}"
        yield Conflict((heads, dim), text)
    elif model.position == "rotary" and model.model_dim // model.num_heads % 2:
        text = (
            f"model.num_heads = {model.num_heads}: rotary positions need an even head size, "
            f"but model.model_dim / num_heads = {model.model_dim // model.num_heads}"
        )
        yield Conflict((heads, dim, ("model", "position")), text)
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        text = f"model.num_kv_heads = {model.num_kv_heads}: must divide model.num_heads = {model.num_heads}"
        yield Conflict((kv_heads, heads), text)
    stages = config.strategy.layer_distribution
    if isinstance(stages, list) and config.task in (None, "gpt") and sum(stages) != model.num_layers:
        text = f"strategy.layer_distribution = {stages}: sums to {sum(stages)}, not to model.num_layers = "
        yield Conflict((("strategy", "layer_distribution"), ("model", "num_layers")), f"{text}{model.num_layers}")


def _rates(config: Config) -> Iterator[Conflict]:
    peak, low = config.training.learning_rate, config.lr_schedule.min_lr
    if low is not None and low > peak:
        text = f"lr_schedule.min_lr = {low:g}: must not exceed training.learning_rate = {peak:g}; null means a tenth"
        yield Conflict((("lr_schedule", "min_lr"), ("training", "learning_rate")), text)


def _machines(config: Config) -> Iterator[Conflict]:
    cluster = config.cluster
    if cluster.host_ip:
        known = ", ".join(sorted(cluster.host_ip))
        named: list[tuple[KeyPath, str, str]] = [
            (("cluster", "workers", i), f"cluster.workers[{i}]", host) for i, host in enumerate(cluster.workers)
        ]
        if cluster.server is not None:
            named.append((("cluster", "server"), "cluster.server", cluster.server))
        for path, name, host in named:
            if host not in cluster.host_ip:
                yield Conflict((path,), f"{name} '{host}' is not in host_ip; known: {known}")

    if cluster.num_workers is not None and cluster.workers and cluster.num_workers != len(cluster.workers):
        text = (
            f"cluster.num_workers = {cluster.num_workers}: but workers lists {len(cluster.workers)} "
            f"({', '.join(cluster.workers)}); make them agree, or set cluster.workers to null"
        )
        yield Conflict((("cluster", "num_workers"), ("cluster", "workers")), text)

    hosts = {*cluster.host_ip, *cluster.workers}
    batch_sizes = cluster.batch_size if isinstance(cluster.batch_size, dict) else {}
    for key, per_host in (("batch_size", batch_sizes), ("buffer_size", cluster.buffer_size)):
        for host in per_host:
            if hosts and host not in hosts:
                text = f"cluster.{key}: '{host}' is not a host here; known: {', '.join(sorted(hosts))}"
                yield Conflict((("cluster", key, host),), text)


def _codec(config: Config) -> Iterator[Conflict]:
    strategy = config.strategy
    if strategy.use_quantization and strategy.codec not in (None, "int8"):
        text = f"strategy.codec = '{strategy.codec}': use_quantization: true means int8; leave one of them out"
        yield Conflict((("strategy", "codec"), ("strategy", "use_quantization")), text)
