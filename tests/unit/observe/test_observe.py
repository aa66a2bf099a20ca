"""Events, the observer, and the sinks of trackers: TensorBoard, W&B."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.samples import logged, started

from smolcluster.errors import MissingExtra
from smolcluster.observe import events
from smolcluster.observe.events import (
    Event,
    Notice,
    RunFinished,
    StepLogged,
    from_json,
    to_json,
)
from smolcluster.observe.observer import Observer
from smolcluster.observe.tracking import TensorBoardSink, WandbSink, has_login, metrics_of, run_name

# Events -------------------------------------------------------------------------------------------------------------

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
TEXT = st.text(st.characters(), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(),
    float: ANY_FLOAT,
    bool: st.booleans(),
    str: TEXT | st.sampled_from(["nan", "inf"]),
    int | None: st.none() | st.integers(),
    float | None: st.none() | ANY_FLOAT,
    dict[str, float] | None: st.none() | st.dictionaries(TEXT, ANY_FLOAT, max_size=3),
    dict[str, Any]: st.dictionaries(TEXT, JSON, max_size=3),
    dict[str, Any] | None: st.none() | st.dictionaries(TEXT, JSON, max_size=3),
}


def any_event() -> st.SearchStrategy[Event]:
    def of_kind(kind: type[Event]) -> st.SearchStrategy[Event]:
        hints = get_type_hints(kind, vars(events))
        fields = {f.name: BY_TYPE[hints[f.name]] for f in dataclasses.fields(kind)}
        if kind is RunFinished:
            fields["summary"] = st.dictionaries(TEXT, ANY_FLOAT | st.integers(), max_size=4)
        return st.builds(kind, **fields)

    return st.sampled_from(sorted(Event.kinds.values(), key=lambda kind: kind.__name__)).flatmap(of_kind)


def same(a: Any, b: Any) -> bool:
    """Equality in which NaN equals itself."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(a == b)


@given(any_event())
def test_every_event_survives_the_wire(event: Event) -> None:
    line = to_json(event)
    assert line.isascii()
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = from_json(line)
    assert type(back) is type(event)
    for field in dataclasses.fields(event):
        assert same(getattr(back, field.name), getattr(event, field.name)), field.name


@pytest.mark.parametrize(
    "line",
    ["", "{}", "[]", "3", "null", '{"event": "Nonsense"}', '{"event": ["Notice"]}', '{"event": "Notice"}',
     '{"event": "Notice", "level": "INFO", "message": "m", "colour": 1}', "Traceback (most recent call last):"],
)  # fmt: skip
def test_a_line_that_is_not_an_event_is_a_value_error(line: str) -> None:
    with pytest.raises(ValueError):
        from_json(line)


def test_a_host_called_inf_keeps_its_name_and_summaries_keep_their_numbers() -> None:
    assert from_json(to_json(started(host="inf"))) == started(host="inf")
    back = from_json(to_json(RunFinished(summary={"train_loss": math.inf, "status": "done"})))
    assert back == RunFinished(summary={"train_loss": math.inf, "status": "done"})


# Observer -----------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


class Failing(Recorder):
    def __init__(self, error: Exception, *, close_error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.close_error = error, close_error

    def handle(self, event: Event) -> None:
        super().handle(event)
        raise self.error

    def close(self) -> None:
        super().close()
        if self.close_error:
            raise self.close_error


class TrackerError(Exception):
    """What a third-party tracker might raise."""


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("x"), ValueError("x"), TrackerError("x")])
def test_a_failing_sink_is_dropped_once_and_the_others_go_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    before, bad, after = Recorder(), Failing(error, close_error=OSError("again")), Recorder()
    with Observer([before, bad, after]) as observer:
        observer.emit(logged(1))
        observer.emit(logged(2))
    for sink in (before, after):
        steps = [event.step for event in sink.events if isinstance(event, StepLogged)]
        notices = [event for event in sink.events if isinstance(event, Notice)]
        assert steps == [1, 2]
        assert [notice.level for notice in notices] == ["ERROR"]
        assert "Failing" in notices[0].message
        assert str(error) in notices[0].message
    assert len(bad.events) == 1
    assert (before.closed, bad.closed, after.closed) == (1, 1, 1)
    assert sum("was disabled" in record.message for record in caplog.records) == 1


def test_all_sinks_may_fail_and_nothing_is_raised() -> None:
    sinks = [Failing(OSError(str(i))) for i in range(3)]
    observer = Observer(sinks)
    observer.emit(logged(1))
    observer.notice("INFO", "nobody listens")
    observer.close()
    assert [len(sink.events) for sink in sinks] == [1, 1, 1]


def test_an_interrupt_is_not_a_sink_failure() -> None:
    class Interrupted(Recorder):
        def handle(self, event: Event) -> None:
            raise KeyboardInterrupt

    later = Recorder()
    observer = Observer([Interrupted(), later])
    with pytest.raises(KeyboardInterrupt):
        observer.emit(logged(1))
    observer.close()
    assert later.closed == 1


