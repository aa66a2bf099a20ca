"""Keeping an elastic run going, with processes that follow a script; and how a run is found, prepared and joined."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.places import eventually
from tests.unit.samples import logged, spec_of
from tests.unit.story import ROOT, Script, Story, recorded, use_scripted_processes

from smolcluster.comm.addresses import dial_address
from smolcluster.config import dump, load_config, resolve
from smolcluster.config.schema import Config
from smolcluster.engine.run_dir import RunDir, find_resume
from smolcluster.errors import UserError, WorkerFailed
from smolcluster.launch.join.worker import worker_spec
from smolcluster.launch.local import elastic, supervisor
from smolcluster.launch.local.elastic import join_commands, run_elastic
from smolcluster.launch.local.outcome import Interrupted, Outcome
from smolcluster.launch.local.processes import end_all, signals, spawn, wait_for
from smolcluster.launch.prepare import Prepared, choose_plane, prepare
from smolcluster.observe.events import Event, RunFinished, StepLogged
from smolcluster.stopping import stop_signals

WORKS = ["row 1", "note worked-{rank}", "await over", "finish"]
SERVES = ["listen", "row 1", "await worked-0", "await worked-1", "note over", "finish"]


class Elastic(Story):
    def run(self, script: Script, *, workers: int = 2, standby: bool = True, **options: Any) -> dict[str, Any]:
        self.write(script)
        resume = options.pop("resume", None)
        wanted = config(max(1, workers), **{"cluster.standby": standby})
        run = Prepared(config=wanted, workers=workers, run_dir=self.run_dir, resume=resume)
        return run_elastic(run, sinks=[self], **options)

    def lives(self, name: str) -> list[tuple[int, str]]:
        lines = (self.run_dir.path / f"{name}-lives.txt").read_text().splitlines()
        return [(int(pid), address) for pid, address in (line.split() for line in lines)]

    def born(self) -> list[int]:
        return [int(line) for line in (self.folder / "born.txt").read_text().split()]


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elastic:
    use_scripted_processes(tmp_path, elastic, monkeypatch)
    monkeypatch.setattr(elastic, "PAUSE_S", 0.02)
    return Elastic(tmp_path)


def config(workers: int = 2, **overrides: Any) -> Config:
    return resolve(load_config([], overrides={"strategy.name": "edp", "cluster.num_workers": workers} | overrides))


# Keeping it going ---------------------------------------------------------------------------------------------------


def test_a_good_run(story: Elastic) -> None:
    summary = story.run({"server": [SERVES], "worker-0": [WORKS], "worker-1": [WORKS]})
    assert summary["status"] == "finished"
    assert summary["restarts"] == 0
    assert story.notices() == []
    assert {e.role for e in story.events if isinstance(e, StepLogged)} == {"server", "worker"}
    # Nobody is told where the server is before it listens.
    assert [address for _, address in story.lives("worker-0")] == ["127.0.0.1:4711"]
    assert [address for _, address in story.lives("server")] == ["127.0.0.1:0"]
    assert story.all_gone()


def test_a_worker_that_dies_is_started_again(story: Elastic) -> None:
    dies = ["row 1", "die"]
    summary = story.run({"server": [SERVES], "worker-0": [dies, dies, dies, dies, WORKS], "worker-1": [WORKS]})
    assert summary["restarts"] == 4
    assert story.summary()["restarts"] == 4
    assert story.notices() == ["worker 0 died (killed by SIGKILL); restarting it"] * 4
    assert len({pid for pid, _ in story.lives("worker-0")}) == 5
    assert story.all_gone()


def test_a_worker_that_never_works_is_given_up_and_the_others_go_on(story: Elastic) -> None:
    serves = ["listen", "row 1", "await worked-1", "await notice-3", "row 2", "note over", "finish"]
    lives = [["die"], ["die"], ["fail error ValueError: no"]]
    summary = story.run({"server": [serves], "worker-0": lives, "worker-1": [WORKS]})
    assert summary["status"] == "finished"
    assert summary["restarts"] == 2
    *_, last = story.notices()
    first, *rest = last.splitlines()
    assert first == "worker 0 failed 3 times in a row: ValueError: no"
    assert rest[0] == "  | in line 7"
    assert rest[-1].endswith(".log; training continues without it")
    assert len(story.lives("worker-0")) == 3


def test_a_worker_that_fails_of_itself_soon_after_its_first_step_is_given_up_too(story: Elastic) -> None:
    serves = ["listen", "row 1", "await worked-1", "await notice-3", "note over", "finish"]
    lives = [["row 1", "fail error x"]]
    assert story.run({"server": [serves], "worker-0": lives, "worker-1": [WORKS]})["restarts"] == 2
    assert story.notices()[-1].startswith("worker 0 failed 3 times in a row: x\n")


def test_without_any_worker_the_run_ends_with_the_last_words(story: Elastic) -> None:
    serves = ["listen", "row 1", "stop?", "leave"]
    with pytest.raises(WorkerFailed, match="worker 0 failed 3 times in a row: ZeroDivisionError") as raised:
        story.run({"server": [serves], "worker-0": [["fail error ZeroDivisionError: division by zero"]]}, workers=1)
    assert "| in line 7" in str(raised.value)
    assert "full log: " in str(raised.value)
    summary = story.summary()
    assert summary["status"] == "failed"
    assert summary["error"] == "worker 0 failed 3 times in a row: ZeroDivisionError: division by zero"
    assert summary["restarts"] == 2
    assert [e.summary["status"] for e in story.events if isinstance(e, RunFinished)] == ["failed"]
    assert story.all_gone()


def test_a_mistake_of_all_workers_ends_the_run_and_leaves_no_trace(story: Elastic) -> None:
    lives = [["fail user training.device 'cuda': torch sees no NVIDIA GPU here"]]
    with pytest.raises(UserError, match=r"^training\.device 'cuda': torch sees no NVIDIA GPU here$"):
        story.run({"server": [["listen", "hang"]], "worker-0": lives, "worker-1": lives})
    assert len(story.lives("worker-0")) == 1
    assert not story.run_dir.config.exists()
    assert not story.run_dir.logs.exists()
    assert story.all_gone()


def test_a_mistake_of_one_worker_is_told_and_the_others_go_on(story: Elastic) -> None:
    serves = ["listen", "row 1", "await worked-1", "await notice-1", "note over", "finish"]
    lives = [["fail user rank 0 is taken"]]
    assert story.run({"server": [serves], "worker-0": lives, "worker-1": [WORKS]})["status"] == "finished"
    assert story.notices() == ["worker 0 cannot join the run: rank 0 is taken"]


def test_the_server_comes_back_on_its_port_as_the_process_that_stood_by(story: Elastic) -> None:
    first = ["listen", "row 1", "await ../fourth", "row 2", "die"]
    second = ["listen", "row 3", *SERVES[2:]]
    summary = story.run({"server": [first, second], "worker-0": [WORKS], "worker-1": [WORKS]})
    assert summary["restarts"] == 1
    assert summary["wall_s"] > 0
    assert story.notices() == ["the server died (killed by SIGKILL); restarting it"]
    (_, before), (pid, after) = story.lives("server")
    assert (before, after) == ("127.0.0.1:0", "127.0.0.1:4711")
    assert pid in story.born()[:4]  # before the first had died
    assert len(story.lives("worker-0")) == 1
    assert story.all_gone()


def test_the_process_that_stands_by_is_named_so(story: Elastic, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int, bool]] = []
    monkeypatch.setattr(supervisor, "spawn", recorded(started))
    serves = ["listen", "row 1", "await ../fourth", *SERVES[2:]]
    story.run({"server": [serves], "worker-0": [WORKS], "worker-1": [WORKS]})
    assert started == [("server", 2, False), ("worker", 0, False), ("worker", 1, False), ("server", 2, True)]


def test_no_standby_is_kept_where_it_is_not_wanted(story: Elastic) -> None:
    lives = [["listen", "row 1", "die"], ["listen", "row 2", *SERVES[2:]]]
    script: Script = {"server": lives, "worker-0": [WORKS], "worker-1": [WORKS]}
    assert story.run(script, standby=False)["restarts"] == 1
    assert len(story.born()) == 4


def test_a_server_that_makes_no_headway_is_given_up(story: Elastic) -> None:
    lives = [["listen", "row 1", "die"], ["listen", "row 1", "die"], ["listen", "die"]]
    with pytest.raises(WorkerFailed, match="the server failed 3 times in a row: killed by SIGKILL"):
        story.run({"server": lives, "worker-0": [WORKS], "worker-1": [WORKS]})
    assert len(story.lives("server")) == 3
    assert story.summary()["status"] == "failed"
    assert (story.summary()["workers"], story.summary()["world_size"]) == (2, 3)
    assert story.all_gone()


def test_a_server_that_makes_headway_is_started_again_and_again(story: Elastic) -> None:
    lives = [["listen", f"row {step}", "die"] for step in range(1, 6)]
    summary = story.run(
        {"server": [*lives, ["listen", "row 6", *SERVES[2:]]], "worker-0": [WORKS], "worker-1": [WORKS]}
    )
    assert summary["restarts"] == 5


def test_a_mistake_of_the_server_ends_the_run(story: Elastic) -> None:
    with pytest.raises(UserError, match=r"^0\.0\.0\.0 needs a token$"):
        story.run({"server": [["fail user 0.0.0.0 needs a token"]], "worker-0": [WORKS], "worker-1": [WORKS]})
    assert not story.run_dir.config.exists()
    assert story.all_gone()


def test_workers_that_do_not_leave_are_ended(story: Elastic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "LEAVE_S", 0.1)
    monkeypatch.setattr(supervisor, "GRACE_S", 0.1)
    stays = ["row 1", "note worked-0", "hang"]
    assert story.run({"server": [SERVES], "worker-0": [stays], "worker-1": [WORKS]})["status"] == "finished"
    assert story.all_gone()


def test_the_first_interrupt_is_for_the_server(story: Elastic) -> None:
    works = ["row 1", "await over", "finish"]
    serves = ["listen", "row 1", "note serving", "stop?", "note over", "leave"]
    story.interrupt_at("serving")
    with pytest.raises(Interrupted, match=r"^interrupted; nothing was saved$"):
        story.run({"server": [serves], "worker-0": [works], "worker-1": [works]})
    assert story.notices() == ["stopping after this step and saving; press Ctrl-C again to exit at once"]
    assert story.summary()["status"] == "interrupted"
    assert story.all_gone()


def test_the_second_interrupt_ends_all(story: Elastic) -> None:
    serves = ["listen", "row 1", "note serving", "hang"]
    story.interrupt_at("serving", "notice-1")
    with pytest.raises(Interrupted):
        story.run({"server": [serves], "worker-0": [["hang"]], "worker-1": [["hang"]]})
    assert story.summary()["status"] == "interrupted"
    assert story.summary()["workers"] == 2
    assert story.all_gone()


def test_a_worker_that_is_to_stop_still_meets_the_others() -> None:
    """Rank 0 waits for all of them: one that left would keep it waiting for two minutes."""
    code = (
        "import time\nfrom smolcluster.engine.channel import PipeChannel\nchannel = PipeChannel(b'', announce=print)\n"
        "while not channel.stop_requested():\n    time.sleep(0.01)\n"
        "print('asked', flush=True)\nprint(channel.rendezvous_port(), flush=True)\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        process.stdin.write('{"op": "stop"}\n')
        assert process.stdout.readline() == "asked\n"
        process.stdin.write('{"op": "port", "port": 7}\n')
        assert process.stdout.readline() == "7\n"


@pytest.mark.skipif(sys.platform == "win32", reason="a console of its own gets no Ctrl-C")
def test_an_interrupt_does_not_end_a_process_that_has_just_started(tmp_path: Path) -> None:
    """One that it got before it left our group, or while it imports: the spec is all it waits for, and without one it ends."""
    spec = spec_of(run_dir=str(tmp_path))
    child = spawn(spec, queue.SimpleQueue())
    os.kill(child.process.pid, signal.SIGINT)
    child.process.stdin.close()
    wait_for([child], timeout_s=200)
    end_all([child], grace_s=0)
    assert (child.process.returncode, child.log.read_text()) == (1, "")
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # ours is as it was


def cmdline(pid: int) -> list[str]:
    """It is empty for a moment while a process starts."""
    found = eventually(Path(f"/proc/{pid}/cmdline").read_bytes, timeout_s=20.0, what="a command line")
    return found.decode().rstrip("\0").split("\0")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_role_rank_and_run_are_in_the_command_line(tmp_path: Path) -> None:
    """A spare can be told from the server by `ps`; and a process that becomes another says so itself."""
    spec = spec_of(run_dir=str(tmp_path), role="server", rank=2, world_size=2, local_world_size=3)
    children = [
        spawn(spec, queue.SimpleQueue(), module="tests.unit.scripted_process", standby=spare) for spare in (False, True)
    ]
    try:
        server, spare = (" ".join(cmdline(child.process.pid)) for child in children)
    finally:
        end_all(children, grace_s=0)
    assert server.endswith(f"smolcluster server rank 2 of {tmp_path}")
    assert spare.endswith(f"smolcluster standby server rank 2 of {tmp_path}")
    code = "from smolcluster.engine.process.title import set_title; set_title('smolcluster server rank 2'); print(); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, "smolcluster", "spare"], stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()
        assert cmdline(process.pid) == ["smolcluster server rank 2"]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGHUP")
def test_a_hangup_asks_to_stop_unless_it_is_ignored() -> None:
    """`nohup` ignores it for its command."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
        with signals(list, queue.SimpleQueue()):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_server_alone_says_how_to_join(story: Elastic) -> None:
    serves = ["listen", "row 1", "finish"]
    assert story.run({"server": [serves]}, workers=0, port=65432)["status"] == "finished"
    assert story.lives("server")[0][1] == "127.0.0.1:65432"
    assert story.notices()[1] == "    smolcluster worker 0 HOSTNAME --server 127.0.0.1:4711"


