"""Wrong input: one clear message on stderr with the remedy, exit status 2, no traceback, and nothing half-written."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.e2e.command import TINY, Ended, Smol, read_rows, read_summary
from tests.places import small_disk

FILES = {
    "typo.yaml": "model:\n  model_dim: 32\ntraining:\n  batch_sise: 4\n",
    "plain.txt": "Not long enough for a window.\n",
    "empty.py": "x = 1\n",
    "raises.py": "import torch\n\nlist()[0]\n",
    "few.py": (
        "import torch\nfrom torch import nn\nfrom smolcluster import Task\n\n\n"
        "class Few(Task):\n"
        "    def model(self):\n        return nn.Linear(1, 1)\n\n"
        "    def train_data(self):\n        return (torch.zeros(1, 1),)\n\n"
        "    def loss(self, model, batch):\n        return model(batch[0]).mean()\n"
    ),
}


@dataclass(frozen=True)
class Case:
    """A wrong command line, and what the message must say."""

    arguments: tuple[str, ...]
    says: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def case(arguments: str, *says: str, **env: str) -> Case:
    return Case(tuple(arguments.split()), says, env)


# Refused by the launcher, before any worker starts.
AT_ONCE = {
    "unknown key in a file": case("train typo.yaml", "typo.yaml:4: training.batch_sise = 4", "'training.batch_size'"),
    "unknown strategy": case("train --strategy allredce", "'allredce'", "did you mean 'allreduce'?", "known: "),
    "unknown dataset": case("train --override data.name=wikitxt", "'wikitxt'", "did you mean 'wikitext'?"),
    "unknown backend": case("train --backend carrier-pigeon", "'carrier-pigeon'", "known: gloo, mpi, nccl"),
    "wrong type of a flag": case("train --batch-size lots", "'--batch-size'", "integer"),
    "batch size 0": case("train --batch-size 0", "--batch-size", "training.batch_size = 0", "at least 1"),
    "no workers": case("train --workers 0", "--workers", "cluster.num_workers = 0", "at least 1"),
    "an override without a value": case("train --override training.batch_size", "is not KEY=VALUE"),
    "heads that do not fit": case("train --attention-heads 5", "model_dim 128 is not divisible by num_heads 5"),
    "a text without quotes": case("generate Once upon a time", "4 texts: give one text, in quotes"),
    "a model twice": case("generate run hello --from run", "MODEL PROMPT with --from run"),
    "a device of a server's": case("generate hello --device cpu", "--device is for --from MODEL"),
    "a model of no server": case("generate hello --from run --model x", "--model names one of a server's models"),
    "home of nobody": case("train ~nobody-of-that-name/my.yaml", "~nobody-of-that-name/my.yaml: no such file"),
    "resume latest of nothing": case("train --resume latest", "no checkpoint in runs", "or start without --resume"),
    "resume what is not there": case(
        "train --resume there", "--resume there", "does not exist", "name a run directory"
    ),
    "resume no run": case("train --resume .", "holds no checkpoint", "name a run directory"),
    "run directory below a file": case("train --run-dir plain.txt/run", "cannot write", "plain.txt/run", "--run-dir"),
    "run directory is a file": case("train --run-dir plain.txt", "cannot write", "plain.txt", "choose another"),
    "rank out of range": case("train --rank 2 --world-size 2", "--rank 2", "has ranks 0 to 1"),
    "negative rank": case("train --rank -1 --world-size 2", "--rank -1", "has ranks 0 to 1"),
    "rank of how many": case("train --rank 0", "--rank 0 needs --world-size"),
    "port of no rank": case("train --master-port 29500", "--master-port need --rank"),
    "impossible port": case("train --rank 0 --world-size 2 --master-port 70000", "--master-port", "65535"),
    "strange environment": case("train", "RANK='first'", "not a number", RANK="first", WORLD_SIZE="2"),
    "impossible port in the environment": case(
        "train",
        "port 99999999 (MASTER_PORT) is not between 1 and 65535",
        RANK="0",
        WORLD_SIZE="2",
        MASTER_PORT="99999999",
    ),
    "elastic twice": case("train --strategy edp --workers 2 --elastic 1:2", "leave out --elastic"),
    "nothing to restart from": case("train --workers 2 --elastic 1:2 --save-interval 0", "--save-interval 100"),
    "workers beyond the most": case("train --workers 4 --elastic 3:3", "at most 3 workers take part"),
    "sizes that are none": case("bench scaling --workers two", "--workers 'two': give a number, or several"),
    "bench under torchrun": case("bench scaling", "run it without torchrun", WORLD_SIZE="2"),
    "a model that cannot be built": case(
        f"plan --memory gpt --hidden-size {2**62} --strategy single", "cannot be built, even on the meta device"
    ),
    "export of no run": case(
        "export runs/lama out", "there is no run at runs/lama; name a run directory, or a checkpoint folder inside one"
    ),
    "name that cannot be": case("train --elastic 1:2 --rdzv-endpoint a..b:29400", "a..b:29400", "not HOST:PORT"),
    "nccl and no nccl": case("train --backend nccl --no-nccl", "contradict each other"),
    "two numbers of workers": case("train --workers 2 --world-size 3", "--workers 2 and --world-size 3 contradict"),
    "workers and ranks": case("train --workers 3 --world-size 2 --rank 0", "--workers 3 and --world-size 2 contradict"),
    "two tasks": case("train few.py:Few empty.py", "one task at a time"),
    "unknown option": case("train --bogus", "--bogus", "see smolcluster train --help"),
    "unknown command": case("trian", "'trian'", "see smolcluster --help"),
    "an option without its value": case("train --run-dir", "--run-dir", "--help"),
    "config check": case("config check typo.yaml", "typo.yaml:4", "did you mean 'training.batch_size'?"),
}

_ONE = " --workers 1 --steps 2"
# Found by a worker: the run directory is there already, and goes again.
BY_A_WORKER = {
    "unknown tokenizer": case("train --override data.tokenizer=bites" + _ONE, "'bites'", "did you mean 'bytes'?"),
    "too many workers for single": case("train --strategy single --workers 2", "--workers 1 or --strategy allreduce"),
    "nccl without a GPU": case("train --backend nccl" + _ONE, "needs NVIDIA GPUs", "try --backend gloo"),
    "master that has no name": case(
        "train --rank 1 --world-size 2 --master-addr a..b --master-port 29400 --steps 2",
        "--master-addr a..b: this machine cannot resolve that name",
        "use the address of rank 0",
    ),
    "missing text": case("train --override data.name=text data.root=gone.txt" + _ONE, "data.root", "gone.txt"),
    "text of nobody": case(
        "train --override data.name=text data.root=~nobody-of-that-name" + _ONE, "no file or folder ~"
    ),
    "batch larger than the data": case("train --batch-size 99999" + _ONE, "99999", "training.batch_size="),
    "more workers than samples": case("train few.py:Few --workers 2", "only 1 training sample", "--workers 1"),
    "missing task file": case("train gone.py:Task" + _ONE, "gone.py", "use path/to/file.py:ClassName"),
    "missing task": case("train few.py:Fewer" + _ONE, "'Fewer'", "did you mean 'Few'?"),
    "no task at all": case("train empty.py" + _ONE, "empty.py has 0 tasks", "ClassName"),
    "task that raises": case(
        "train raises.py:Task" + _ONE, "raises.py", "line 3", "IndexError: list index out of range"
    ),
}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder: files with their contents, folders as None. Python's own cache does not count."""
    paths = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]
    return {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in paths}