def test_an_event_emitted_inside_an_event_waits_its_turn() -> None:
    class Echo(Recorder):
        def handle(self, event: Event) -> None:
            if isinstance(event, StepLogged):
                observer.notice("INFO", f"saw {event.step}", rank=event.rank)
            super().handle(event)

    echo = Echo()
    observer = Observer([echo])
    observer.emit(logged(1))
    assert echo.events == [logged(1), Notice(level="INFO", message="saw 1", rank=0)]


def test_closing_twice_closes_sinks_once_and_later_events_go_nowhere() -> None:
    sink = Recorder()
    observer = Observer([sink])
    observer.close()
    observer.close()
    observer.emit(logged(1))
    assert (sink.closed, sink.events) == (1, [])


# Trackers -----------------------------------------------------------------------------------------------------------


def test_run_name_is_exactly_as_documented() -> None:
    assert run_name(started()) == "EDP-worker-macbook_rank1_lr0.001_bs32"
    server = started(algorithm="SyncPS", role="server", host="mini", rank=0, learning_rate=6e-4, batch_size=8)
    assert run_name(server) == "SyncPS-server-mini_rank0_lr0.0006_bs8"
    assert "_lr1e-05_" in run_name(started(learning_rate=1e-5))
    assert "_lr1_" in run_name(started(learning_rate=1.0))


def test_metric_names() -> None:
    plain = metrics_of(logged(1))
    assert {"train/loss", "train/grad_norm", "lr", "tokens_per_s", "staleness", "bytes_sent"} <= plain.keys()
    assert not any(name.startswith(("val/", "gradients/")) for name in plain)
    full = metrics_of(
        logged(
            1, val_loss=1.0, val_accuracy=0.5, val_ppl=2.7, val_extra={"f1": 0.9}, gradient_norms={"head.weight": 0.25}
        )
    )
    assert full.pop("val/f1") == 0.9
    assert full.keys() - plain.keys() == {"val/loss", "val/accuracy", "val/ppl", "gradients/head.weight"}
    assert full["gradients/head.weight"] == 0.25


@pytest.mark.parametrize(
    ("package", "make"),
    [("tensorboard", lambda: TensorBoardSink("x", "y")), ("wandb", lambda: WandbSink("p", "n", "x", {}))],
)
def test_a_missing_tracker_says_what_to_install(package: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=re.escape(f"pip install 'smolcluster[{package}]'")):
        make()


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_wandb_without_a_login_is_an_offline_run_on_disk(
    tmp_path: Path, no_login: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delitem(sys.modules, "openai", raising=False)  # where another test has it, wandb advertises
    name = run_name(started())
    sink = WandbSink("smolcluster", name, tmp_path, {"training": {"batch_size": 32, "nan": math.nan}})
    sink.handle(logged(10, loss=2.125))
    sink.handle(RunFinished(summary={"val_loss": 1.5, "train_loss": math.nan}))
    sink.close()
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1
    content = files[0].read_bytes()
    for text in (name, "train/loss", "2.125", "val_loss", "batch_size"):
        assert text.encode() in content, text
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


class FakeWandb:
    """Stands in for the module: `init` does what the test says."""

    class Error(Exception):
        pass

    class Settings:
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

    def __init__(self, fails: dict[str | None, Exception]) -> None:
        self.fails, self.modes = fails, list[str | None]()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = self.torn_down = False
        self.run = None

    def init(self, *, mode: str | None, **_: Any) -> Any:
        self.modes.append(mode)
        if mode in self.fails:
            raise self.fails[mode]
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))

    def finish(self) -> None:
        self.finished = True

    def teardown(self) -> None:
        self.torn_down = self.finished


@pytest.mark.parametrize(
    ("environment", "modes"),
    [({}, ["offline"]), ({"WANDB_API_KEY": "k"}, ["online", "offline"]), ({"WANDB_MODE": "shared"}, [None])],
)
def test_wandb_mode(
    environment: dict[str, str], modes: list[str | None], tmp_path: Path, no_login: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fake = FakeWandb({"online": FakeWandb.Error("no route to host")})
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    sink = WandbSink("p", "n", tmp_path, {})
    sink.handle(logged(7))
    sink.close()
    assert fake.modes == modes
    assert [step for step, _ in fake.rows] == [7]
    assert fake.torn_down


def test_a_wandb_that_cannot_start_is_dropped_by_the_observer(
    tmp_path: Path, no_login: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb({"offline": FakeWandb.Error("broken")}))
    sink, other = WandbSink("p", "n", tmp_path, {}), Recorder()
    sink._thread.join(300)
    with Observer([sink, other]) as observer:
        observer.emit(logged(1))
        observer.emit(logged(2))
    assert [type(event).__name__ for event in other.events] == ["StepLogged", "Notice", "StepLogged"]


def test_wandb_login_is_found_where_wandb_looks(
    tmp_path: Path, no_login: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_login()
    file = tmp_path / "netrc"
    file.write_text("machine example.org login a password b\n", encoding="utf-8")
    assert not has_login()
    file.write_text("machine api.wandb.ai login user password 0123\n", encoding="utf-8")
    assert has_login()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_login()
    file.write_text("this is no netrc", encoding="utf-8")
    assert not has_login()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert has_login()
