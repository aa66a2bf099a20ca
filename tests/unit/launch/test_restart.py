"""Workers that are started again: rounds as pure functions, and launchers with processes that follow a script."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.places import eventually, free_port
from tests.unit.story import Script, Story, recorded, use_scripted_processes

from smolcluster.comm.elastic.transport import tcp
from smolcluster.comm.elastic.transport.security import Keyring, new_token
from smolcluster.comm.mesh.heartbeats import MembershipClient, MembershipServer
from smolcluster.config import load_config, resolve
from smolcluster.config.schema import Config
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.local import supervisor
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.prepare import Prepared
from smolcluster.launch.restart import launcher as restart
from smolcluster.launch.restart import rendezvous
from smolcluster.launch.restart.endpoint import join_endpoint
from smolcluster.launch.restart.launcher import run_restarting
from smolcluster.launch.restart.plan import ElasticRange, check_restartable, elastic_from_flags, parse_elastic
from smolcluster.launch.restart.rendezvous import RoundPlan, broken, next_round

# What is asked for -------------------------------------------------------------------------------------------------


def test_what_elastic_means() -> None:
    assert parse_elastic("2:4") == ElasticRange(min_workers=2, max_workers=4, local_workers=4)
    assert parse_elastic("4", workers=4) == ElasticRange(min_workers=4, max_workers=4, local_workers=4)
    many = parse_elastic("2:8", workers=2, endpoint="mini1:29400", max_restarts=3)
    assert many == ElasticRange(
        min_workers=2, max_workers=8, local_workers=2, endpoint=("mini1", 29400), max_restarts=3
    )
    assert parse_elastic("2:8", endpoint="[::1]:29400").local_workers == 1
    assert elastic_from_flags(None, workers=2, endpoint=None, max_restarts=None) is None
    assert elastic_from_flags("2", workers=None, endpoint=None, max_restarts=None) == ElasticRange(
        min_workers=2, max_workers=2, local_workers=2
    )


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("two", {}, "--elastic two: write MIN:MAX"),
        ("4:2", {}, "--elastic 4:2: write MIN:MAX"),
        ("0:2", {}, "--elastic 0:2: write MIN:MAX"),
        ("2:6", {"workers": 4}, "only 4 workers on this machine; use --elastic 2:4, or --rdzv-endpoint"),
        ("1:2", {"workers": 4}, "at most 2 workers take part; use --workers 2"),
        ("1:2", {"endpoint": "mini1"}, "--rdzv-endpoint 'mini1' is not HOST:PORT"),
        ("1:2", {"max_restarts": -1}, "--max-restarts -1: 0 or more"),
        (None, {"endpoint": "mini1:1"}, "--rdzv-endpoint needs --elastic MIN:MAX"),
        (None, {"max_restarts": 3}, "--max-restarts needs --elastic MIN:MAX"),
        ("1:2", {"started_by": "rank 0"}, "--elastic starts the ranks itself: leave out --rank"),
    ],
)
def test_mistakes_in_asking(text: str | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        elastic_from_flags(text, **({"workers": None, "endpoint": None, "max_restarts": None} | options))


def test_what_need_not_or_cannot_start_again() -> None:
    with pytest.raises(UserError, match="edp runs on the elastic plane, where workers join and die without a restart"):
        check_restartable(config(**{"strategy.name": "edp"}), "elastic")
    with pytest.raises(UserError, match=r"this run saves none before its end; set training\.checkpoint_steps"):
        check_restartable(config(**{"training.checkpoint_steps": 0}), "mesh")
    with pytest.raises(UserError, match="--save-interval 100"):
        check_restartable(config(**{"training.eval_steps": 0}), "mesh")
    check_restartable(config(), "mesh")


def config(**overrides: Any) -> Config:
    return resolve(load_config([], overrides={"strategy.name": "allreduce", "cluster.num_workers": 2} | overrides))


def prepared(config: Config, run_dir: RunDir) -> Prepared:
    return Prepared(config=config, workers=config.cluster.num_workers or 1, run_dir=run_dir)


# Rendezvous ------------------------------------------------------------------------------------------------------------


def launchers(*said: tuple[int, int], leads: int = 0, **more: Any) -> dict[int, dict[str, Any]]:
    """(workers, asks) of each."""
    names = "abcdef"
    return {
        n: {"host": names[n], "workers": workers, "asks": asks, "leads": n == leads, **more.get(names[n], {})}
        for n, (workers, asks) in enumerate(said)
    }


SIZES = [2, 3, 4]


@pytest.mark.parametrize(
    ("current", "there", "last_call", "expected"),
    [
        (RoundPlan(), launchers((1, 1)), True, None),  # too few
        (RoundPlan(), launchers((2, 1)), False, None),  # enough, but more may come
        (RoundPlan(), launchers((2, 1)), True, (2, [[0, 2]])),
        (RoundPlan(), launchers((2, 1), (2, 1)), False, (4, [[0, 2], [1, 2]])),  # nobody else has room
        (RoundPlan(), launchers((2, 1), (2, 1), leads=1), False, (4, [[1, 2], [0, 2]])),  # rank 0 is the leader's
        (RoundPlan(), launchers((2, 1), (2, 1), (2, 1)), False, (4, [[0, 2], [1, 2]])),  # the third is spare
        (RoundPlan(), launchers((3, 1), (3, 1)), False, (4, [[0, 3], [1, 1]])),
        (RoundPlan(), launchers((2, 0), (2, 1)), True, None),  # the leader is not ready
        (RoundPlan(number=1, parts=[[0, 2], [1, 2]]), launchers((2, 2), (2, 1)), True, None),  # one is on its way
        (RoundPlan(number=1, parts=[[0, 2], [1, 2]]), launchers((2, 2)), True, (2, [[0, 2]])),  # and now it is gone
        (RoundPlan(number=1, parts=[[0, 2]]), launchers((2, 2), (1, 2)), True, (3, [[0, 2], [1, 1]])),
    ],
)
def test_when_a_round_begins(
    current: RoundPlan, there: dict[int, dict[str, Any]], last_call: bool, expected: tuple[int, list[list[int]]] | None
) -> None:
    assert next_round(current, there, SIZES, last_call=last_call) == expected


def test_a_size_that_cannot_run_is_passed_over() -> None:
    assert next_round(RoundPlan(), launchers((1, 1), (1, 1), (1, 1)), [2, 4], last_call=True) == (2, [[0, 1], [1, 1]])


def test_who_has_which_ranks() -> None:
    plan = RoundPlan(number=1, world_size=5, parts=[[3, 2], [0, 1], [7, 2]])
    assert [list(plan.ranks(n)) for n in (3, 0, 7, 1)] == [[0, 1], [2], [3, 4], []]


PAIR = RoundPlan(number=1, world_size=2, parts=[[0, 1], [1, 1]])


@pytest.mark.parametrize(
    ("there", "gone", "expected"),
    [
        (launchers((1, 1), (1, 1)), {}, None),
        (launchers((1, 1), (1, 2), b={"why": "rank 1 died"}), {}, ("rank 1 died", False)),
        (launchers((1, 1), (1, 2)), {}, ("another machine restarts", True)),
        (launchers((1, 1)), {1: {"host": "b"}}, ("b is gone", False)),
        (launchers((1, 1)), {1: {"host": "b", "leaves": True}}, ("b has left", True)),
        (launchers((1, 1)), {1: {"host": "b", "done": True}}, None),
        (launchers((1, 1), (1, 1), (1, 2)), {}, ("c has joined", True)),
        (launchers((1, 1), (1, 1), (1, 1)), {}, None),  # it is not ready yet
        (launchers((1, 1), (1, 1)), {5: {"host": "f"}}, None),  # was none of us
    ],
)
def test_when_a_round_ends(there: Any, gone: Any, expected: tuple[str, bool] | None) -> None:
    found = broken(PAIR, 0, there, gone, [2, 3])
    assert (None if found is None else (found.why, found.graceful)) == expected


def test_no_round_ends_for_a_machine_that_would_not_be_used() -> None:
    assert broken(PAIR, 0, launchers((1, 1), (1, 1), (1, 2)), {}, [2, 4]) is None


# Where launchers meet --------------------------------------------------------------------------------------------------


def refuses(words: str, where: tuple[str, int], *, timeout_s: float, token: bool = True) -> None:
    keyring = Keyring([new_token()]) if token else None
    with pytest.raises(UserError, match=words), join_endpoint(where, timeout_s=timeout_s, keyring=keyring):
        pass


def test_launchers_wait_for_the_one_that_leads_as_long_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[str] = []

    async def nobody(_: Any, host: str, port: int) -> socket.socket:
        attempts.append(host)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    monkeypatch.setattr(tcp, "dial", nobody)
    message = (
        r"no response from --rdzv-endpoint 192.0.2.1:9 in 0.5 s \(cluster.join_timeout\): Connection refused; start the"
    )
    refuses(message, ("192.0.2.1", 9), timeout_s=0.5)
    assert len(attempts) > 1  # the name is asked again: a pod that leads may have another address


def test_a_name_that_nobody_knows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    refuses("--rdzv-endpoint mini1:9: this machine cannot resolve the name mini1; use the", ("mini1", 9), timeout_s=0.1)


def test_launchers_beyond_this_machine_need_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMOLCLUSTER_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    wish = parse_elastic("1:2", workers=1, endpoint="192.0.2.1:29400")
    with pytest.raises(
        UserError, match=r"192.0.2.1:29400 can be reached .* needs a cluster token.* `smolcluster token new`"
    ):
        run_restarting(prepared(config(), RunDir(tmp_path / "run")), wish, sinks=[])
    token = new_token()
    server = MembershipServer("127.0.0.1", 0, silent_s=30.0, keyring=Keyring([token]))
    where = ("127.0.0.1", server.port)
    refuses("does not have our token; give every machine the same cluster token", where, timeout_s=200)
    refuses(r"token.*\(smolcluster token add\)", where, timeout_s=2, token=False)
    with join_endpoint(where, timeout_s=60, keyring=Keyring([token])) as (client, leads):
        assert client is not None and not leads  # noqa: PT018
    server.close()


def test_launchers_never_import_torch() -> None:
    """Not even where several machines meet: the transport is imported without what payloads need."""
    code = """