def test_invitations() -> None:
    lines = list(join_commands(config(2, **{"cluster.bind": "::1"}), 7))
    assert lines == [
        "listening on [::1]:7; 2 workers expected:",
        "    smolcluster worker 0 HOSTNAME --server [::1]:7",
        "    smolcluster worker 1 HOSTNAME --server [::1]:7",
    ]
    named = resolve(load_config([ROOT / "configs" / "cluster_config_edp.yaml"], overrides=["cluster.bind=0.0.0.0"]))
    assert list(join_commands(named, 65432))[1] == "    smolcluster worker 0 pi5 --server 10.10.0.1:65432"
    assert dial_address("0.0.0.0", 7) == "127.0.0.1:7"
    assert list(join_commands(config(20), 7))[-1] == "    and so on, up to rank 19"


# What a run starts from ---------------------------------------------------------------------------------------------


def journal(run: RunDir) -> Path:
    (run.journal / "snapshots" / "step-00000001").mkdir(parents=True)
    return run.journal


def test_a_run_that_is_continued_keeps_its_journal_and_any_other_start_does_without(story: Elastic) -> None:
    run = story.run_dir
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "step-00000001").mkdir()
    seen: list[bool] = []

    class Look(Elastic):
        def handle(self, event: Event) -> None:
            if isinstance(event, StepLogged):
                seen.append(self.run_dir.journal.exists())

    script = {"server": [["listen", "row 1", "finish"]]}
    look = Look(story.folder)
    journal(run)
    look.run(script, workers=0, port=0, resume=run.checkpoints)
    assert (seen, run.journal.exists()) == ([True], True)
    look.run(script, workers=0, port=0, resume=run.checkpoints / "step-00000001")
    assert (seen, run.journal.exists()) == ([True, False], False)


