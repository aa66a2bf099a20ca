"""Ranks that watch each other: who is lost is named, and what keeps them from watching is known by all."""

from __future__ import annotations

import threading

import pytest
from tests.unit.comm.ranks import in_memory

from smolcluster.comm.group import Group
from smolcluster.comm.mesh.liveness import LivenessMonitor


def test_last_words_reach_the_others() -> None:
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


def test_a_rank_0_that_cannot_listen_is_known_by_all() -> None:
    def begin(group: Group) -> None:
        with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0"):
            LivenessMonitor(group, "192.0.2.1", name="here", on_lost=lambda _: None)

    in_memory(2, begin)  # or the others wait for an address that never comes
