"""The rank that srun, torchrun or flags give to a process."""

from __future__ import annotations

from typing import Any

import pytest

from smolcluster.cli import worker as cli_worker
from smolcluster.errors import UserError
from smolcluster.launch.environment import FIRST_PORT, assigned_rank, first_host, local_rank_of, tasks_on_node

STEP = {"SLURM_JOB_ID": "70012", "SLURM_STEP_ID": "1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
STEP |= {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
STEP |= {"SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_JOB_NODELIST": "gpu[07-09]"}


def place(environ: dict[str, str], **flags: Any) -> Any:
    said = {"world_size": None, "rank": None, "master_addr": None, "master_port": None} | flags
    return assigned_rank(**said, environ=environ)


def test_a_task_of_srun_needs_no_flags() -> None:
    found = place(STEP)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert found.master_addr == "gpu08"
    assert found.master_port == FIRST_PORT + 13
    assert found.restarts == 0
    assert place(STEP | {"SLURM_RESTART_COUNT": "2"}).restarts == 2


def test_where_srun_did_not_start_several_tasks_nothing_changes() -> None:
    batch_script = {k: v for k, v in STEP.items() if "STEP" not in k}
    assert batch_script["SLURM_NTASKS"] == "4"
    assert place(batch_script) is None
    assert place(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert place(STEP, srun=False) is None
    with pytest.raises(UserError, match="need --rank"):
        place(batch_script, master_addr="gpu08")


def test_torchrun_and_flags_come_before_slurm() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    assert place(STEP | torchrun).world_size == 2
    by_hand = place(STEP, rank=1, world_size=8, master_addr="b")
    assert (by_hand.rank, by_hand.world_size, by_hand.master_addr) == (1, 8, "b")
    some = place(STEP, master_addr="10.0.0.1", master_port=4000)
    assert (some.rank, some.master_addr, some.master_port) == (3, "10.0.0.1", 4000)
    said = place(STEP | {"MASTER_ADDR": "ib0", "MASTER_PORT": "4001"})
    assert (said.rank, said.master_addr, said.master_port) == (3, "ib0", 4001)
    assert place(STEP, world_size=4).world_size == 4
    with pytest.raises(UserError, match="--world-size 8, but srun has started 4 tasks"):
        place(STEP, world_size=8)
    with pytest.raises(UserError, match="SLURM_PROCID='x' is not a number"):
        place(STEP | {"SLURM_PROCID": "x"})
    with pytest.raises(UserError, match="port 70000"):
        place(STEP | {"MASTER_PORT": "70000"})


def test_a_worker_of_several_on_a_machine_knows_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or all of them would compute on the first GPU, with all cores each, and want one port for their metrics."""
    assert local_rank_of({}) == (0, 1)
    assert local_rank_of(STEP) == (1, 2)
    assert local_rank_of(STEP | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}) == (3, 8)
    specs: list[Any] = []
    monkeypatch.setattr("smolcluster.cli.ending.leave_after", lambda work: work())
    monkeypatch.setattr("smolcluster.launch.join.worker.run_joined", lambda spec, **_: specs.append(spec))
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    cli_worker.worker(3, "gpu09", server="gpu08:20013")
    assert [(spec.rank, spec.local_rank, spec.local_world_size) for spec in specs] == [(3, 1, 2)]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[08-11,20],login1", "gpu08"),
        ("gpu[20,08-11]", "gpu20"),
        ("rack[1-2]n[3-4]", "rack1n3"),
        ("127.0.0.[1-2]", "127.0.0.1"),
        ("a-b-[003-005].local", "a-b-003.local"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_lists_as_slurm_writes_them() -> None:
    assert [tasks_on_node("2(x3),1", node) for node in range(5)] == [2, 2, 2, 1, 1]
    with pytest.raises(UserError, match="--master-addr"):
        first_host("")
