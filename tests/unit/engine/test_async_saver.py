"""Checkpoints saved in the background: what waits, what gives way, and whose memory it is."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch
from tests.unit.engine.test_checkpoint import assert_bitwise, snapshot_of

from smolcluster.engine.checkpoint.async_saver import Saver, SnapshotBuffers
from smolcluster.engine.checkpoint.snapshot import (
    Snapshot,
    read_manifest,
)
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.observe.events import CheckpointFailed, CheckpointSaved


class GatedStore(CheckpointStore):
    """Waits in every save until it is let through."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep=10)
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.error: BaseException | None = None

    def save(self, snapshot: Snapshot, *, best: bool = False) -> Path:
        self.entered.release()
        assert self.gate.acquire(timeout=300)
        if self.error is not None:
            raise self.error
        return super().save(snapshot, best=best)


class Run:
    """A saver and all it has reported."""

    def __init__(self, folder: Path) -> None:
        self.store = GatedStore(folder)
        self.saved: list[CheckpointSaved] = []
        self.failed: list[CheckpointFailed] = []
        self.skipped: list[tuple[int, int]] = []
        self.saver = Saver(
            self.store,
            on_saved=self.saved.append,
            on_failed=self.failed.append,
            on_skipped=lambda step, by: self.skipped.append((step, by)),
        )

    def start_writing(self, step: int) -> None:
        self.saver.submit(snapshot_of(step))
        assert self.store.entered.acquire(timeout=300)

    def finish(self) -> list[int]:
        self.store.gate.release(100)
        self.saver.close()
        return [event.step for event in self.saved]


def test_saving_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start_writing(1)
    assert run.saved == []
    run.saver.submit(snapshot_of(2), best=True, stall_s=0.25)
    assert run.finish() == [1, 2]
    last = run.saved[1]
    assert (last.path, last.best, last.stall_s) == (str(tmp_path / "step-00000002"), True, 0.25)
    assert last.size_bytes == read_manifest(tmp_path / "step-00000002").size_bytes
    assert (run.failed, run.skipped) == ([], [])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


@pytest.mark.parametrize(
    ("waiting", "newer", "saved", "skipped"),
    [
        ({}, {}, [1, 3], [(2, 3)]),
        ({}, {"best": True}, [1, 3], [(2, 3)]),
        ({}, {"final": True}, [1, 3], [(2, 3)]),
        ({"best": True}, {"best": True}, [1, 3], [(2, 3)]),
        ({"best": True}, {}, [1, 2], [(3, 2)]),
    ],
)
def test_one_waits_and_the_others_give_way(
    tmp_path: Path, waiting: dict[str, bool], newer: dict[str, bool], saved: list[int], skipped: list[tuple[int, int]]
) -> None:
    run = Run(tmp_path)
    run.start_writing(1)
    run.saver.submit(snapshot_of(2), **waiting)
    run.saver.submit(snapshot_of(3), **newer)
    assert run.skipped == skipped
    assert run.finish() == saved


@pytest.mark.parametrize(("waiting", "newer"), [({"final": True}, {}), ({"best": True}, {"final": True})])
def test_what_must_not_be_lost_blocks_instead(tmp_path: Path, waiting: dict[str, bool], newer: dict[str, bool]) -> None:
    run = Run(tmp_path)
    run.start_writing(1)
    run.saver.submit(snapshot_of(2), **waiting)
    blocked = threading.Thread(target=lambda: run.saver.submit(snapshot_of(3), **newer))
    blocked.start()
    run.store.gate.release()  # step 1 ends, step 2 is taken up, there is room
    blocked.join(timeout=300)
    assert not blocked.is_alive()
    assert run.finish() == [1, 2, 3]
    assert run.skipped == []