def test_a_mistake_brings_the_journal_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    journal(run)

    def fail(*, begun: bool) -> None:
        with run.without_journal():
            assert not run.journal.exists()
            if begun:
                run.journal.mkdir()
            raise UserError("no")

    with pytest.raises(UserError):
        fail(begun=False)
    assert run.can_continue()
    with pytest.raises(UserError):
        fail(begun=True)  # a new server has its own by then
    assert not run.can_continue()
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_a_journal_is_enough_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(Path("runs/a"))
    journal(run)
    for said, where in (("runs/a", None), ("latest", None), ("auto", run.path)):
        found = find_resume(said, run_dir=where)
        assert (found.run, found.source) == (run, run.checkpoints)
    assert "--resume runs/a" in str(Outcome(command="server").interrupted(run))
    assert "smolcluster server" in str(Outcome(command="server").interrupted(run))


def test_a_run_that_died_before_it_saved_anything_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(Path("runs/a"))
    assert find_resume("auto", run_dir=run.path) is None  # it was never there
    run.create(dump(config(**{"training.seed": 7})), resume=False)
    run.metrics.write_text('{"step": 1}\n')
    (run.journal / "snapshots" / ".tmp-step-00000001").mkdir(parents=True)
    run.summary.write_text('{"status": "interrupted", "steps": 0}')  # stopped while it started, as by a batch system
    assert find_resume("auto", run_dir=run.path) is None
    run.summary.write_text('{"status": "failed"}')
    prepared = prepare(["gpt"], overrides={"strategy.name": "edp"}, run_dir=run.path, resume="auto")
    assert (prepared.resume, prepared.fresh, prepared.run_dir) == (None, True, run)
    # Without a configuration it is the one that the run began with: the same seed, the same weights.
    assert prepare(run_dir=run.path, resume="auto").config.training.seed == 7
    with run.opened("", resume=False, fresh=True):
        assert run.metrics.read_text() == ""
    run.summary.write_text('{"status": "finished"}')
    with pytest.raises(UserError, match="has finished without a checkpoint"):
        find_resume("auto", run_dir=run.path)
    with pytest.raises(UserError, match="give --run-dir"):
        find_resume("auto", run_dir=None)


