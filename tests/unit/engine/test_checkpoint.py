"""The format of a checkpoint, and the store."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from smolcluster.durable_files import Files
from smolcluster.engine.checkpoint.safetensors_writer import weights_sha256
from smolcluster.engine.checkpoint.snapshot import (
    VERSION,
    Snapshot,
    check_compatible,
    read_checkpoint,
    read_manifest,
    verify,
)
from smolcluster.engine.checkpoint.store import CheckpointStore
from smolcluster.errors import DamagedCheckpoint, UserError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits, so also NaN and infinity; booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_bitwise(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def snapshot_of(step: int, **fields: Any) -> Snapshot:
    return Snapshot(step=step, weights={"w": torch.full((4,), float(step))}, **fields)


def steps(store: CheckpointStore) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in store.list()]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


# The files


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (5, 7)], ids=str)
def test_the_safetensors_library_reads_what_we_write(
    store: CheckpointStore, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    # An odd number of single bytes beside it: alignment must not depend on luck.
    weights = {"x": random_tensor(shape, dtype), "a": torch.ones(3, dtype=torch.uint8)}
    path = store.save(Snapshot(step=1, weights=weights))
    assert_bitwise(load_file(path / "weights.safetensors"), weights)
    assert_bitwise(read_checkpoint(path).weights, weights)


def test_tensors_are_aligned_sorted_and_without_gaps(store: CheckpointStore) -> None:
    weights = {f"{i}.{dtype}": random_tensor((3,), dtype) for i, dtype in enumerate(DTYPES)}
    data = (store.save(Snapshot(step=1, weights=weights)) / "weights.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for name, entry in header.items():
        start = entry["data_offsets"][0]
        assert start == end
        assert (8 + length + start) % weights[name].itemsize == 0
        end = entry["data_offsets"][1]
    assert 8 + length + end == len(data)
    assert list(header) == sorted(weights, key=lambda name: (-weights[name].itemsize, name))


def test_large_tensors_are_written_in_pieces_and_hashed_right(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smolcluster.engine.checkpoint.safetensors_writer.CHUNK_BYTES", 1000)
    weights = {"big": random_tensor((9999,), torch.float32)}
    path = store.save(Snapshot(step=1, weights=weights))
    assert_bitwise(read_checkpoint(path).weights, weights)


def test_views_of_every_kind_are_stored_by_value(store: CheckpointStore) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    weights = {
        "transposed": base.t(),
        "strided": base[:, ::2],
        "slice": base[1:3],
        "expanded": torch.tensor([1.5]).expand(3, 2),
        "parameter": torch.nn.Parameter(base),
    }
    path = store.save(Snapshot(step=1, weights=weights))
    assert_bitwise(load_file(path / "weights.safetensors"), {name: t.detach().clone() for name, t in weights.items()})


def test_tied_tensors_are_stored_once_and_come_back_tied(store: CheckpointStore) -> None:
    weight = torch.randn(5, 3)
    weights = {
        "head.weight": weight,
        "embedding.weight": weight,
        "view": weight.view(5, 3),
        "other": weight.reshape(3, 5),
    }
    weights |= {"empty.1": torch.empty(0), "empty.2": torch.empty(0)}
    path = store.save(Snapshot(step=1, weights=weights))
    with safe_open(path / "weights.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["embedding.weight", "empty.1", "empty.2", "other"]
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["files"]["weights.safetensors"]["aliases"] == {
        "head.weight": "embedding.weight",
        "view": "embedding.weight",
    }
    loaded = read_checkpoint(path).weights
    assert_bitwise(loaded, weights)
    assert loaded["head.weight"] is loaded["embedding.weight"]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("w", torch.zeros(2, dtype=torch.complex64), r"'w' \(torch.complex64.*cannot be saved"),
        ("w", torch.zeros(2, 2).to_sparse(), "torch.sparse_coo"),
        ("w", torch.zeros(2, device="meta"), "on meta"),
        ("__metadata__", torch.zeros(2), "__metadata__"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_the_disk_is_touched(
    store: CheckpointStore, name: str, tensor: Tensor, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        store.save(Snapshot(step=1, weights={name: tensor}))
    assert not store.folder.exists()


def test_keys_that_json_would_change_are_refused(store: CheckpointStore) -> None:
    with pytest.raises(TypeError, match=r"state.groups\[0\]: key 3 is a int"):
        store.save(snapshot_of(1, state={"groups": [{3: "x"}]}))


def test_weights_sha256_is_what_its_docstring_says() -> None:
    weights = {"b": torch.tensor(1.5), "a.w": torch.arange(6, dtype=torch.int16).reshape(2, 3).t()}
    expected = hashlib.sha256(
        b"a.w\0int16\x003,2\0" + struct.pack("<6h", 0, 3, 1, 4, 2, 5) + b"b\0float32\0\0" + struct.pack("<f", 1.5)
    ).hexdigest()
    assert weights_sha256(weights) == expected
    assert weights_sha256(dict(reversed(weights.items()))) == expected
    for other in (
        {**weights, "b": torch.tensor(1.25)},
        {**weights, "b": torch.tensor([1.5])},
        {**weights, "b": weights["b"].view(torch.int32)},
        {"b2": weights["b"], "a.w": weights["a.w"]},
    ):
        assert weights_sha256(other) != expected


def test_manifest_says_what_was_saved(store: CheckpointStore) -> None:
    path = store.save(
        snapshot_of(12, metrics={"val_loss": 0.5, "worst": float("inf"), "none": float("nan")}, info={"task": "gpt"}),
        best=True,
    )
    fields = json.loads(
        (path / "manifest.json").read_text(encoding="utf-8"), parse_constant=lambda c: pytest.fail(f"{c} is not JSON")
    )
    assert (fields["format"], fields["version"], fields["step"], fields["best"]) == (
        "smolcluster-checkpoint",
        1,
        12,
        True,
    )
    assert fields["created"].endswith("+00:00")
    for name, entry in fields["files"].items():
        data = (path / name).read_bytes()
        assert (entry["sha256"], entry["size"]) == (hashlib.sha256(data).hexdigest(), len(data))
    metrics = read_manifest(path).metrics
    assert (metrics["val_loss"], metrics["worst"]) == (0.5, float("inf"))
    assert metrics["none"] != metrics["none"]
    assert read_manifest(path).size_bytes == sum((path / name).stat().st_size for name in fields["files"])


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(random_tensor, shapes, st.sampled_from(DTYPES), st.integers(0, 99))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
snapshots = st.builds(
    Snapshot,
    step=st.integers(0, 10**12),
    weights=st.dictionaries(names, tensors, max_size=4),
    optimizer=st.dictionaries(names, tensors, max_size=4),
    state=st.dictionaries(names, json_values, max_size=3),
    metrics=st.dictionaries(names, st.floats(allow_nan=False), max_size=3),
    info=st.dictionaries(names, json_values, max_size=3),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(snapshot=snapshots)
def test_every_snapshot_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, snapshot: Snapshot) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("store"), keep=1)
    path = store.save(snapshot)
    loaded = store.load_latest()
    assert loaded[0] == path
    assert_bitwise(loaded[1].weights, snapshot.weights)
    assert_bitwise(loaded[1].optimizer, snapshot.optimizer)
    for field in ("step", "state", "metrics", "info"):
        assert getattr(loaded[1], field) == getattr(snapshot, field)


# Hostile and foreign checkpoints


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest and gives it a right hash, as someone who means harm would."""
    file = path / "manifest.json"
    fields = json.loads(file.read_bytes())
    change(fields)
    text = json.dumps({**fields, "sha256": "0" * 64}, indent=2)
    file.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1), encoding="utf-8")