def check_refused(ended: Ended, *says: str) -> str:
    """One message in the terms of the contract; returns it."""
    message = ended.err
    assert ended.status == 2, f"exit status {ended.status}\n{ended.out}\n{message}"
    assert message.startswith("smolcluster")
    assert message.count("smolcluster: ") <= 1
    assert message.endswith("\n")
    assert "Traceback" not in message
    for text in says:
        assert text in message
    return message


@pytest.fixture(scope="module", autouse=True)
def refused(
    smol: Smol, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[Ended]]]:
    """Every wrong command, beside the tests that need more, each in a folder of its own that must stay as it is."""
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}

    def run(number: int, wrong: Case) -> Ended:
        folder = tmp_path_factory.mktemp(f"case{number}")
        for name, text in FILES.items():
            (folder / name).write_text(text, encoding="utf-8")
        before = tree(folder)
        ended = smol.run(*wrong.arguments, cwd=folder, env=wrong.env)
        assert tree(folder) == before
        return ended

    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) - 1)) as pool:
        yield {
            name: pool.submit(run, number, wrong)
            for number, (name, wrong) in enumerate((AT_ONCE | BY_A_WORKER).items())
            if name in wanted
        }


# Data that is not what it should be


def idx_file(path: Path, shape: tuple[int, ...], *, missing_bytes: int = 0) -> None:
    count = 1
    for size in shape:
        count *= size
    header = bytes((0, 0, 8, len(shape))) + b"".join(size.to_bytes(4, "big") for size in shape)
    path.write_bytes(header + bytes(count - missing_bytes))