def test_planes() -> None:
    assert choose_plane(config()) == "elastic"
    assert choose_plane(resolve(load_config([], overrides={"strategy.name": "allreduce"}))) == "mesh"
    with pytest.raises(UserError, match="strategy edp does not run on the mesh plane; strategies that do: allreduce, "):
        choose_plane(config(**{"cluster.plane": "mesh"}))
    with pytest.raises(
        UserError, match=r"strategy single does not run on the elastic plane; strategies that do: .*edp"
    ):
        choose_plane(config(**{"cluster.plane": "elastic", "strategy.name": "single"}))
    with pytest.raises(UserError, match="--backend gloo is for the mesh plane"):
        prepare([], overrides={"strategy.name": "edp"}, backend="gloo")


def test_the_servers_rows_are_the_runs() -> None:
    outcome = Outcome()
    outcome.handle(logged(3, 0, role="worker", loss=3.0))
    assert outcome.last_row["loss"] == 3.0
    outcome.handle(logged(2, 2, role="server", loss=2.0))
    outcome.handle(logged(9, 0, role="worker", loss=9.0))
    assert outcome.last_row["loss"] == 2.0


# Joining ------------------------------------------------------------------------------------------------------------

EDP = str(ROOT / "configs" / "cluster_config_edp.yaml")