def forge_file(path: Path, name: str, data: bytes) -> None:
    (path / name).write_bytes(data)
    forge(path, lambda f: f["files"][name].update(size=len(data), sha256=hashlib.sha256(data).hexdigest()))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f["files"].update({"../../escape": f["files"]["state.json"]}),
        lambda f: f["files"].update({"/etc/passwd": f["files"].pop("state.json")}),
        lambda f: f["files"].pop("optimizer.safetensors"),
        lambda f: f.update(files=[]),
        lambda f: f.update(step=-1),
        lambda f: f.update(step=2),
        lambda f: f.update(format="something else"),
        lambda f: f.update(version="1.5"),
        lambda f: f["files"]["state.json"].update(size=-1),
        lambda f: f["files"]["state.json"].update(sha256="0"),
        lambda f: f["files"]["weights.safetensors"].update(tensors=7),
        lambda f: f["files"]["weights.safetensors"].update(aliases={"x": "nowhere"}),
        lambda f: f["files"]["weights.safetensors"].update(aliases={"x": "y", "y": "x"}),
        lambda f: f["files"]["weights.safetensors"].update(aliases={"w": "w"}),
    ],
)
def test_a_forged_manifest_is_refused(store: CheckpointStore, change: Callable[[dict[str, Any]], None]) -> None:
    path = store.save(snapshot_of(1))
    forge(path, lambda fields: None)
    assert store.load().step == 1
    forge(path, change)
    with pytest.raises(DamagedCheckpoint):
        store.load(path)


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


