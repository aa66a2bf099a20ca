"""A checkpoint that every rank writes a part of: what goes wrong in one part, and files that do not fit together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.unit.engine.test_checkpoint import forge
from torch import Tensor

from smolcluster.comm.group import PeerLost
from smolcluster.comm.notes import Notes as StoreNotes
from smolcluster.comm.sharded import box_name, read_box_name
from smolcluster.durable_files import Files, OutputFile
from smolcluster.engine.checkpoint.lazy_tensors import FileEntry, StoredTensors
from smolcluster.engine.checkpoint.sharded_save import LeadStore, PartStore
from smolcluster.engine.checkpoint.snapshot import Snapshot, read_checkpoint, verify
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.errors import DamagedCheckpoint

WHOLE = torch.arange(28.0).view(7, 4)
STEP = torch.tensor(5.0)


class Notes:
    """Key-value notes within this process."""

    def __init__(self) -> None:
        self._notes: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._closed = False

    def post(self, key: str, value: Any) -> None:
        with self._changed:
            self._notes[key] = json.loads(json.dumps(value))
            self._changed.notify_all()

    def read(self, key: str, *, within_s: float) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: key in self._notes or self._closed, timeout=within_s)
            if key not in self._notes:
                raise PeerLost(f"no rank has posted {key}")
            return self._notes[key]

    def remove(self, key: str) -> None:
        with self._changed:
            self._notes.pop(key, None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


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


def save_together(
    folder: Path, *, step: int = 1, ranks: int = 3, files: Callable[[int], Files] = lambda rank: Files()
) -> list[Path | OSError]:
    """What came of it, for each rank."""
    notes = Notes()
    stores: list[Any] = [LeadStore(CheckpointStore(folder, keep=2, files=files(0)), notes, size=ranks)]
    stores += [PartStore(folder, notes, rank=rank, files=files(rank)) for rank in range(1, ranks)]

    def save(rank: int) -> Path | OSError:
        try:
            path: Path = stores[rank].save(snapshot_of(rank, step=step, ranks=ranks))
        except OSError as error:
            return error
        return path

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(save, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_parts_become_one_checkpoint(tmp_path: Path, ranks: int) -> None:
    saved = save_together(tmp_path, ranks=ranks)
    assert saved[0] == tmp_path / "step-00000001"
    for lazily in (False, True):
        found = read_checkpoint(tmp_path / "step-00000001", lazily=lazily)
        assert torch.equal(found.weights["a.weight"], WHOLE)
        assert torch.equal(found.optimizer["step/a.weight"], STEP)
        assert dict(found.weights).keys() == {"a.weight"}


def test_notes_do_not_pile_up(tmp_path: Path) -> None:
    notes = Notes()
    lead, other = LeadStore(CheckpointStore(tmp_path, keep=2), notes, size=2), PartStore(tmp_path, notes, rank=1)
    with ThreadPoolExecutor(2) as pool:
        for step in (1, 2, 3):
            saved = [
                pool.submit(store.save, snapshot_of(rank, step=step, ranks=2))
                for rank, store in enumerate((lead, other))
            ]
            for saving in saved:
                saving.result(timeout=300)
    assert set(notes._notes) == {"3/folder", "3/end"}


def test_one_rank_that_cannot_write_undoes_the_save_and_harms_nothing(tmp_path: Path) -> None:
    class Full(Files):
        def create(self, path: Path) -> OutputFile:
            raise OSError(28, "No space left on device")

    save_together(tmp_path, step=1)
    for broken in range(3):
        result = save_together(
            tmp_path, step=2, files=lambda rank, broken=broken: Full() if rank == broken else Files()
        )
        assert all(isinstance(outcome, OSError) for outcome in result), result
        assert "No space left" in str(result[0])
        assert [path.name for path in CheckpointStore(tmp_path, keep=2).list()] == ["step-00000001"]
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]
    verify(tmp_path / "step-00000001")
    assert save_together(tmp_path, step=2)[0] == tmp_path / "step-00000002"


def test_parts_that_leave_a_hole_are_not_called_saved(tmp_path: Path) -> None:
    """Every rank wrote what it had, and together it is not the model."""
    notes = Notes()
    lead, other = LeadStore(CheckpointStore(tmp_path, keep=2), notes, size=2), PartStore(tmp_path, notes, rank=1)
    short = snapshot_of(1, ranks=2)
    short.weights = {name: rows[:-1] for name, rows in short.weights.items()}
    with ThreadPoolExecutor(2) as pool:
        saving = [pool.submit(lead.save, snapshot_of(0, ranks=2)), pool.submit(other.save, short)]
        with pytest.raises(DamagedCheckpoint, match=r"do not contain 'a.weight' \(7, 4\) exactly once"):
            saving[0].result(timeout=300)
        with pytest.raises(OSError, match="exactly once"):
            saving[1].result(timeout=300)
    assert not CheckpointStore(tmp_path, keep=2).list()


def test_a_step_that_is_there_is_kept_and_nobody_waits(tmp_path: Path) -> None:
    save_together(tmp_path)
    before = (tmp_path / "step-00000001" / "manifest.json").read_bytes()
    assert save_together(tmp_path)[0] == tmp_path / "step-00000001"
    assert (tmp_path / "step-00000001" / "manifest.json").read_bytes() == before


def test_a_rank_that_leaves_ends_the_wait(tmp_path: Path) -> None:
    notes = Notes()
    lead = LeadStore(CheckpointStore(tmp_path, keep=2), notes, size=2)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(lead.save, snapshot_of(0, ranks=2))
        notes.read("1/folder", within_s=60.0)
        notes.close()
        with pytest.raises(OSError, match="rank 1 did not save its part"):
            saving.result(timeout=300)
    assert CheckpointStore(tmp_path, keep=2).list() == []


# Files that do not fit together. Their hashes are right: only what they say is wrong.


def doctored(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """`weights-1.safetensors` with something changed, and a manifest that agrees."""
    save_together(folder)
    path = folder / "step-00000001"
    tensors = load_file(path / "weights-1.safetensors")
    change(tensors)
    save_file(tensors, path / "weights-1.safetensors")
    entry = CheckpointFile(path / "weights-1.safetensors", len(tensors))
    forge(path, lambda fields: fields["files"].update({"weights-1.safetensors": entry.fields()}))
    return path


class CheckpointFile:
    def __init__(self, path: Path, tensors: int) -> None:
        self._path, self._tensors = path, tensors

    def fields(self) -> dict[str, Any]:
        import hashlib

        data = self._path.read_bytes()
        return {
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "tensors": self._tensors,
            "aliases": {},
        }


def _drop(tensors: dict[str, Tensor]) -> None:
    tensors.clear()
    tensors["other.weight@0"] = torch.zeros(1)


def _move(tensors: dict[str, Tensor]) -> None:
    tensors["a.weight@0,0"] = tensors.pop("a.weight@3,0")


def _outside(tensors: dict[str, Tensor]) -> None:
    tensors["a.weight@6,0"] = tensors.pop("a.weight@3,0")


def _retype(tensors: dict[str, Tensor]) -> None:
    tensors["a.weight@3,0"] = tensors["a.weight@3,0"].double()


def _rank(tensors: dict[str, Tensor]) -> None:
    tensors["a.weight@3"] = tensors.pop("a.weight@3,0").flatten()


def _gibberish(tensors: dict[str, Tensor]) -> None:
    tensors["a.weight@x"] = tensors.pop("a.weight@3,0")


@pytest.mark.parametrize("change", [_drop, _move, _outside, _retype, _rank, _gibberish])
def test_parts_that_do_not_make_a_whole_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None]
) -> None:
    path = doctored(tmp_path, change)
    verify(path)
    with pytest.raises(DamagedCheckpoint):
        read_checkpoint(path)
    with pytest.raises(DamagedCheckpoint):
        read_checkpoint(path, lazily=True)


def test_a_manifest_names_no_other_files(tmp_path: Path) -> None:
    save_together(tmp_path)
    path = tmp_path / "step-00000001"
    for name in ("../weights-1.safetensors", "weights-x.safetensors", "weights-1.pt"):
        forge(path, lambda fields, name=name: fields["files"].update({name: fields["files"]["state.json"]}))
        with pytest.raises(DamagedCheckpoint, match="lists the files"):
            verify(path)
        forge(path, lambda fields, name=name: fields["files"].pop(name))
    verify(path)


def test_every_flipped_bit_of_a_part_is_found(tmp_path: Path) -> None:
    save_together(tmp_path)
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


def test_who_waits_for_a_note_fills_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    capfd.readouterr()
    with pytest.raises(PeerLost, match="has posted"):
        StoreNotes("127.0.0.1", server.port, name="x").read("never", within_s=0.1)
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


def test_notes_travel_through_a_store() -> None:
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one, other = (StoreNotes("127.0.0.1", server.port, name="x") for _ in range(2))
    stranger = StoreNotes("127.0.0.1", server.port, name="y")
    one.post("a", {"b": [1, None]})
    assert other.read("a", within_s=60.0) == {"b": [1, None]}
    for key, reader in (("a", stranger), ("c", other)):
        with pytest.raises(PeerLost, match="has posted"):
            reader.read(key, within_s=0.01)
    other.remove("a")
    with pytest.raises(PeerLost, match="has posted a"):
        one.read("a", within_s=0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.read, "never", within_s=600.0)
        one.close()
        with pytest.raises(PeerLost, match="leaving"):
            waiting.result(timeout=300)
