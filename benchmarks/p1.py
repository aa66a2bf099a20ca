"""P1: the sum of 1, 4 and 40 MB of fp32 over N hosts, over limited links.

Compared: gloo's all_reduce against ours over the elastic transport, with a cluster token (TLS 1.3) and, beside it,
without. Every host is a network namespace with one process and one thread for computing; `tc tbf` limits its link in both
directions (root needed).

How: one world of N processes has all groups; variants take turns, a barrier before each; a sample is the slowest rank's
seconds for one sum, and every sum is checked. gloo runs a second time as another variant: that is the noise.

The line: a ring sends 2 (N-1)/N S bytes over every host's link, and TCP leaves 95.6 % of a line for the payload. CPU seconds
are those of all ranks together for each GB that all ranks together sent.

Target: at least 0.94 of the line at 100 Mbit/s; 0.85 at 1 Gbit/s with 40 MB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Comparison, Measured, Session, Target, Variant
from benchmarks.harness.network import RATES, Network, hosts, measured_rate
from benchmarks.harness.pipes import Message
from benchmarks.harness.world import World, serve
from smolcluster.comm.elastic.collectives.peers import Peers
from smolcluster.comm.elastic.transport.api import Peer
from smolcluster.comm.elastic.transport.security import Keyring, new_token
from smolcluster.comm.elastic.transport.tcp import TcpTransport
from smolcluster.comm.group import Group, gather_json
from smolcluster.comm.view import View, ViewMember
from smolcluster.errors import SmolclusterError

EXAMPLE = "python -m benchmarks p1 --link 1gbit --workers 4 --megabytes 40"
OF_THE_LINE = 0.956  # Ethernet, IP and TCP headers take the rest
TARGETS = {"100mbit": 0.94, "1gbit": 0.85}
SUMS = {1: 8, 4: 4, 40: 1}  # per sample, one after the other
GLOO, TLS, PLAIN, AGAIN = "gloo", "ours, TLS", "ours, plain", "gloo again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--link", choices=list(RATES), nargs="+", default=list(RATES), help="default: both")
    parser.add_argument("--workers", type=int, nargs="+", help="world sizes (default: 2 4; quick: 2)")
    parser.add_argument("--megabytes", type=int, choices=list(SUMS), nargs="+", help="default: all; quick: 1")


def run(session: Session, arguments: argparse.Namespace) -> None:
    sizes = arguments.workers or ([2] if session.quick else [2, 4])
    amounts = arguments.megabytes or ([1] if session.quick else list(SUMS))
    session.parameters = {"threads": 1, "of_the_line": OF_THE_LINE, "link_measured_mbit_per_s": {}}
    for link in arguments.link:
        for size in sizes:
            with hosts(size, rate=link) as network:
                measured = round(measured_rate(network) / 1e6, 1)
                session.parameters["link_measured_mbit_per_s"][f"{link}, {size} hosts"] = measured
                with World("benchmarks.p1", size=size, spec=_spec(network), network=network) as world:
                    for megabytes in amounts:
                        _compare(session, world, link=link, megabytes=megabytes)


def _spec(network: Network) -> dict[str, Any]:
    addresses = [network.address(host) for host in range(network.count)]
    return {"addresses": addresses, "token": new_token()}


def line_seconds(link: str, size: int, nbytes: int) -> float:
    """Return the least time of one sum at the line rate."""
    return 2 * (size - 1) / size * nbytes / (RATES[link] / 8 * OF_THE_LINE)


def _compare(session: Session, world: World, *, link: str, megabytes: int) -> None:
    least_s, size = line_seconds(link, world.size, megabytes * 1_000_000), world.size
    bounded = link == "100mbit" or megabytes == 40
    target = Target(limit=least_s / TARGETS[link], of="median") if bounded else None
    comparison = Comparison(
        name=f"{size} hosts, {link}, {megabytes} MB of fp32: time of a sum",
        variants=[
            Variant(name=GLOO, run=_sums(world, GLOO, megabytes), role="peer"),
            Variant(name=TLS, run=_sums(world, TLS, megabytes), target=target),
            Variant(name=PLAIN, run=_sums(world, PLAIN, megabytes), role="extra"),
            Variant(name=AGAIN, run=_sums(world, GLOO, megabytes), role="noise"),
        ],
        rounds=1,
        parameters={"workers": size, "link": link, "megabytes": megabytes, "line_s": least_s},
    )
    measured = session.compare(comparison)
    _add_figures(measured, least_s)


def _add_figures(measured: Measured, least_s: float) -> None:
    """Add the share of the line rate that was reached, and its cost in CPU time."""
    parameters = measured.comparison.parameters
    names = [name for name in measured.samples if name != AGAIN]
    parameters["of_line"] = {name: least_s / measured.median(name) for name in names}
    parameters["cpu_s_per_gb"] = {name: statistics.median(measured.beside[name]) for name in names}
    parameters["cpu_s_per_gb_samples"] = measured.beside
    for name in names:
        of_line, seconds = parameters["of_line"][name], parameters["cpu_s_per_gb"][name]
        print(f"  {name:<12} {of_line:.3f} of the line, {seconds:.2f} CPU s per GB", flush=True)
    print(flush=True)


def _sums(world: World, variant: str, megabytes: int) -> Callable[[], tuple[float, float]]:
    """Return seconds for one sum, and CPU seconds for each GB that was sent."""

    def sample() -> tuple[float, float]:
        count = SUMS[megabytes]
        answers = world.ask({"variant": variant, "megabytes": megabytes, "sums": count})
        gigabytes = count * 2 * (world.size - 1) * megabytes / 1000
        return max(float(a["seconds"]) for a in answers) / count, sum(a["cpu_s"] for a in answers) / gigabytes

    return sample


# One rank


def make_group(spec: Message, group: Group, *, keyring: Keyring | None) -> Group:
    """The group of a view of all ranks, made as in a run."""
    rank = group.rank
    me = Peer(role="worker", rank=rank, host=f"host{rank}", instance=f"{rank:016x}")
    peers = Peers(TcpTransport(me, keyring=keyring))
    address = peers.listen(spec["addresses"][rank], 0)
    members = [ViewMember(r, f"{r:016x}", f"host{r}", a) for r, a in enumerate(gather_json(group, address))]
    made = peers.form(View(1, 0, tuple(members)))
    made.barrier()
    return made


def setup(spec: Message, group: Group) -> Callable[[Message], Message]:
    torch.set_num_threads(1)
    groups = {
        GLOO: group,
        TLS: make_group(spec, group, keyring=Keyring([spec["token"]])),
        PLAIN: make_group(spec, group, keyring=None),
    }

    def handle(message: Message) -> Message:
        chosen = groups[message["variant"]]
        tensors = [torch.full((message["megabytes"] * 250_000,), group.rank + 1.0) for _ in range(message["sums"])]
        group.barrier()
        chosen.barrier()
        cpu, started = time.process_time(), time.perf_counter()
        for tensor in tensors:
            chosen.all_reduce(tensor).wait()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        expected = group.size * (group.size + 1) / 2
        if not all(bool(tensor.eq(expected).all()) for tensor in tensors):
            raise SmolclusterError(f"{message['variant']} gave a wrong sum")
        return {"seconds": seconds, "cpu_s": cpu}

    return handle


if __name__ == "__main__":
    serve(setup)
