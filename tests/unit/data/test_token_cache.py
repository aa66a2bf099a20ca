"""The cache of token files, and its lock."""

import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smolcluster import locks
from smolcluster.data.cache import cache_root, cached_tokens
from smolcluster.data.tokenizers import ByteTokenizer, CharTokenizer
from smolcluster.errors import UserError
from smolcluster.locks import try_lock


def tokens_of(root, text="some text", *, tokenizer=None, chunks=None):
    chunks = chunks or (lambda: iter([text]))
    return cached_tokens(root, source_hash=f"hash of {text}", tokenizer=tokenizer or ByteTokenizer(), chunks=chunks)


def not_again():
    raise AssertionError("this should have come from the cache")


def test_tokens_are_built_once_and_mapped(tmp_path):
    built = tokens_of(tmp_path, "hello", chunks=lambda: iter(["hel", "", "lo"]))
    assert bytes(built) == b"hello"
    again = tokens_of(tmp_path, "hello", chunks=not_again)
    assert isinstance(again, np.memmap)
    assert bytes(again) == b"hello"
    assert sorted(p.suffix for p in (tmp_path / "tokens").iterdir()) == [".bin", ".json"]


def test_the_file_is_little_endian_and_described(tmp_path):
    text = "".join(chr(c) for c in range(300))
    tokens_of(tmp_path, text, tokenizer=CharTokenizer(text))
    (file,) = (tmp_path / "tokens").glob("*.bin")
    assert file.read_bytes() == struct.pack("<300H", *range(300))
    sidecar = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    assert (sidecar["dtype"], sidecar["count"], sidecar["vocab_size"]) == ("<u2", 300, 300)


def test_another_text_or_tokenizer_is_another_file(tmp_path):
    tokens_of(tmp_path, "abc")
    assert bytes(tokens_of(tmp_path, "abd")) == b"abd"
    assert tokens_of(tmp_path, "abc", tokenizer=CharTokenizer("abc")).tolist() == [0, 1, 2]
    assert tokens_of(tmp_path, "abc", tokenizer=CharTokenizer("abcX")).tolist() == [1, 2, 3]


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "no sidecar", "bad sidecar", "other format"])
def test_a_damaged_file_is_built_again(tmp_path, damage):
    text = "hello " * 20_000  # longer than the head that the sidecar has a hash of
    tokens_of(tmp_path, text)
    (file,) = (tmp_path / "tokens").glob("*.bin")
    sidecar = file.with_suffix(".json")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "longer":
        file.write_bytes(file.read_bytes() + b"!")
    elif damage == "flipped":
        file.write_bytes(b"j" + file.read_bytes()[1:])
    elif damage == "no sidecar":
        sidecar.unlink()
    elif damage == "bad sidecar":
        sidecar.write_text('{"dtype": ', encoding="utf-8")
    else:
        sidecar.write_text(sidecar.read_text(encoding="utf-8").replace('"format": 1', '"format": 0'), encoding="utf-8")
    built = []
    assert bytes(tokens_of(tmp_path, text, chunks=lambda: iter(built.append(1) or [text]))).decode() == text
    assert built == [1]
    tokens_of(tmp_path, text, chunks=not_again)


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    def broken():
        yield "hel"
        raise UserError("the source is broken")

    with pytest.raises(UserError, match="the source is broken"):
        tokens_of(tmp_path, "hello", chunks=broken)
    assert list((tmp_path / "tokens").iterdir()) == []
    assert bytes(tokens_of(tmp_path, "hello")) == b"hello"


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "tokens").write_text("a file in the way", encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot write the token cache.*SMOLCLUSTER_CACHE"):
        tokens_of(tmp_path)


def test_no_tokens_at_all(tmp_path):
    for _ in range(2):
        assert len(tokens_of(tmp_path, "")) == 0


WORKER = """
import sys, os, time, hashlib
from pathlib import Path
from smolcluster.data.cache import cached_tokens
from smolcluster.data.tokenizers import ByteTokenizer

root, me, count, mode = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]

def chunks():
    (root / f"built-by-{me}").touch()
    if mode == "die":
        yield "half of "
        os._exit(9)
    # Hold the lock until every process has asked.
    while len(list(root.glob("asked-*"))) < count:
        time.sleep(0.002)
    yield "half of "
    yield "the text"

(root / f"asked-{me}").touch()
print(bytes(cached_tokens(root, source_hash="x", tokenizer=ByteTokenizer(), chunks=chunks)).decode())
"""


def start_worker(root, me, count, mode="build"):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", WORKER, str(root), str(me), str(count), mode]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_processes_that_start_together_build_once(tmp_path):
    workers = [start_worker(tmp_path, i, 3) for i in range(3)]
    outputs = [w.communicate(timeout=300)[0].strip() for w in workers]
    assert [w.returncode for w in workers] == [0, 0, 0]
    assert outputs == ["half of the text"] * 3
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert sorted(p.suffix for p in (tmp_path / "tokens").iterdir()) == [".bin", ".json"]


def test_a_killed_builder_is_replaced_at_once(tmp_path):
    dead = start_worker(tmp_path, "dead", 1, "die")
    dead.communicate(timeout=300)
    assert dead.returncode == 9
    assert list((tmp_path / "tokens").glob("*.lock"))
    (left_over,) = (tmp_path / "tokens").glob("*.tmp")
    os.utime(left_over, (0, 0))
    heir = start_worker(tmp_path, "heir", 1)
    assert heir.communicate(timeout=300)[0].strip() == "half of the text"
    assert sorted(p.suffix for p in (tmp_path / "tokens").iterdir()) == [".bin", ".json"]


def test_a_lock_file_that_nobody_holds_is_no_obstacle(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    assert locks.run_once(lock, ready=lambda: None, produce=lambda: "made") == "made"
    assert not lock.exists()


def test_a_lock_that_is_held_is_waited_for(tmp_path, monkeypatch):
    lock, naps = tmp_path / "lock", []
    with lock.open("ab") as holder:
        assert try_lock(holder.fileno())

        def nap(seconds):
            naps.append(seconds)
            if len(naps) == 4:
                holder.close()

        monkeypatch.setattr(locks.time, "sleep", nap)
        results = iter([None, "made by the holder"])
        assert locks.run_once(lock, ready=lambda: next(results), produce=not_again) == "made by the holder"
    assert len(naps) == 4


def test_without_locks_all_work(tmp_path, monkeypatch):
    def no_locks(fd):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(locks, "try_lock", no_locks)
    with locks._locked(tmp_path / "lock"):
        assert locks.run_once(tmp_path / "lock", ready=lambda: None, produce=lambda: "made") == "made"


def test_a_result_that_came_just_before_the_lock_is_used(tmp_path):
    results = iter([None, "made meanwhile"])
    assert locks.run_once(tmp_path / "lock", ready=lambda: next(results), produce=not_again) == "made meanwhile"
    assert not (tmp_path / "lock").exists()


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("SMOLCLUSTER_CACHE", str(tmp_path / "env"))
    assert cache_root(str(tmp_path / "own")) == tmp_path / "own"
    assert cache_root() == tmp_path / "env"
    monkeypatch.delenv("SMOLCLUSTER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    for platform, expected in (
        ("linux", ".cache/smolcluster"),
        ("darwin", "Library/Caches/smolcluster"),
        ("win32", "local/smolcluster/cache"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        assert cache_root() == tmp_path / expected