BAD_JSON = (b"", b"[]", b'{"a": ', b"[" * 100_000, b"\xff", b'{"a": ' + b"9" * 10_000 + b"}")
BAD_TENSORS = (
    b"",
    b"\0" * 7,
    struct.pack("<Q", 2**63) + b"{}",
    struct.pack("<Q", 100) + b"{}",
    header(w=entry(0, 16, [4])),
    header(w=entry(0, 16, [4])) + b"\0" * 15,
    header(w=entry(0, 16, [4])) + b"\0" * 17,
    header(w=entry(-16, 0, [4])) + b"\0" * 16,
    header(w=entry(16, 0, [4])) + b"\0" * 16,
    header(w=entry(0, 16, [5])) + b"\0" * 16,
    header(w=entry(0, 16, [2**62, 4])) + b"\0" * 16,
    header(v=entry(0, 16, [4]), w=entry(8, 24, [4])) + b"\0" * 24,
    header(w=entry(0, 16, [4], "F99")) + b"\0" * 16,
    header(w=[1, 2]) + b"\0" * 16,
    struct.pack("<Q", 3) + b"\xff\xfe\xfd",
)
BAD_FILES = [*(("weights.safetensors", data) for data in BAD_TENSORS), *(("state.json", data) for data in BAD_JSON)]


@pytest.mark.parametrize(("name", "data"), BAD_FILES)
def test_a_bad_file_with_a_right_hash_is_refused(store: CheckpointStore, name: str, data: bytes) -> None:
    path = store.save(snapshot_of(1))
    forge_file(path, name, data)
    verify(path)
    with pytest.raises(DamagedCheckpoint, match=rf"{re.escape(name)}: "):
        store.load(path)


