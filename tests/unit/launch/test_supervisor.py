"""What a death on the mesh plane means, with processes that follow a script; and how deaths in a row are counted.

The other two policies are in test_launch.py (elastic) and test_restart.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.samples import spec_of
from tests.unit.story import Script, Story

from smolcluster.config import load_config, resolve
from smolcluster.errors import UserError, WorkerFailed
from smolcluster.launch.local import mesh as local
from smolcluster.launch.local import supervisor
from smolcluster.launch.local.mesh import run_local
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.local.supervisor import MAX_DEATHS, Slot
from smolcluster.launch.prepare import Prepared

ROOT = Path(__file__).parents[3]
STEP = ["row 1", "note up-{rank}"]
HANGS = [*STEP, "hang"]


class Mesh(Story):
    def run(self, script: Script) -> dict[str, Any]:
        for name, lives in script.items():
            script[name] = [[action.format(rank=name[-1]) for action in life] for life in lives]
        self.write(script)
        config = resolve(load_config([], overrides={"strategy.name": "allreduce", "cluster.num_workers": len(script)}))
        return run_local(Prepared(config=config, workers=len(script), run_dir=self.run_dir), sinks=[self])


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mesh:
    monkeypatch.setattr(local, "_PROCESS", "tests.unit.scripted_process")
    monkeypatch.setattr(supervisor, "GRACE_S", 0.2)
    monkeypatch.setenv("SCRIPT_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    return Mesh(tmp_path)


def test_a_good_run(story: Mesh) -> None:
    good = [*STEP, "finish"]
    assert story.run({"worker-0": [["listen", *good]], "worker-1": [good]})["status"] == "finished"
    assert story.notices() == []
    assert story.all_gone()


def test_a_death_ends_the_run_and_is_named_once(story: Mesh) -> None:
    with pytest.raises(WorkerFailed, match=r"^worker rank 1 failed: killed by SIGKILL\n") as raised:
        story.run({"worker-0": [["listen", *HANGS]], "worker-1": [["await up-0", "die"]]})
    assert str(raised.value).splitlines()[-1].startswith("full log: ")
    summary = story.summary()
    assert (summary["status"], summary["members_lost"], summary["world_size"]) == ("failed", 1, 2)
    assert summary["error"] == "worker rank 1 failed: killed by SIGKILL"
    assert story.all_gone()


def test_a_victim_is_not_blamed(story: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SETTLE_S", 60.0)  # the other follows, however busy the machine is
    loses = ["listen", "note lost", "fail peer connection closed"]
    with pytest.raises(WorkerFailed, match=r"^worker rank 1 failed: ZeroDivisionError"):
        story.run({"worker-0": [loses], "worker-1": [["await lost", "fail error ZeroDivisionError: no"]]})


def test_a_mistake_ends_the_run_and_leaves_no_trace(story: Mesh) -> None:
    with pytest.raises(UserError, match=r"^there is no such file$"):
        story.run({"worker-0": [HANGS], "worker-1": [["fail user there is no such file"]]})
    assert not story.run_dir.config.exists()
    assert story.all_gone()


def test_an_exit_status_alone_is_no_good_end(story: Mesh) -> None:
    with pytest.raises(WorkerFailed, match=r"^worker rank 1 failed: exited before the end of the run, with status 0"):
        story.run({"worker-0": [["listen", *HANGS]], "worker-1": [["await up-0"]]})


@pytest.mark.parametrize("leaves", [True, False], ids=["one interrupt", "two"])
def test_the_first_interrupt_saves_and_the_second_ends(story: Mesh, leaves: bool) -> None:
    def interrupt() -> None:
        for name in ("up-0", "up-1", *([] if leaves else ["notice-1"])):
            while not (story.run_dir.path / name).exists():
                time.sleep(0.005)
            if name != "up-0":
                os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    life = [*STEP, "stop?", "leave"] if leaves else HANGS
    with pytest.raises(Interrupted, match=r"^interrupted; nothing was saved$"):
        story.run({"worker-0": [["listen", *life]], "worker-1": [life]})
    assert story.notices() == ["stopping after this step and saving; press Ctrl-C again to exit at once"]
    assert story.summary()["status"] == "interrupted"
    assert story.all_gone()


def test_deaths_in_a_row_are_counted_from_the_last_progress() -> None:
    slot = Slot(spec=spec_of())
    assert [slot.count_death() for _ in range(MAX_DEATHS)] == [*[True] * (MAX_DEATHS - 1), False]
    slot.progress = True
    assert slot.count_death()
    assert slot.deaths == 1
    slot.progress = True
    slot.count_death(steady=False)
    assert slot.deaths == 2