def test_without_files_all_but_its_own_comes_from_the_server() -> None:
    own = {"training.device": "cpu", "training.precision": None, "data.root": "/data"}
    overrides = ["logging.log_interval=3", *own.items()]
    spec = worker_spec(1, "pi5", server="mini1:7", batch_size=8, overrides=overrides, strategy="SynchronousPS")
    assert (spec.config, spec.rank, spec.host, spec.server, spec.plane) == ({}, 1, "pi5", "mini1:7", "elastic")
    assert spec.overrides == {
        "training.device": "cpu",
        "data.root": "/data",
        "logging.log_interval": 3,
        "cluster.batch_size": {"pi5": 8},
    }
    assert spec.strategy == "syncps"


def test_with_files_the_server_and_the_host_are_known() -> None:
    spec = worker_spec(3, "macbook", sources=[EDP, "gpt"], overrides={"training.device": "mps"})
    assert spec.server == "10.10.0.1:65432"
    assert spec.config["strategy"]["name"] == "edp"
    assert spec.overrides == {"training.device": "mps"}
    assert worker_spec(0, "pi5", sources=[EDP], server="127.0.0.1:7").server == "127.0.0.1:7"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host": "pi6", "sources": [EDP]}, "'pi6' is not among the workers of this configuration; did you mean 'pi5'?"),
        ({"host": "mini1", "sources": [EDP]}, "'mini1' is not among the workers of this configuration; .* macbook, pi5, win"),
        ({"rank": 4, "sources": [EDP]}, "rank 4 is too high: this configuration has 3 workers"),
        ({}, "give --server HOST:PORT"),
        ({"sources": ["gpt"]}, "give --server HOST:PORT"),
        ({"server": "mini1"}, "--server 'mini1' is not HOST:PORT"),
        ({"server": "mini1:99999"}, "--server 'mini1:99999' is not HOST:PORT"),
        ({"server": "a:1", "overrides": ["training.learning_rate=1"]}, "training.learning_rate is set by the server"),
        ({"server": "a:1", "overrides": ["cluster.token=abc"]}, "cluster.token is set by the server"),
        ({"server": "a:1", "overrides": {"training.precision": "fp8"}}, "--precision: training.precision = 'fp8': must be"),
        ({"server": "a:1", "strategy": "edpp"}, "unknown strategy 'edpp'; did you mean 'edp'"),
    ],
)  # fmt: skip
def test_mistakes_in_joining(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        worker_spec(**({"rank": 0, "host": "pi5"} | arguments))


def test_one_worker_goes_on_with_what_several_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "run")
    with run.opened("cluster: {num_workers: 2}\nstrategy: allreduce\n", resume=False):
        (run.checkpoints / "step-00000001").mkdir(parents=True)
        (run.checkpoints / "step-00000001" / "manifest.json").write_text("{}")
    assert prepare(resume="run", overrides={"strategy.name": "single"}).workers == 1
    assert prepare(resume="run").workers == 2


