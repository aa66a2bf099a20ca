"""What a death on the mesh plane means, with processes that follow a script; and how deaths in a row are counted.

The other two policies are in test_launch.py (elastic) and test_restart.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.samples import spec_of
from tests.unit.story import Script, Story, use_scripted_processes

from smolcluster.config import load_config, resolve
from smolcluster.errors import UserError, WorkerFailed
from smolcluster.launch.local import mesh as local
from smolcluster.launch.local import supervisor
from smolcluster.launch.local.mesh import run_local
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.local.supervisor import MAX_DEATHS, Slot
from smolcluster.launch.prepare import Prepared

STEP = ["row 1", "note up-{rank}"]
HANGS = [*STEP, "hang"]


class Mesh(Story):
    def run(self, script: Script) -> dict[str, Any]:
        self.write(script)
        config = resolve(load_config([], overrides={"strategy.name": "allreduce", "cluster.num_workers": len(script)}))
        return run_local(Prepared(config=config, workers=len(script), run_dir=self.run_dir), sinks=[self])


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mesh:
    use_scripted_processes(tmp_path, local, monkeypatch)
    monkeypatch.setattr(supervisor, "GRACE_S", 0.2)
    return Mesh(tmp_path)


def test_a_good_run(story: Mesh) -> None:
    good = [*STEP, "finish"]
    assert story.run({"worker-0": [["listen", *good]], "worker-1": [good]})["status"] == "finished"
    assert story.notices() == []
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
    story.interrupt_at("up-0 up-1", *([] if leaves else ["notice-1"]))
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