def test_a_failed_save_is_reported_and_the_next_one_works(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.store.error = OSError(errno.ENOSPC, "No space left on device")
    run.start_writing(1)
    run.store.gate.release()
    run.saver.wait()
    assert [(event.step, event.reason) for event in run.failed] == [(1, "OSError: [Errno 28] No space left on device")]
    run.store.error = None
    run.saver.submit(snapshot_of(2))
    assert run.finish() == [2]


def test_a_tensor_that_cannot_be_saved_is_reported_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.saver.submit(Snapshot(step=1, weights={"w": torch.zeros(1, dtype=torch.complex64)}))
    assert run.finish() == []
    assert run.failed[0].reason.startswith("UserError: tensor 'w'")


def test_a_bug_in_the_background_is_not_swallowed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.store.error = ZeroDivisionError("a bug")
    run.start_writing(1)
    run.saver.submit(snapshot_of(2))
    run.store.gate.release(100)
    for again in (run.saver.wait, lambda: run.saver.submit(snapshot_of(3)), run.saver.close):
        with pytest.raises(ZeroDivisionError, match="a bug"):
            again()
    assert (run.saved, run.failed) == ([], [])


def test_a_snapshot_is_a_copy_and_keeps_ties() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    tensors = {"b": weight, "a": weight, "t": weight.detach().t(), "s": torch.tensor(3.0), "e": torch.empty(0)}
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    copies = SnapshotBuffers().copy(tensors)
    with torch.no_grad():
        weight.zero_()
    assert_bitwise(copies, expected)
    assert copies["a"] is copies["b"]
    assert all(not tensor.requires_grad and tensor.is_contiguous() for tensor in copies.values())


def test_buffers_are_used_again_once_written_and_only_then(tmp_path: Path) -> None:
    run = Run(tmp_path)
    weights = {"w": torch.ones(4)}
    first = run.saver.snapshot_tensors(weights)
    run.saver.submit(Snapshot(step=1, weights=first))
    assert run.store.entered.acquire(timeout=300)
    second = run.saver.snapshot_tensors({"w": torch.full((4,), 2.0)})
    assert second["w"].data_ptr() != first["w"].data_ptr(), "memory of a snapshot in flight was handed out"
    run.saver.submit(Snapshot(step=2, weights=second))
    run.store.gate.release(100)
    run.saver.wait()
    memory = {first["w"].data_ptr(), second["w"].data_ptr()}
    third = run.saver.snapshot_tensors({"w": torch.full((4,), 3.0)})
    assert third["w"].data_ptr() in memory
    other = run.saver.snapshot_tensors({"w": torch.zeros(5)})
    assert other["w"].data_ptr() not in memory
    run.saver.submit(Snapshot(step=3, weights=third, optimizer=other))
    assert run.finish() == [1, 2, 3]
    for step in (1, 2, 3):
        assert run.store.load(f"step-{step:08d}").weights["w"].tolist() == [float(step)] * 4


def test_memory_of_a_snapshot_that_gave_way_is_free_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start_writing(1)
    given_up = run.saver.snapshot_tensors({"w": torch.ones(4)})
    run.saver.submit(Snapshot(step=2, weights=given_up))
    run.saver.submit(snapshot_of(3))
    assert run.saver.snapshot_tensors({"w": torch.zeros(4)})["w"].data_ptr() == given_up["w"].data_ptr()
    assert run.finish() == [1, 3]


def test_reserved_memory_is_what_the_first_snapshot_uses(tmp_path: Path) -> None:
    run = Run(tmp_path)
    weight = torch.ones(4)
    run.saver.reserve({"a": weight, "b": weight})
    (reservation,) = run.saver._reserved
    copies = run.saver.snapshot_tensors({"a": weight, "b": weight})
    assert reservation.done(), "did not wait for the reservation"
    assert run.saver._buffers._free == [], "made memory of its own"
    assert copies["a"] is copies["b"]
    assert copies["a"].tolist() == [1.0] * 4
    run.saver.submit(Snapshot(step=1, weights=copies))
    assert run.finish() == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_snapshot_from_cuda_goes_through_pinned_memory() -> None:
    buffers = SnapshotBuffers()
    tensors = {"w": torch.randn(1 << 20, device="cuda"), "step": torch.tensor(2.0)}
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    copies = buffers.copy(tensors)
    tensors["w"].zero_()
    assert copies["w"].is_pinned()
    assert_bitwise(copies, expected)
