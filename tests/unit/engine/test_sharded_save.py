"""A checkpoint that every rank writes a part of: what goes wrong in one part, and files that do not fit together."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from tests.faults.disks import FullDisk
from tests.unit.engine.test_checkpoint import forge, forge_file
from torch import Tensor
from torch.distributed import TCPStore

from smolcluster.comm.group import PeerLost
from smolcluster.comm.kv_store import KeyValueStore
from smolcluster.comm.sharded import box_name, read_box_name
from smolcluster.durable_files import Files
from smolcluster.engine.checkpoint.lazy_tensors import FileEntry, StoredTensors
from smolcluster.engine.checkpoint.sharded_save import LeadStore, PartStore
from smolcluster.engine.checkpoint.snapshot import Snapshot, read_checkpoint, verify
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.errors import DamagedCheckpoint

WHOLE = torch.arange(28.0).view(7, 4)
STEP = torch.tensor(5.0)


MakeStore = Callable[[], KeyValueStore]
Save = Callable[..., list[Path | Exception]]


@pytest.fixture(scope="module")
def rendezvous() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def kv_store_of(rendezvous: TCPStore) -> MakeStore:
    """Return a constructor of stores that share a namespace."""
    return partial(KeyValueStore, "127.0.0.1", rendezvous.port, name=secrets.token_hex(8))


kv_store = pytest.fixture(kv_store_of)


def snapshot_of(rank: int, *, step: int = 1, ranks: int = 3, **fields: Any) -> Snapshot:
    """Rows of one tensor dealt out to the ranks; the first has a number that is whole; the last an empty part."""
    rows = WHOLE.tensor_split(ranks)[rank] if rank < ranks else WHOLE[:0]
    at = sum(len(part) for part in WHOLE.tensor_split(ranks)[:rank])
    weights = {box_name("a.weight", (at, 0)): rows * step} if len(rows) else {}
    return Snapshot(
        step=step,
        weights=weights,
        optimizer={box_name("step/a.weight", ()): STEP} if rank == 0 else {},
        full_shapes={"weights": {"a.weight": [7, 4]}, "optimizer": {"step/a.weight": []} if rank == 0 else {}},
        part=rank,
        **fields,
    )


def stores(
    folder: Path, kv_store: MakeStore, *, ranks: int = 2, files: Callable[[int], Files] = lambda rank: Files()
) -> list[Any]:
    """Return the store of each rank."""
    lead = LeadStore(CheckpointStore(folder, keep=2, files=files(0)), kv_store(), size=ranks)
    return [lead, *(PartStore(folder, kv_store(), rank=rank, files=files(rank)) for rank in range(1, ranks))]


def save_all(stores: Sequence[Any], snapshots: Sequence[Snapshot]) -> list[Path | Exception]:
    """What came of it, for each rank."""
    with ThreadPoolExecutor(len(stores)) as pool:
        saving = [pool.submit(store.save, snapshot) for store, snapshot in zip(stores, snapshots, strict=True)]
    return [each.exception() or each.result() for each in saving]  # type: ignore[misc]


@pytest.fixture
def save_together(tmp_path: Path, rendezvous: TCPStore) -> Save:
    def save(*, step: int = 1, ranks: int = 3, **options: Any) -> list[Path | Exception]:
        snapshots = [snapshot_of(rank, step=step, ranks=ranks) for rank in range(ranks)]
        return save_all(stores(tmp_path, kv_store_of(rendezvous), ranks=ranks, **options), snapshots)

    return save


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_parts_become_one_checkpoint(tmp_path: Path, save_together: Save, ranks: int) -> None:
    assert save_together(ranks=ranks)[0] == tmp_path / "step-00000001"
    for lazily in (False, True):
        found = read_checkpoint(tmp_path / "step-00000001", lazily=lazily)
        assert torch.equal(found.weights["a.weight"], WHOLE)
        assert torch.equal(found.optimizer["step/a.weight"], STEP)
        assert dict(found.weights).keys() == {"a.weight"}


def test_keys_are_deleted_after_each_save(tmp_path: Path, kv_store: MakeStore, rendezvous: TCPStore) -> None:
    before, both = rendezvous.num_keys(), stores(tmp_path, kv_store)
    for step in (1, 2, 3):
        save_all(both, [snapshot_of(rank, step=step, ranks=2) for rank in range(2)])
    assert rendezvous.num_keys() - before == 2, "more than the folder and the outcome of the last step"


def test_one_rank_that_cannot_write_undoes_the_save_and_harms_nothing(tmp_path: Path, save_together: Save) -> None:
    full = FullDisk()
    full.full_at = 0
    save_together(step=1)
    for broken in range(3):
        result = save_together(step=2, files=lambda rank, broken=broken: full if rank == broken else Files())
        assert all(isinstance(outcome, OSError) for outcome in result), result
        assert "No space left" in str(result[0])
        assert [path.name for path in CheckpointStore(tmp_path, keep=2).list()] == ["step-00000001"]
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]
    verify(tmp_path / "step-00000001")
    assert save_together(step=2)[0] == tmp_path / "step-00000002"


def test_parts_that_leave_a_hole_are_not_called_saved(tmp_path: Path, kv_store: MakeStore) -> None:
    """Every rank wrote what it had, and together it is not the model."""
    short = snapshot_of(1, ranks=2)
    short.weights = {name: rows[:-1] for name, rows in short.weights.items()}
    lead, other = save_all(stores(tmp_path, kv_store), [snapshot_of(0, ranks=2), short])
    assert isinstance(lead, DamagedCheckpoint)
    assert "do not contain 'a.weight' (7, 4) exactly once" in str(lead)
    assert isinstance(other, OSError)
    assert "exactly once" in str(other)
    assert not CheckpointStore(tmp_path, keep=2).list()


def test_a_step_that_is_there_is_kept_and_nobody_waits(tmp_path: Path, save_together: Save) -> None:
    save_together()
    before = (tmp_path / "step-00000001" / "manifest.json").read_bytes()
    assert save_together()[0] == tmp_path / "step-00000001"
    assert (tmp_path / "step-00000001" / "manifest.json").read_bytes() == before


def test_a_rank_that_leaves_ends_the_wait(tmp_path: Path, kv_store: MakeStore) -> None:
    mine = kv_store()
    lead = LeadStore(CheckpointStore(tmp_path, keep=2), mine, size=2)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(lead.save, snapshot_of(0, ranks=2))
        kv_store().get("1/folder", timeout_s=60.0)
        mine.close()
        with pytest.raises(OSError, match="rank 1 did not save its part"):
            saving.result(timeout=300)
    assert CheckpointStore(tmp_path, keep=2).list() == []


# Files that do not fit together. Their hashes are right: only what they say is wrong.


@pytest.mark.parametrize(
    ("box", "change"),
    [
        ("other.weight@0", lambda rows: torch.zeros(1)),
        ("a.weight@0,0", torch.clone),  # over another
        ("a.weight@6,0", torch.clone),  # beyond the end
        ("a.weight@3,0", Tensor.double),
        ("a.weight@3", torch.flatten),
        ("a.weight@x", torch.clone),
    ],
)
def test_parts_that_do_not_make_a_whole_are_refused(
    tmp_path: Path, save_together: Save, box: str, change: Callable[[Tensor], Tensor]
) -> None:
    save_together()
    path, name = tmp_path / "step-00000001", "weights-1.safetensors"
    forge_file(path, name, save({box: change(load_file(path / name)["a.weight@3,0"])}))
    verify(path)
    for lazily in (False, True):
        with pytest.raises(DamagedCheckpoint):
            read_checkpoint(path, lazily=lazily)


def test_a_manifest_names_no_other_files(tmp_path: Path, save_together: Save) -> None:
    save_together()
    path = tmp_path / "step-00000001"
    for name in ("../weights-1.safetensors", "weights-x.safetensors", "weights-1.pt"):
        forge(path, lambda fields, name=name: fields["files"].update({name: fields["files"]["state.json"]}))
        with pytest.raises(DamagedCheckpoint, match="lists the files"):
            verify(path)
        forge(path, lambda fields, name=name: fields["files"].pop(name))
    verify(path)


def test_every_flipped_bit_of_a_part_is_found(tmp_path: Path, save_together: Save) -> None:
    save_together()
    path = tmp_path / "step-00000001"
    for file in path.iterdir():
        data = bytearray(file.read_bytes())
        for at in range(0, len(data), 7):
            data[at] ^= 1
            file.write_bytes(data)
            with pytest.raises(DamagedCheckpoint):
                verify(path)
            data[at] ^= 1
        file.write_bytes(data)
    verify(path)


def test_tied_parts_are_written_once_and_tied_again(tmp_path: Path) -> None:
    parts = WHOLE.tensor_split(2)
    entries = {}
    for rank, (part, at) in enumerate(zip(parts, (0, 4), strict=True)):
        save_file({f"a@{at},0": part.contiguous()}, tmp_path / f"weights-{rank}.safetensors")
        entries[f"weights-{rank}.safetensors"] = FileEntry(
            sha256="0" * 64, size=0, tensors=1, aliases={f"b@{at},0": f"a@{at},0"}
        )
    found = StoredTensors(tmp_path, entries, {"a": [7, 4], "b": [7, 4]}).read_all()
    assert torch.equal(found["a"], WHOLE)
    assert found["b"] is found["a"]


@given(st.text(min_size=1), st.lists(st.integers(0, 10**9), max_size=4))
def test_a_box_is_read_by_its_name(name: str, offsets: list[int]) -> None:
    assert read_box_name(box_name(name, offsets)) == (name, tuple(offsets))


def test_a_wait_that_times_out_prints_no_stack_trace(kv_store: MakeStore, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    with pytest.raises(PeerLost, match="has set"):
        kv_store().get("never", timeout_s=0.1)
    assert capfd.readouterr().err == ""


QUIET = """
import datetime
from smolcluster.cli.ending import leave_after

def work():
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        store.wait(["never"], datetime.timedelta(milliseconds=10))
    except RuntimeError:
        return 7

leave_after(work)
"""


def test_what_torch_says_of_connections_is_not_shown_by_a_rank_that_somebody_else_started() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    ended = subprocess.run([sys.executable, "-c", QUIET], env=environ, capture_output=True, timeout=240, check=False)
    assert (ended.returncode, ended.stderr.decode()) == (7, "")


def test_ranks_share_values_through_the_store(kv_store: MakeStore, rendezvous: TCPStore) -> None:
    one, other = kv_store(), kv_store()
    stranger = KeyValueStore("127.0.0.1", rendezvous.port, name="y")
    one.set("a", {"b": [1, None]})
    assert other.get("a", timeout_s=60.0) == {"b": [1, None]}
    for key, reader in (("a", stranger), ("c", other)):
        with pytest.raises(PeerLost, match="has set"):
            reader.get(key, timeout_s=0.01)
    other.delete("a")
    with pytest.raises(PeerLost, match="has set a"):
        one.get("a", timeout_s=0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.get, "never", timeout_s=600.0)
        one.close()
        with pytest.raises(PeerLost, match="leaving"):
            waiting.result(timeout=300)