import sys
from smolcluster.launch.restart import launcher as restart
from smolcluster.launch.restart.endpoint import join_endpoint
with join_endpoint(("127.0.0.1", int(sys.argv[1])), timeout_s=60) as (client, leads):
    client.say(step=1)
    assert leads and client.wait(lambda: client.view.members[0].get("step") == 1, timeout_s=60)
sys.exit(bool({"torch", "numpy"} & set(sys.modules)))
"""
    subprocess.run([sys.executable, "-c", code, endpoint().rpartition(":")[2]], check=True, timeout=120)


# Keeping it going --------------------------------------------------------------------------------------------------


class Restarted(Story):
    def run(self, script: Script, elastic: str = "1:2", **options: Any) -> dict[str, Any]:
        self.write(script)
        wish = parse_elastic(elastic, **options)
        overrides = {"cluster.num_workers": wish.max_workers, "cluster.standby": False}
        return run_restarting(prepared(config(**overrides), self.run_dir), wish, sinks=[self])

    def specs(self, rank: int) -> list[dict[str, Any]]:
        lines = (self.run_dir.path / f"worker-{rank}-specs.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Restarted:
    def plans(config: Config, elastic: ElasticRange) -> Any:
        return {size: {"size": size} for size in range(elastic.min_workers, elastic.max_workers + 1)}, {}

    use_scripted_processes(tmp_path, restart, monkeypatch)
    monkeypatch.setattr(restart, "plan_world_sizes", plans)
    monkeypatch.setattr(supervisor, "GRACE_S", 0.2)
    monkeypatch.setattr(rendezvous, "LAST_CALL_S", 0.2)
    return Restarted(tmp_path)


HOST = socket.gethostname()
GOOD = ["row 9", "finish"]


def test_a_good_run(story: Restarted) -> None:
    summary = story.run({"worker-0": [["listen", "row 9", "finish"]], "worker-1": [GOOD]})
    assert (summary["status"], summary["restarts"]) == ("finished", 0)
    assert story.notices() == []
    spec = story.specs(1)[0]
    assert (spec["config"], spec["world_size"], spec["local_rank"], spec["resume"]) == ({"size": 2}, 2, 1, None)


def test_processes_that_wait_for_a_round_are_named_so(story: Restarted, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int, bool]] = []
    monkeypatch.setattr(supervisor, "spawn", recorded(started))
    story.run({"worker-0": [["listen", "row 9", "finish"]], "worker-1": [GOOD]})
    assert started == [("worker", 0, True), ("worker", 1, True)]


def test_all_start_again_from_the_checkpoint(story: Restarted) -> None:
    saves = ["listen", "row 1", "note checkpoints/step-00000001", "note saved", "hang"]
    dies = ["row 1", "await saved", "die"]
    (story.run_dir.path / "checkpoints").mkdir(parents=True)
    again = ["listen", "row 2", "finish"]
    with pytest.raises(UserError, match="already holds a run"):
        story.run({})
    (story.run_dir.path / "checkpoints").rmdir()
    saves.insert(2, "mkdir checkpoints")
    summary = story.run({"worker-0": [saves, again], "worker-1": [dies, GOOD]})
    assert (summary["restarts"], summary["members_lost"]) == (1, 1)
    assert story.summary()["restarts"] == 1
    assert story.notices() == [f"rank 1 on {HOST} died: killed by SIGKILL; restarting all workers"]
    for rank in (0, 1):
        first, second = story.specs(rank)
        assert (first["resume"], first["again"]) == (None, False)
        assert (second["resume"], second["again"]) == (str(story.run_dir.checkpoints), True)


def test_without_a_checkpoint_all_begins_anew_and_no_row_is_doubled(story: Restarted) -> None:
    rows = story.run_dir.metrics
    dies = ["row 1", f"lines {rows.name} 3", "await up", "die"]
    first, second = ["listen", "row 1", "note up", "hang"], ["listen", "row 2", "finish"]
    story.run({"worker-0": [first, second], "worker-1": [dies, GOOD]})
    assert rows.read_text() == ""
    assert story.specs(0)[1]["resume"] is None


def test_a_victim_is_not_blamed(story: Restarted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "SETTLE_S", 60.0)  # the other follows, however busy the machine is
    dies = ["row 1", "await lost", "die"]
    loses = ["listen", "row 1", "note lost", "fail peer connection closed"]
    story.run({"worker-0": [loses, ["listen", "row 2", "finish"]], "worker-1": [dies, GOOD]})
    assert story.notices() == [f"rank 1 on {HOST} died: killed by SIGKILL; restarting all workers"]


def test_a_worker_that_dies_again_and_again_is_left_out(story: Restarted) -> None:
    waits = [["listen", "row 1", f"note up-{life}", "hang"] for life in range(3)]
    dies = [[f"await up-{life}", "die"] for life in range(3)]
    last = ["listen", "row 2", "finish"]
    summary = story.run({"worker-0": [*waits, last], "worker-1": dies})
    assert summary["restarts"] == 3
    assert "rank 1" in story.notices()[2]
    assert story.notices()[2].endswith(
        "3 times in a row without a new step; continuing without it; restarting all workers"
    )


def test_the_rank_that_stays_keeps_its_gpu_and_is_the_first(story: Restarted) -> None:
    dies = [["listen", f"await up-{life}", "die"] for life in range(3)]
    waits = [["row 1", f"note up-{life}", "hang"] for life in range(3)]
    # The second process is rank 1 until it is alone: then it has the script of rank 0.
    story.run({"worker-0": [*dies, ["listen", "row 2", "finish"]], "worker-1": waits})
    spec = story.specs(0)[-1]
    assert (spec["local_rank"], spec["first_rank"], spec["world_size"]) == (1, 0, 1)
    assert len(story.specs(1)) == 3
    assert (story.specs(0)[-1]["world_size"], story.specs(0)[-1]["config"]) == (1, {"size": 1})


def test_where_none_can_be_spared_the_run_ends(story: Restarted) -> None:
    with pytest.raises(
        WorkerFailed, match=r"rank 1 on .* died: killed by SIGKILL, 3 times in a row without a new step"
    ):
        story.run({"worker-0": [["listen", "row 1", "note up", "hang"]], "worker-1": [["await up", "die"]]}, "2:2")
    assert story.summary()["status"] == "failed"
    assert story.summary()["restarts"] == 2


def test_restarts_are_bounded_even_with_headway(story: Restarted) -> None:
    lives = [["listen", f"row {step}", f"note step-{step}", "hang"] for step in range(1, 9)]
    deaths = [[f"await step-{step}", "die"] for step in range(1, 9)]
    with pytest.raises(WorkerFailed, match="exceeded --max-restarts 4"):
        story.run({"worker-0": lives, "worker-1": deaths}, max_restarts=4)
    assert len(story.specs(1)) == 5
    assert story.summary()["error"].startswith("rank 1 on")


def test_a_users_mistake_is_not_tried_again(story: Restarted) -> None:
    with pytest.raises(UserError, match=r"^there is no such file$"):
        story.run({"worker-0": [["hang"]], "worker-1": [["fail user there is no such file"]]})
    assert len(story.specs(1)) == 1
    assert not story.run_dir.config.exists()


def test_one_that_falls_after_the_end_changes_nothing(story: Restarted) -> None:
    late = ["row 9", "await over", "die"]
    summary = story.run({"worker-0": [["listen", "row 9", "finish and note over"]], "worker-1": [late]})
    assert (summary["status"], summary["restarts"]) == ("finished", 0)


def test_the_first_interrupt_saves_and_the_second_ends(story: Restarted) -> None:
    story.interrupt_at("running")
    leaves = ["listen", "row 1", "note running", "stop?", "leave"]
    with pytest.raises(Interrupted):
        story.run({"worker-0": [leaves], "worker-1": [["row 1", "stop?", "leave"]]})
    assert story.summary()["status"] == "interrupted"
    for file in story.run_dir.path.glob("*-lives.txt"):
        file.unlink()
    (story.run_dir.path / "running").unlink()
    for path in (story.run_dir.config, story.run_dir.summary):
        path.unlink()
    story.interrupt_at("running", "notice-2")
    with pytest.raises(Interrupted):
        story.run({"worker-0": [["listen", "row 1", "note running", "hang"]], "worker-1": [["hang"]]})


# Several machines --------------------------------------------------------------------------------------------------


class Machine(threading.Thread):
    """A second launcher, as on another machine."""

    def __init__(self, wish: ElasticRange) -> None:
        super().__init__(daemon=True)
        self.run_config, self.wish = config(**{"cluster.num_workers": wish.max_workers, "cluster.standby": False}), wish
        self.result: Any = None

    def run(self) -> None:
        try:
            self.result = run_restarting(prepared(self.run_config, RunDir(Path("unused"))), self.wish, sinks=[])
        except SmolclusterError as error:
            self.result = error


def endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


def answers(where: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(where.rpartition(":")[2])), timeout=1).close()
    except OSError:
        return False
    return True


def start_when(question: Callable[[], bool], machine: Machine) -> None:
    def wait_and_start() -> None:
        eventually(question)
        machine.start()

    threading.Thread(target=wait_and_start, daemon=True).start()


def test_a_machine_that_comes_is_made_room_for(story: Restarted) -> None:
    """Alone, then with another; a worker there dies; all are told of the same port, size and checkpoint."""
    where = endpoint()
    first = ["listen", "row 1", "note alone", "stop?", "leave"]
    second = ["listen", "row 2", "note together", "hang"]
    third = ["listen", "row 3", "await again", "finish"]  # or the run is over before the other has begun
    other = Machine(parse_elastic("1:2", workers=1, endpoint=where))
    start_when((story.run_dir.path / "alone").exists, other)
    script = {
        "worker-0": [first, second, third],
        "worker-1": [["row 2", "await together", "die"], ["note again", *GOOD]],
    }
    summary = story.run(script, "1:2", workers=1, endpoint=where)
    other.join(300)
    assert (summary["status"], summary["restarts"], summary["members_lost"]) == ("finished", 2, 1)
    assert other.result["status"] == "finished"
    assert story.notices() == [
        "more workers have joined; restarting all workers",
        f"rank 1 on {HOST} died: killed by SIGKILL; restarting all workers",
    ]
    assert [spec["world_size"] for spec in story.specs(0)] == [1, 2, 2]
    assert [spec["master_addr"] for spec in story.specs(1)] == ["127.0.0.1"] * 2


def test_a_mistake_on_another_machine_ends_the_run_everywhere(story: Restarted) -> None:
    where = endpoint()
    other = Machine(parse_elastic("2:2", workers=1, endpoint=where))
    start_when(lambda: answers(where), other)
    script = {"worker-0": [["listen", "hang"]], "worker-1": [["fail user no such folder: /data"]]}
    with pytest.raises(UserError, match=f"^{HOST}: no such folder: /data$"):
        story.run(script, "2:2", workers=1, endpoint=where)
    other.join(300)
    assert str(other.result) == "no such folder: /data"


def test_a_machine_that_comes_with_a_mistake_only_leaves(story: Restarted) -> None:
    where = endpoint()
    other = Machine(parse_elastic("1:2", workers=1, endpoint=where))
    start_when((story.run_dir.path / "alone").exists, other)
    first = ["listen", "row 1", "note alone", "stop?", "leave"]
    second = ["listen", "row 2", "note together", "hang"]
    script = {
        "worker-0": [first, second, ["listen", "row 3", "finish"]],
        "worker-1": [["await together", "fail user another batch size"]],
    }
    summary = story.run(script, "1:2", workers=1, endpoint=where)
    other.join(300)
    assert (summary["status"], summary["members_lost"]) == ("finished", 0)
    assert str(other.result) == "another batch size"
    assert f"{HOST} has left: another batch size; restarting all workers" in story.notices()


def test_a_machine_with_another_version_does_not_take_part(story: Restarted) -> None:
    server = MembershipServer("127.0.0.1", 0, silent_s=30.0)
    fields = {"host": "a", "workers": 1, "asks": 1, "leads": True, "version": "9.9.9"}
    leader = MembershipClient(server.address, fields, silent_s=30.0)
    other = Machine(parse_elastic("1:2", workers=1, endpoint=server.address))
    other.start()
    other.join(300)
    assert isinstance(other.result, UserError)
    assert "and the one of --rdzv-endpoint has 9.9.9; install the same version" in str(other.result)
    assert leader.wait(lambda: bool(leader.view.gone), timeout_s=300)
    assert all(not fields.get("asks") for fields in leader.view.gone.values())
    for each in (leader, server):
        each.close()


def test_strangers_at_the_endpoint_are_not_counted(story: Restarted) -> None:
    where = endpoint()
    strangers: list[MembershipClient] = []

    def speak() -> None:
        eventually(lambda: answers(where))
        strangers.append(MembershipClient(where, {"name": "x", "workers": "many"}, silent_s=30.0))
        strangers[0].wait(lambda: strangers[0].number >= 0, timeout_s=300)
        (story.run_dir.path / "spoken").touch()

    threading.Thread(target=speak, daemon=True).start()
    script = {"worker-0": [["listen", "row 1", "await spoken", "row 2", "finish"]]}
    assert story.run(script, "1:2", workers=1, endpoint=where)["restarts"] == 0
    strangers[0].close()


def test_the_end_is_told_to_all(story: Restarted) -> None:
    where = endpoint()
    other = Machine(parse_elastic("2:2", workers=1, endpoint=where, max_restarts=0))
    start_when(lambda: answers(where), other)
    script = {"worker-0": [["listen", "row 1", "die"]], "worker-1": [["hang"]]}
    with pytest.raises(WorkerFailed, match="--max-restarts 0"):
        story.run(script, "2:2", workers=1, endpoint=where, max_restarts=0)
    other.join(300)
    assert isinstance(other.result, WorkerFailed)
    assert "--max-restarts 0" in str(other.result)
