"""The dashboard in a terminal, and the facts of a machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.run_folder import T0, append, drawn, member, row, snapshot_of, summarize, write_rows

from smolcluster.cli.top import top
from smolcluster.dashboard.ranks import known_facts
from smolcluster.errors import UserError
from smolcluster.observe.machine import MachineFacts, describe_machine, parse_smi


def test_a_frame_tells_what_the_page_tells(elastic: Path) -> None:
    text = drawn(snapshot_of(elastic, now=T0 + 7))
    for words in ("one | edp | training | 2 workers + server", "step 5/100", "loss 1.0000", "worker 1", "lost", "pi5"):
        assert words in text
    assert "worker 1 is gone: the connection was closed" in text


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 90])
def test_what_does_not_fit_is_left_out_and_nothing_is_cut(elastic: Path, width: int) -> None:
    write_rows(elastic, row(6, 2, role="server", val_loss=2.5, time=T0 + 6, bytes_sent=10**8))
    told = snapshot_of(elastic, now=T0 + 7)
    assert drawn(told, width=200).count("…") == 0
    text = drawn(told | {"name": "a-name-of-some-length-as-people-give-them", "events": []}, width=width, height=24)
    assert "…" not in text
    assert "loss 0.8333  val 2.5000" in text
    assert "a-name-" in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [5, 12, 24, 60])
def test_a_frame_fits(elastic: Path, width: int, height: int) -> None:
    text = drawn(snapshot_of(elastic, now=T0 + 7), width=width, height=height)
    if width >= 40:
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "worker 0" in text


def test_names_from_a_run_cannot_steer_the_terminal(elastic: Path) -> None:
    write_rows(elastic, row(6, 0, host="\x1b[2Jevil"))
    append(elastic / "history.jsonl", member("left", 0, 6, "\x1b]0;evil\x07"))
    text = drawn(snapshot_of(elastic, now=T0 + 7))
    assert "evil" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    summarize(elastic, status="\x1b]0;evil\x07", error="\x1b[2Jevil", finished=T0 + 9)
    text = drawn(snapshot_of(elastic, now=T0 + 10))
    assert "evil" in text
    assert "\x1b" not in text


def test_top_once_is_plain_text(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert top(folder / "new", once=True) == 0
    text = capsys.readouterr().out
    assert text.startswith("new | allreduce | ")
    assert "\x1b" not in text
    monkeypatch.chdir(folder.parent)
    assert top(None) == 0  # a pipe: the newest run in ./runs, once
    assert capsys.readouterr().out.startswith("new | ")
    with pytest.raises(UserError, match="does not exist"):
        top(folder / "nowhere", once=True)


# The machine --------------------------------------------------------------------------------------------------------


def test_what_is_known_of_this_machine_fits_a_row() -> None:
    facts = describe_machine("cpu")
    assert facts["device"] == "cpu"
    assert None not in facts.values()
    assert known_facts(json.loads(json.dumps(facts))).keys() == facts.keys()
    if sys.platform.startswith("linux"):
        assert 0 < facts["memory_used_bytes"] < facts["memory_total_bytes"]


def test_nvidia_smi() -> None:
    assert parse_smi("NVIDIA H200, 1024, 143771, 35\nother\n") == {
        "device_name": "NVIDIA H200", "device_memory_used_bytes": 1 << 30,
        "device_memory_total_bytes": 143771 << 20, "device_temperature_c": 35.0,
    }  # fmt: skip
    assert parse_smi("GPU, [N/A], [N/A], [N/A]") == {"device_name": "GPU"}
    assert parse_smi("No devices were found") == parse_smi("") == {}


def test_a_gpu_is_asked_through_torch_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(_: int) -> int:
        raise ModuleNotFoundError("pynvml")

    cuda = SimpleNamespace(
        mem_get_info=lambda i: (60, 100), get_device_name=lambda i: f"card {i}", temperature=lambda i: 41
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    facts = describe_machine("cuda:1")
    assert (facts["device_name"], facts["device_memory_used_bytes"]) == ("card 1", 40)
    assert facts["device_temperature_c"] == 41
    cuda.temperature = no_library
    assert "device_temperature_c" not in describe_machine("cuda:1")


def test_facts_are_told_now_and_then() -> None:
    now = [0.0]
    facts = MachineFacts("cpu", every_s=5, clock=lambda: now[0])
    told: list[bool] = []
    for now[0] in (0.0, 1.0, 4.9, 5.0, 5.1, 20.0):
        told.append(facts.due() is not None)
    assert told == [True, False, False, True, False, True]
