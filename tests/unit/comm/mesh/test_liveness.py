"""Failure detection between ranks without a launcher: lost ranks are named on all others."""

from __future__ import annotations

import threading

import pytest
from tests.unit.comm.ranks import in_memory

from smolcluster.comm.group import Group
from smolcluster.comm.mesh.liveness import LivenessMonitor


def test_the_error_of_a_rank_reaches_the_others() -> None:
    lost: dict[int, str] = {}
    named = threading.Event()

    def begin(group: Group) -> LivenessMonitor:
        def on_lost(message: str) -> None:
            lost[group.rank] = message
            if len(lost) == 2:
                named.set()

        return LivenessMonitor(group, "127.0.0.1", name=f"host{group.rank}", on_lost=on_lost)

    watches = in_memory(3, begin)
    assert [watch.lost() for watch in watches] == [None] * 3
    watches[2].leave("out of memory")
    assert named.wait(300)
    assert lost == dict.fromkeys((0, 1), "rank 2 on host2 failed: out of memory")
    for watch in watches[1::-1]:
        watch.leave()


def test_all_ranks_raise_when_rank_0_cannot_listen() -> None:
    def begin(group: Group) -> None:
        with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0"):
            LivenessMonitor(group, "192.0.2.1", name="here", on_lost=lambda _: None)

    in_memory(2, begin)  # or the others wait for an address that never comes
