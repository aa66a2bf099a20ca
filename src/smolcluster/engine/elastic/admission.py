"""Which workers may join a server's run, and how many metric rows each may send.

A worker joins with the same model, the same data and a secret that proves its instance.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smolcluster.comm.elastic.membership.roster import JoinRefused, Member
from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.messages import Peer
from smolcluster.comm.view import ViewMember
from smolcluster.engine.elastic.adopted_config import MAX_STEPS
from smolcluster.engine.identity import instance_of

MAX_LISTED = 2000  # tensors: a model with more is compared by its hash
FIRST_ROWS = 1000  # allowed beyond the number of samples: rows of refused steps
ROW_BYTES = 16 << 10
TENSOR_BYTES = 128  # of a row for each tensor: its name and gradient norm


@dataclass(frozen=True, slots=True)
class Admission:
    layout: list[list[Any]]  # of the server's model
    num_samples: int  # of its training data
    hosts: Sequence[str]  # cluster.workers
    exchanging: bool  # workers connect to each other

    def admit(self, link: Link, meta: Mapping[str, Any]) -> Member:
        """Check a JOIN and return the new member. Raises JoinRefused with the values of both sides."""
        peer = link.peer
        if peer.role != "worker":
            raise JoinRefused(f"a {peer.role} cannot join as a worker")
        secret = meta.get("secret")
        if not isinstance(secret, str) or not hmac.compare_digest(instance_of(secret).encode(), peer.instance.encode()):
            raise JoinRefused(f"it does not have the secret of instance {peer.instance}")
        listed = peer.rank < len(self.hosts)  # ranks beyond the list are open to any host
        if listed and peer.host not in self.hosts:
            raise JoinRefused(f"host '{peer.host}' is not in cluster.workers; known: {', '.join(self.hosts)}")
        difference = _difference(self.layout, meta.get("layout"))
        if difference:
            raise JoinRefused(f"its model differs: {difference}")
        if meta.get("samples") != self.num_samples:
            raise JoinRefused(
                f"it has {meta.get('samples')} training samples and the server {self.num_samples}: "
                "both need the same data and tokenizer"
            )
        size = meta.get("batch_size")
        if type(size) is not int or not 0 < size <= self.num_samples:
            raise JoinRefused(f"its batch size is {size!r}")
        if self.exchanging:
            _check_address(peer, meta.get("address"))
        step = meta.get("step")
        return Member(
            rank=peer.rank,
            link=link,
            batch_size=size,
            automatic=meta.get("automatic") is True,
            step=step if type(step) is int and 0 <= step <= MAX_STEPS else 0,
            address=str(meta.get("address", ""))[:255],
            said={key: value for key, value in meta.items() if key not in ("secret", "layout")},
        )


class RowQuota:
    """Limit the metric rows of each rank: each row must stand for at least one sample of the run."""

    def __init__(self, *, tensors: int) -> None:
        self._row_bytes = ROW_BYTES + TENSOR_BYTES * tensors
        self._rows: Counter[int] = Counter()  # by rank
        self._warned: set[int] = set()

    def admits(self, rank: int, row: str, *, samples: int) -> bool:
        """Count a row of this rank; return False for one that is too long or exceeds the quota."""
        if len(row) > self._row_bytes or self._rows[rank] >= FIRST_ROWS + samples:
            return False
        self._rows[rank] += 1
        return True

    def first_refusal(self, rank: int) -> bool:
        """Return True on the first call for a rank: the warning is logged once per rank."""
        first = rank not in self._warned
        self._warned.add(rank)
        return first


def layout_of(weights: Mapping[str, Tensor]) -> list[list[Any]]:
    """Return the name, type and shape of every tensor."""
    return [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in weights.items()]


def short_layout(layout: list[list[Any]]) -> list[list[Any]] | str:
    """Return the layout, or its hash where it would not fit a message."""
    return layout if len(layout) <= MAX_LISTED else hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def _check_address(peer: Peer, address: Any) -> None:
    """Refuse a name or an address that other workers could not parse in a view."""
    try:
        ViewMember.from_meta({"rank": peer.rank, "instance": peer.instance, "host": peer.host, "address": address})
    except ValueError as error:
        raise JoinRefused(f"other workers could not reach it: {error}") from error


def _difference(ours: list[list[Any]], theirs: Any) -> str:
    if isinstance(theirs, str) and len(ours) > MAX_LISTED:
        return "" if theirs == short_layout(ours) else f"one of its tensors differs from the server's {len(ours)}"
    if not isinstance(theirs, list) or len(theirs) != len(ours):
        return f"{len(theirs) if isinstance(theirs, list) else 'no'} tensors where the server has {len(ours)}"
    for mine, other in zip(ours, theirs, strict=True):
        if mine != other:
            return f"{other} where the server has {mine}"
    return ""
