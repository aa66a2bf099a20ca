"""Rules between keys, which no single field can check. Each error names its keys and the remedy."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import ValidationError

from smolcluster.config.describe import reason, show
from smolcluster.config.schema import ClusterConfig, Config, split_best
from smolcluster.config.shape import shape_of
from smolcluster.config.strategies import find_record
from smolcluster.config.tree import KeyPath
from smolcluster.models.registry import ARCHITECTURES

_CLUSTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Conflict(NamedTuple):
    """Keys that are not valid together. The error points at the one given last."""

    paths: tuple[KeyPath, ...]
    text: str


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield every conflict in a `Config` whose fields are valid by themselves."""
    if config.model.type in ARCHITECTURES:
        yield from _shape(config)
    yield from _rates(config)
    yield from _evaluation(config)
    yield from _machines(config)
    yield from _hosts(config.cluster)
    yield from _links(config.cluster)
    yield from _codec(config)
    yield from _options(config)


def _shape(config: Config) -> Iterator[Conflict]:
    model = config.model
    try:
        shape_of(model, vocab_size=model.vocab_size or 1)
    except ValueError as error:
        named = re.findall(r"\w+", str(error))
        paths: list[KeyPath] = [("model", key) for key in type(model).model_fields if key in named]
        yield Conflict((*paths, ("model", "type")), f"model: {error}")
    stages = config.strategy.given().get("layer_distribution")
    if isinstance(stages, list) and config.task in (None, "gpt") and sum(stages) != model.num_layers:
        text = f"strategy.layer_distribution = {stages}: sums to {sum(stages)}, not to model.num_layers = "
        yield Conflict((("strategy", "layer_distribution"), ("model", "num_layers")), f"{text}{model.num_layers}")


def _rates(config: Config) -> Iterator[Conflict]:
    peak, low = config.training.learning_rate, config.lr_schedule.min_lr
    if low is not None and low > peak:
        text = f"lr_schedule.min_lr = {low:g}: must not exceed training.learning_rate = {peak:g}; null means a tenth"
        yield Conflict((("lr_schedule", "min_lr"), ("training", "learning_rate")), text)


def _evaluation(config: Config) -> Iterator[Conflict]:
    name, mode = split_best(config.training.best)
    if not name or " " in name or mode not in ("min", "max"):
        text = f"training.best = '{config.training.best:.80}': name a metric, and min or max, as in 'accuracy, max'"
        yield Conflict((("training", "best"),), text)
    samples, batches = config.training.eval_samples, config.training.eval_batches
    if samples is not None and batches is not None:
        text = f"training.eval_batches = {batches}: and training.eval_samples = {samples}; leave eval_batches out"
        yield Conflict((("training", "eval_batches"), ("training", "eval_samples")), text)


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


def _hosts(cluster: ClusterConfig) -> Iterator[Conflict]:
    hosts, known = cluster.hosts, ", ".join(sorted(cluster.hosts))
    if cluster.name is not None and not _CLUSTER_NAME.fullmatch(cluster.name):
        text = f"cluster.name = '{cluster.name[:80]}' is no name for a cluster; use letters, digits, '-' and '_'"
        yield Conflict((("cluster", "name"),), text)
    if not hosts:
        return
    if cluster.server is not None and cluster.server not in hosts:
        yield Conflict((("cluster", "server"),), f"cluster.server '{cluster.server}' is not in hosts; known: {known}")
    places: dict[tuple[str, int | None], str] = {}
    for name, host in hosts.items():
        path: KeyPath = ("cluster", "hosts", name)
        if not HOST_NAME.fullmatch(name):
            text = f"cluster.hosts: '{name}' is no name for a host; use letters, digits, '-', '_' and '.'"
            yield Conflict((path,), text)
        if host.via is not None and (host.via not in hosts or name in _way(cluster, host.via)):
            why = "is not in hosts" if host.via not in hosts else "leads back to itself"
            yield Conflict(((*path, "via"),), f"cluster.hosts.{name}.via '{host.via}' {why}; known: {known}")
        for variable, value in host.environment.items():
            if not _VARIABLE.fullmatch(variable) or "\0" in value:
                text = (
                    f"cluster.hosts.{name}.environment: '{variable[:80]}' is no variable; use letters, digits and '_'"
                )
                yield Conflict(((*path, "environment"),), text)
        place = (host.address or name, host.port)
        if place[0] != "local" and (other := places.setdefault(place, name)) != name:
            text = f"cluster.hosts: '{other}' and '{name}' have one address, {place[0]}; use `workers: 2` for two on a machine"
            yield Conflict((path,), text)


def _way(cluster: ClusterConfig, via: str) -> list[str]:
    """Return the ssh jump hosts to one, from the last to the first; stops at a cycle."""
    passed: list[str] = []
    while via in cluster.hosts and via not in passed:
        passed.append(via)
        via = cluster.hosts[via].via or ""
    return [*passed, via]


def _links(cluster: ClusterConfig) -> Iterator[Conflict]:
    known = ", ".join(sorted(cluster.hosts))
    for name, link in cluster.links.items():
        path: KeyPath = ("cluster", "links", name)
        try:
            subnet = None if link.subnet is None else ipaddress.ip_network(link.subnet, strict=False)
        except ValueError:
            text = f"cluster.links.{name}.subnet '{link.subnet}' is no subnet; write it as 10.10.0.0/24"
            yield Conflict(((*path, "subnet"),), text)
            continue
        seen: dict[str, str] = {}
        for host, address in link.hosts.items():
            here = (*path, "hosts", host)
            if host not in cluster.hosts:
                yield Conflict((here,), f"cluster.links.{name}: '{host}' is not in hosts; known: {known}")
            try:
                number = ipaddress.ip_address(address)
            except ValueError:
                yield Conflict((here,), f"cluster.links.{name}: '{address}' of {host} is no IP address")
                continue
            if subnet is not None and number not in subnet:
                yield Conflict((here,), f"cluster.links.{name}: {address} of {host} is not in {link.subnet}")
            if (other := seen.setdefault(address, host)) != host:
                yield Conflict((here,), f"cluster.links.{name}: {other} and {host} have one address, {address}")


def _codec(config: Config) -> Iterator[Conflict]:
    given = config.strategy.given()
    if given.get("use_quantization") and (codec := given.get("codec")) not in (None, "int8"):
        text = f"strategy.codec = '{codec}': use_quantization: true means int8; leave one of them out"
        yield Conflict((("strategy", "codec"), ("strategy", "use_quantization")), text)


def _options(config: Config) -> Iterator[Conflict]:
    """Validate the strategy's own options, without importing its code."""
    record, given = find_record(config.strategy.name), config.strategy.given()
    made = None if record is None else record.options_on(config.cluster.plane or record.planes[0])
    if made is None:
        return
    try:
        made(**{key: value for key, value in given.items() if key in made.model_fields})
    except ValidationError as error:
        why = {str((*part["loc"], "")[0]): reason(part) for part in reversed(error.errors())}
        for key, text in why.items():
            if not key:  # of several options: the text names them
                named = [name for name in re.findall(r"\w+", text) if name in given]
                yield Conflict(tuple(path for name in named for path in _places(name)), text)
                continue
            yield Conflict(_places(key), f"strategy.{key} = {show(given.get(key, config.strategy.name))}: {text}")


def _places(option: str) -> tuple[KeyPath, ...]:
    """Return where an option may be written."""
    return ("strategy", option), ("strategy", "options", option)