def test_truncated_mnist(smol: Smol, tmp_path: Path) -> None:
    data = tmp_path / "mnist"
    data.mkdir()
    for split, missing in (("train", 100), ("t10k", 0)):
        idx_file(data / f"{split}-images-idx3-ubyte", (64, 28, 28), missing_bytes=missing)
        idx_file(data / f"{split}-labels-idx1-ubyte", (64,))
    before = tree(tmp_path)
    ended = smol.run("train", "mnist", "--workers", "1", "--override", "data.root=mnist", cwd=tmp_path)
    check_refused(ended, "train-images-idx3-ubyte", "holds 50092 bytes", "header says 50192", "fetch it again")
    assert tree(tmp_path) == before


class _WrongBytes(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "11")
        self.end_headers()
        self.wfile.write(b"not a digit")

    def log_message(self, *_: object) -> None:
        """Quietly."""


@pytest.mark.slow
def test_download_with_the_wrong_checksum(smol: Smol, tmp_path: Path) -> None:
    """Both mirrors of MNIST answer with other bytes. They are the real ones but for their addresses."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _WrongBytes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirror = f"http://127.0.0.1:{server.server_port}"
        patches = tmp_path / "patches"
        patches.mkdir()
        (patches / "sitecustomize.py").write_text(
            "import sys\n\n"
            "if 'smolcluster.engine.process.main' in sys.orig_argv:\n"
            "    import smolcluster.data.mnist\n\n"
            f"    smolcluster.data.mnist.MIRRORS = ('{mirror}/one', '{mirror}/two')\n",
            encoding="utf-8",
        )
        env = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(patches), os.environ.get("PYTHONPATH")))),
            "SMOLCLUSTER_CACHE": str(tmp_path / "cache"),
            "NO_PROXY": "127.0.0.1",
        }
        ended = smol.run("train", "mnist", "--workers", "1", cwd=tmp_path, env=env)
        server.shutdown()
    check_refused(ended, "could not download", f"{mirror}/one/", f"{mirror}/two/", "has the checksum", "Put the file")
    assert not (tmp_path / "runs").exists()
    assert list((tmp_path / "cache" / "mnist").iterdir()) == []


# Runs that are there already


@pytest.fixture(scope="module")
def finished(smol: Smol, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps, in runs/done of the folder returned."""
    folder = tmp_path_factory.mktemp("finished")
    command = ("train", "--workers", "1", "--steps", "2", "--run-dir", "runs/done", "--override", *TINY)
    smol.run(*command, cwd=folder).ok()
    return folder


def without_logs(folder: Path) -> dict[str, bytes | None]:
    return {
        name: content for name, content in tree(folder).items() if "logs" not in name and not name.endswith(".lock")
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--run-dir runs/done", ("runs/done already holds a run", "--resume runs/done", "another --run-dir")),
        (
            "--resume runs/done --hidden-size 64 --steps 9",
            ("is of another model", "(32,)", "(64,)", "config.yaml", "without --resume"),
        ),
        ("--resume latest", ("at step 2", "nothing is left to train", "raise training.steps (--steps)")),
    ],
    ids=["a run is there", "another model", "nothing is left"],
)
def test_a_finished_run_stays_as_it_was(smol: Smol, finished: Path, arguments: str, says: tuple[str, ...]) -> None:
    """With the configuration that fits its checkpoints."""
    before = without_logs(finished)
    check_refused(smol.run("train", *arguments.split(), cwd=finished), *says)
    assert without_logs(finished) == before


