"""The cost of encoded tensors: in rounds between workers (`comm/encoded_sum.py`) and with a parameter server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from smolcluster.comm.codecs import Codec, chosen_codec, make_codec
from smolcluster.comm.contributions import buckets_of
from smolcluster.comm.encoded_sum import messages_of, rows_of, shares
from smolcluster.config.options import ExchangeOptions, ServedOptions
from smolcluster.parallel.placement import Cost, Node, Placement, Shape, with_coordinator, worker_on_each
from smolcluster.parallel.shards import backed_up_by, owners


def summed_by_workers(
    options: ExchangeOptions, nodes: Sequence[Node], shape: Shape | None, *, rounds: int, encoded: bool = False
) -> Placement:
    """Plan a whole model on every node with all-reduced gradients; on the elastic plane encoded, if there is a codec.

    `rounds`: in flight, with the one that is computed. `encoded`: on the mesh plane too. Without tensor shapes, each worker
    owns one tensor of equal size.
    """
    codec, n = chosen_codec(options), len(nodes)
    seats = worker_on_each(nodes)
    if shape is None:
        return with_coordinator(Placement(seats=seats), nodes, shape)
    size = shape.parameter_bytes
    moved = 2 * (n - 1) * size // n
    cost = Cost(
        parameter_bytes=size,
        gradient_bytes=size * rounds,
        optimizer_bytes=shape.optimizer_bytes(size),
        bytes_sent=moved,
        bytes_received=moved,
        messages=2 * (n - 1) * max(1, round(size / (options.bucket_mb * 2**20))),
    )
    placement = with_coordinator(Placement(seats=seats, costs=[cost] * n), nodes, shape)
    if codec.lossless or (all(node.stays for node in nodes) and not encoded):
        return placement
    return _through_owners(placement, codec, _tensors(shape, n), rounds=rounds)


def gathered_by_workers(
    options: ExchangeOptions, nodes: Sequence[Node], shape: Shape | None, *, senders: bool = False
) -> Placement:
    """Plan a whole model on every node; contributions go encoded to all others (`comm/gathered_mean.py`).

    `senders`: a number is averaged over those that sent it, who are counted.
    """
    codec, n, seats = chosen_codec(options), len(nodes), worker_on_each(nodes)
    if shape is None:
        return with_coordinator(Placement(seats=seats), nodes, shape)
    size, dense = shape.parameter_bytes, 4 * shape.parameters
    encoded = sum(map(codec.nbytes, _tensors(shape, n)))
    cost = Cost(
        parameter_bytes=size,
        gradient_bytes=(1 + 2 * codec.feedback + senders) * dense + (n + 2) * encoded,
        optimizer_bytes=shape.optimizer_bytes(size),
        bytes_sent=(n - 1) * encoded,
        bytes_received=(n - 1) * encoded,
        messages=(n - 1) * messages_of(encoded),
    )
    return with_coordinator(Placement(seats=seats, costs=[cost] * n), nodes, shape)


def _through_owners(placement: Placement, codec: Codec, tensors: Sequence[Sequence[int]], *, rounds: int) -> Placement:
    """Return the placement with the costs of `comm/encoded_sum.py`."""
    n, sizes = len(placement.costs), [codec.nbytes(tensor) for tensor in tensors]
    rows, owned, dense = rows_of(owners(sizes, n), n), shares(sizes, owners, n), 4 * sum(map(math.prod, tensors))
    # Send to each owner its tensors of each bucket, then the means of owned tensors to all others.
    buckets = buckets_of(sizes, n)
    parts = [
        sum(messages_of(sum(sizes[j] for j in bucket if j in row)) for bucket in buckets) for row in map(set, rows)
    ]
    residuals = (rounds + 1) * dense if codec.feedback else 0
    costs = []
    for cost, own, mine in zip(placement.costs, owned, parts, strict=True):
        moved = sum(sizes) + (n - 2) * own if n > 1 else 0
        costs.append(
            replace(
                cost,
                gradient_bytes=rounds * (dense + 2 * sum(sizes) + (n - 1) * own) + residuals,
                bytes_sent=moved,
                bytes_received=moved,
                messages=sum(parts) - mine + (n - 1) * messages_of(own) + (2 if placement.server else 0),
            )
        )
    return replace(placement, costs=costs)


def sharded_traffic(codec: Codec, shape: Shape, n: int) -> list[tuple[int, int]]:
    """Return what each of n workers sends and receives where every parameter has an owner and a backup (`owned_sum.py`)."""
    tensors = _tensors(shape, n)
    counts = list(map(math.prod, tensors))
    share = max(shares(counts, owners, n)) * shape.bytes_per_parameter
    if codec.lossless:
        return [((2 * n - 1) * share, (2 * n - 1) * share)] * n
    owned = [sum(codec.nbytes(tensors[j]) for j in row) for row in rows_of(owners(counts, n), n)]
    wanted = [owned[place] + owned[backed_up_by(place, n)] for place in range(n)]
    return [(sum(wanted) - wanted[me] + (n - 1) * share, (n - 1) * (wanted[me] + share)) for me in range(n)]


def bytes_on_the_wire(options: ServedOptions, shape: Shape) -> tuple[int, int]:
    """Return the bytes of the encoded gradients and of the weights. Without tensor shapes, all are one row."""
    tensors = shape.tensors or [(shape.parameters,)]
    return sum(map(chosen_codec(options).nbytes, tensors)), sum(map(make_codec("fp32").nbytes, tensors))


def server_cost(options: ServedOptions, shape: Shape, *, workers: int, pushes: int, record_bytes: int) -> Cost:
    """Return the cost of a parameter server: model, optimizer, pushes, average and sent average, the evaluator's weights, and
    copies for a checkpoint and for a journal snapshot.

    `pushes`: held at a time, arriving ones included. They are kept encoded where that is smaller, with one more set of
    gradients to decode into. `record_bytes`: what a step adds to the journal.
    """
    size, gradients = shape.parameter_bytes, bytes_on_the_wire(options, shape)[0]
    decoded = 4 * shape.parameters
    return Cost(
        parameter_bytes=4 * size,
        gradient_bytes=pushes * min(gradients, decoded) + gradients + (2 * decoded if gradients < decoded else 0),
        optimizer_bytes=3 * shape.optimizer_bytes(size),
        bytes_sent=workers * gradients,
        bytes_received=workers * gradients,
        journal_bytes=record_bytes,
    )


def _tensors(shape: Shape, n: int) -> Sequence[Sequence[int]]:
    """Return the tensor shapes; where unknown, one tensor of equal size per worker."""
    return shape.tensors or [(-(-shape.parameters // n),)] * n