def test_a_mistake_in_resuming_leaves_the_configuration_as_old_as_it_was(tmp_path: Path) -> None:
    """A newer one would say that the run that has ended was resumed."""
    run = RunDir(tmp_path / "run")
    with run.opened("a: 1\n", resume=False):
        pass
    os.utime(run.config, (1_700_000_000, 1_700_000_000))
    with pytest.raises(UserError, match="a mistake"), run.opened("a: 2\n", resume=True):
        raise UserError("a mistake")
    assert (run.config.read_text(), run.config.stat().st_mtime) == ("a: 1\n", 1_700_000_000)


def test_the_last_rows_of_all_ranks_are_the_runs() -> None:
    """A run that dies says the samples of all its ranks and the loss of the global batch, not those of rank 0."""
    outcome = Outcome()
    for rank, (loss, samples) in enumerate(((2.0, 30), (5.0, 10))):
        outcome.handle(logged(3, rank, loss=loss, samples=samples))
    last = outcome.last_row
    assert (last["samples"], last["loss"], last["step"]) == (40, 2.75, 3)


def test_the_summary_of_a_failed_run_has_what_was_measured(tmp_path: Path) -> None:
    outcome = Outcome()
    measured = {"val_loss": 1.5, "val_accuracy": 0.5, "val_ppl": 4.5, "val_extra": {"f1": 0.25}}
    for rank in range(2):
        outcome.handle(
            logged(3, rank, loss=2.0, samples=30, tokens_per_s=7.0, skipped=2, **(measured if rank == 0 else {}))
        )
    for rank in range(2):  # no evaluation came with the last rows
        outcome.handle(logged(4, rank, loss=2.0, samples=40, tokens_per_s=8.0, skipped=2, staleness_max=1))
    run = RunDir(tmp_path)
    outcome.write_summary(run, config(), world_size=2, error="killed")
    summary = json.loads(run.summary.read_text())
    expected = {"val_loss": 1.5, "val_accuracy": 0.5, "val_ppl": 4.5, "val_f1": 0.25, "steps": 4, "samples": 80}
    expected |= {"skipped": 2, "staleness_max": 1, "tokens_per_s": 16.0, "error": "killed", "status": "failed"}
    assert {name: summary.get(name) for name in expected} == expected