def test_run_directory_in_use(smol: Smol, finished: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    before = without_logs(finished)
    with (finished / "runs" / "done" / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = smol.run("train", "--resume", "latest", "--steps", "9", cwd=finished)
    check_refused(ended, "another process is training in runs/done", "another --run-dir")
    assert without_logs(finished) == before


def test_master_port_in_use(smol: Smol, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = smol.run("train", "--rank", "0", "--world-size", "2", "--master-port", port, cwd=tmp_path)
    check_refused(ended, f"--master-port {port}", "in use", "choose another with --master-port")
    assert tree(tmp_path) == {}


# No room on the disk


def test_no_room_at_the_start(smol: Smol, tmp_path: Path) -> None:
    with small_disk(tmp_path, kilobytes=128) as disk:
        command = ("train", "--workers", "1", "--run-dir", "disk/run", "--override", *TINY)
        check_refused(
            smol.run(*command, cwd=tmp_path), "disk/run", "kB free", "another --run-dir", "checkpoint_steps=0"
        )
        assert tree(disk) == {}

        # Not even for the configuration.
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free))
        check_refused(smol.run(*command, cwd=tmp_path), "cannot write", "disk/run", "No space left", "--run-dir")
        assert list(tree(disk)) == ["ballast"]


@pytest.mark.slow
def test_a_journal_keeps_to_the_room_there_is(smol: Smol, tmp_path: Path) -> None:
    """A server whose disk has room for a checkpoint and not for its journal is refused; a little more is enough for any
    number of steps."""
    settings = ("training.checkpoint_steps=1000", "training.max_checkpoints_to_keep=1", "training.eval_steps=0")
    command = ("train", "--strategy", "syncps", "--workers", "1", "--steps", "90", "--run-dir", "disk/run")
    command += ("--override", *TINY, *settings, "cluster.standby=false")
    with small_disk(tmp_path, kilobytes=4096) as disk:
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - (1200 << 10)))
        said = ("the server's journal", "at least", "disk/run", "MB free", "another --run-dir")
        check_refused(smol.run(*command, cwd=tmp_path), *said)
        assert list(tree(disk)) == ["ballast"]
        (disk / "ballast").unlink()
        ended = smol.run(*command, cwd=tmp_path).ok()  # 8 MB of gradients
        assert "training is blocked" not in ended.out
        assert read_summary(disk / "run")["steps"] == 90


def test_room_that_runs_out_does_not_stop_training(smol: Smol, tmp_path: Path) -> None:
    """The disk fills up in the middle of the run: every failure is said aloud, and training goes to its end."""
    with small_disk(tmp_path, kilobytes=2048) as disk:
        settings = ("training.checkpoint_steps=20", "training.max_checkpoints_to_keep=1")
        command = ("train", "--workers", "1", "--steps", "300", "--run-dir", "disk/run", "--override", *TINY, *settings)
        running = smol.start(*command, cwd=tmp_path)
        running.until(lambda: len(read_rows(disk / "run")) >= 50, what="50 rows")
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free))
        ended = running.end().ok()
        assert "could not be saved" in ended.out
        assert "No space left on device" in ended.out
        assert ended.out.count("is lost: No space left on device; is the disk full? Training continues") == 1
        assert "step 300/300" in ended.out
        assert "finished: single, 1 worker, 300 steps" in ended.out
        # What was saved before is whole, and with room again the run can go on.
        (disk / "ballast").unlink()
        again = smol.run("train", "--resume", "disk/run", cwd=tmp_path).ok()
        assert "resumed at step" in again.out
        assert read_summary(disk / "run")["status"] == "finished"


# The cases above, done beside these tests


@pytest.mark.parametrize("name", AT_ONCE)
def test_refused_at_once(refused: dict[str, Future[Ended]], name: str) -> None:
    ended = refused[name].result()
    message = check_refused(ended, *AT_ONCE[name].says)
    assert message.count("\n") == 1
    assert ended.out == ""


@pytest.mark.parametrize("name", BY_A_WORKER)
def test_refused_by_a_worker(refused: dict[str, Future[Ended]], name: str) -> None:
    if name == "nccl without a GPU" and Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    message = check_refused(refused[name].result(), *BY_A_WORKER[name].says)
    assert message.count("\n") == 1
    assert message.startswith("smolcluster: ")