def test_a_manifest_nested_without_end_is_refused(store: CheckpointStore) -> None:
    path = store.save(snapshot_of(1))
    text = '{\n  "sha256": "' + "0" * 64 + '", "a": ' + "[" * 100_000
    (path / "manifest.json").write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest()))
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json: not a valid manifest"):
        store.load(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_opened(store: CheckpointStore, name: str) -> None:
    path = store.save(snapshot_of(1))
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(DamagedCheckpoint, match="not a regular file"):
        store.load(path)


def test_a_newer_format_is_the_users_to_mend_and_not_skipped(store: CheckpointStore) -> None:
    store.save(snapshot_of(1))
    path = store.save(snapshot_of(2))
    forge(path, lambda f: f.update(version=VERSION + 1))
    with pytest.raises(UserError, match=r"written by a newer smolcluster \(checkpoint format \d+.*pip install -U"):
        store.load_latest()


def test_another_model_is_refused_with_names_and_shapes() -> None:
    snapshot = Snapshot(step=5, weights={"a": torch.ones(2, 3), "b": torch.ones(4), "old": torch.ones(1)})
    check_compatible(snapshot, {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.ones(4), "old": torch.ones(1)})
    model = {"a": torch.ones(2, 4), "b": torch.ones(4), **{f"new.{i}": torch.ones(7) for i in range(5)}}
    with pytest.raises(UserError) as caught:
        check_compatible(snapshot, model)
    message = str(caught.value)
    assert "1 of another shape: a is (2, 3), the model has (2, 4)" in message
    assert "5 missing: new.0 (7,), new.1 (7,), new.2 (7,), ..." in message
    assert "1 not in the model: old (1,)" in message


# The store


def test_keeps_the_last_k_and_the_best(store: CheckpointStore) -> None:
    store.keep = 2
    for step in (1, 2, 3, 4, 5):
        store.save(snapshot_of(step), best=step in (1, 2))
    assert steps(store) == [2, 4, 5]
    assert (store.load().step, store.load("best").step) == (5, 2)
    store.save(snapshot_of(6), best=True)
    assert steps(store) == [5, 6]
    assert (store.folder / "latest").read_text(encoding="utf-8") == "step-00000006\n"
    assert (store.folder / "best").read_text(encoding="utf-8") == "step-00000006\n"
    with pytest.raises(UserError, match="keep at least 1"):
        CheckpointStore(store.folder, keep=0)


def test_an_empty_store(store: CheckpointStore) -> None:
    assert (store.list(), store.best(), store.load_latest()) == ([], None, None)
    for which in ("latest", "best", "step-00000007"):
        with pytest.raises(UserError, match=r"no (best )?checkpoint"):
            store.load(which)


def test_order_is_by_number_beyond_eight_digits(store: CheckpointStore) -> None:
    for step in (99_999_999, 100_000_000, 123):
        store.save(snapshot_of(step))
    assert steps(store) == [123, 99_999_999, 100_000_000]
    assert store.load().step == 100_000_000
    for stranger in ("step-1", "step-000000123", "step-00000124.bak", "other"):
        (store.folder / stranger).mkdir()
    assert len(store.list()) == 3


def test_a_good_checkpoint_of_the_same_step_is_never_touched(store: CheckpointStore) -> None:
    path = store.save(snapshot_of(1))
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    again = Snapshot(step=1, weights={"w": torch.zeros(4)})
    assert store.save(again, best=True) == path
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()} == before
    assert store.best() == path


def test_going_back_sets_later_checkpoints_aside(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.save(snapshot_of(step), best=step in (1, 3))
    moved = store.move_aside_after(1)
    assert [path.name.rsplit("-", 1)[0] for path in moved] == ["aside-step-00000002", "aside-step-00000003"]
    assert all(verify(path) for path in moved)
    assert (steps(store), store.load().step, store.load("best").step) == ([1], 1, 1)
    store.save(snapshot_of(3))
    assert store.load("best").step == 1
    assert store.move_aside_after(3) == []
    store.move_aside_after(0)
    assert (store.list(), store.load_latest(), store.best()) == ([], None, None)
    assert not (store.folder / "latest").exists()


def test_load_by_name_and_path(store: CheckpointStore, tmp_path: Path) -> None:
    first = store.save(snapshot_of(1))
    store.save(snapshot_of(2))
    other = CheckpointStore(tmp_path / "elsewhere", keep=1)
    assert other.load(first).step == store.load("step-00000001").step == other.load(str(first)).step == 1
    (first / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"step-00000001/manifest.json: missing"):
        store.load("step-00000001")
    with pytest.raises(UserError, match="known here: step-00000001, step-00000002"):
        store.load("step-00000003")


def test_a_renamed_folder_is_not_taken_for_another_step(store: CheckpointStore) -> None:
    store.save(snapshot_of(1)).rename(store.folder / "step-00000009")
    with pytest.raises(DamagedCheckpoint, match="step-00000009: contains step 1"):
        store.load_latest()


def test_unfinished_work_of_the_dead_is_removed_but_not_of_the_living(store: CheckpointStore) -> None:
    store.save(snapshot_of(1))
    unfinished = store.folder / ".tmp-step-00000002-0123456789ab"
    unfinished.mkdir()
    (unfinished / "weights.safetensors").write_bytes(b"half")
    with Files().lock(store.folder / ".lock"), pytest.raises(BlockingIOError, match="another process is writing here"):
        store.save(snapshot_of(2))
    assert unfinished.exists()
    store.save(snapshot_of(2))
    assert not unfinished.exists()
    assert sorted(path.name for path in store.folder.iterdir()) == [".lock", "latest", "step-00000001", "step-00000002"]


def test_loading_leaves_no_map_of_the_file_behind(store: CheckpointStore) -> None:
    path = store.save(snapshot_of(1))
    weights = store.load().weights
    with (path / "weights.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", 7.0))
    assert weights["w"].tolist() == [1.0] * 4
