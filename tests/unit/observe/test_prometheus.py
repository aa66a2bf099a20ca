"""What a scrape gets, and who gets nothing."""

from __future__ import annotations

import http.client
import math
import select
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.unit.samples import logged, started

from smolcluster.observe import prometheus
from smolcluster.observe.events import CheckpointFailed, CheckpointSaved
from smolcluster.observe.observer import Observer
from smolcluster.observe.prometheus import METRICS, PrometheusSink, run_name_of

STARTED = started(host="pi5", run_dir="runs/my-run", steps=300)
ROW = logged(
    *(7, 1),
    **{"host": "pi5", "time": 1_700_000_000.5, "loss": 2.25, "lr": 0.1, "grad_norm": math.inf, "samples": 56},
    **{"tokens": 1792, "tokens_per_s": 100.5, "samples_per_s": 3.0, "step_time_s": 0.25, "compute_s": 0.2},
    **{"comm_s": 0.05, "staleness": 0.5, "staleness_max": 2, "stale_rejected": 3, "skipped": 2},
)


def parse(text: str) -> dict[str, Sample]:
    """Return the samples by name; each family has one."""
    families = list(text_string_to_metric_families(text))
    samples = {sample.name: sample for family in families for sample in family.samples}
    assert len(samples) == len(families) == text.count("# HELP ") == text.count("# TYPE ")
    assert all((family.type == "counter") == family.samples[0].name.endswith("_total") for family in families)
    return samples


def get(
    sink: PrometheusSink, path: str = "/metrics", *, host: str | None = "127.0.0.1", method: str = "GET"
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", sink.port, timeout=300)
    connection.putrequest(method, path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    reply = connection.getresponse()
    text = reply.read().decode()
    if reply.status == 200 and path == "/metrics":
        assert reply.getheader("Content-Type") == CONTENT_TYPE_PLAIN_0_0_4
    connection.close()
    return reply.status, text


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    sink = PrometheusSink(STARTED, host="127.0.0.1", port=0, run="my-run")
    yield sink
    sink.close()


def test_a_process_that_has_just_begun_is_up(sink: PrometheusSink) -> None:
    families = parse(get(sink)[1])
    who = {"role": "worker", "rank": "1", "host": "pi5", "run": "my-run"}
    assert families["smolcluster_up"] == Sample("smolcluster_up", who, 1.0)
    assert families["smolcluster_planned_steps"].value == 300
    assert families["smolcluster_run_info"].labels == who | {"strategy": "edp", "task": "gpt", "device": "cpu"}
    assert "smolcluster_loss" not in families, "what is not known is not served"


def test_the_last_value_of_everything_is_served(sink: PrometheusSink) -> None:
    with Observer([sink]) as observer:
        observer.emit(replace(ROW, step=6, val_loss=2.5, loss=9.0))
        observer.emit(ROW)
        observer.emit(CheckpointSaved(step=5, path="x", stall_s=0.01, write_s=0.5, size_bytes=1, best=False))
        observer.emit(CheckpointFailed(step=6, reason="full"))
        families = parse(get(sink)[1])
    said = ("loss", "val_loss", "grad_norm", "staleness", "samples_total", "tokens_total", "bytes_sent_total")
    expected = dict(zip(said, (2.25, 2.5, math.inf, 0.5, 56, 1792, 10), strict=True))
    expected |= {"step": 7, "last_step_timestamp_seconds": 1_700_000_000.5, "learning_rate": 0.1, "step_seconds": 0.25}
    expected |= {"tokens_per_second": 100.5, "samples_per_second": 3.0, "compute_seconds": 0.2, "comm_seconds": 0.05}
    expected |= {"bytes_received_total": 20, "stale_rejected_total": 3, "skipped_total": 2, "checkpoint_step": 5}
    expected |= {"checkpoint_seconds": 0.5, "checkpoint_stall_seconds": 0.01, "checkpoint_failures_total": 1}
    expected |= {"up": 1, "run_info": 1, "planned_steps": 300}
    assert {name.removeprefix("smolcluster_"): family.value for name, family in families.items()} == expected
    # Of a server; of a task that tells it.
    unsaid = {"smolcluster_members", "smolcluster_val_accuracy", "smolcluster_val_metric"}
    assert set(families) == set(METRICS) - unsaid


def test_a_row_that_comes_late_brings_its_evaluation_and_turns_no_counter_back(sink: PrometheusSink) -> None:
    sink.handle(ROW)
    sink.handle(replace(ROW, step=5, samples=40, loss=99.0, val_loss=1.5))
    families = parse(get(sink)[1])
    assert families["smolcluster_step"].value == 7
    assert families["smolcluster_samples_total"].value == 56
    assert families["smolcluster_loss"].value == 2.25
    assert families["smolcluster_val_loss"].value == 1.5


def test_metrics_of_a_task_are_told_by_their_names(sink: PrometheusSink) -> None:
    sink.handle(replace(ROW, val_extra={"f1": 0.5, 'wer "clean"': math.nan}))
    sink.handle(replace(ROW, step=8))  # without an evaluation
    found = [line for line in get(sink)[1].splitlines() if "val_metric" in line]
    assert found[1] == "# TYPE smolcluster_val_metric gauge"
    labels = 'rank="1",role="worker",run="my-run"'
    assert found[2:] == [
        f'smolcluster_val_metric{{host="pi5",metric="f1",{labels}}} 0.5',
        f'smolcluster_val_metric{{host="pi5",metric="wer \\"clean\\"",{labels}}} NaN',
    ]


def test_a_server_is_asked_who_takes_part() -> None:
    members = [1, 2]
    sink = PrometheusSink(STARTED, host="127.0.0.1", port=0, run="r", members=lambda: len(members))
    assert parse(get(sink)[1])["smolcluster_members"].value == 2
    members.pop()
    assert parse(get(sink)[1])["smolcluster_members"].value == 1
    sink.close()


def test_numbers_and_names_that_need_care() -> None:
    odd = replace(STARTED, host='a"b\\c\nd')
    sink = PrometheusSink(odd, host="127.0.0.1", port=0, run="r")
    assert parse(get(sink)[1])["smolcluster_up"].labels["host"] == 'a"b\\c\nd'
    sink.handle(replace(ROW, loss=math.nan))
    assert math.isnan(parse(get(sink)[1])["smolcluster_loss"].value)
    sink.close()
    assert run_name_of(STARTED, server="h:1") == "my-run"
    assert run_name_of(replace(STARTED, run_dir=""), server="h:1") == "h:1"


def test_a_port_that_cannot_be_had_is_an_error(sink: PrometheusSink) -> None:
    for port in (sink.port, 65536):
        with pytest.raises(OSError, match=r"in use|not in 0"):
            PrometheusSink(STARTED, host="127.0.0.1", port=port, run="r")


# Who is answered


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:9464", "LOCALHOST.", "[::1]:9464", "127.8.8.8", "host.docker.internal:9465"]
)
def test_names_of_loopback_are_known(sink: PrometheusSink, host: str) -> None:
    assert get(sink, host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:9464", "192.168.1.10", "pi5", "", None, "localhost.evil.example", "[fe80::1]"],
)
def test_an_unknown_name_gets_nothing(sink: PrometheusSink, host: str | None) -> None:
    for path in ("/metrics", "/health"):
        status, text = get(sink, path, host=host)
        assert status == 421
        assert "smolcluster_" not in text


@pytest.mark.parametrize(
    ("host", "status"), [("192.168.1.10:9464", 200), ("PI5:9464", 200), ("pi5.local", 200), ("evil.example", 421)]
)
def test_beyond_loopback_addresses_and_the_machines_name_are_known(host: str, status: int) -> None:
    sink = PrometheusSink(STARTED, host="0.0.0.0", port=0, run="r")
    try:
        assert get(sink, host=host)[0] == status
    finally:
        sink.close()


def test_nothing_else_is_answered(sink: PrometheusSink) -> None:
    assert get(sink, "/health") == (200, "ok\n")
    assert get(sink, "/")[0] == 404
    assert get(sink, "/metrics/../etc/passwd")[0] == 404
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert get(sink, method=method)[0] == 501


def test_callers_that_say_nothing_are_few_and_others_are_still_answered(
    sink: PrometheusSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus._Handler, "timeout", 300)  # those that were let in stay
    idle = [socket.create_connection(("127.0.0.1", sink.port)) for _ in range(5)]
    assert get(sink, "/health")[0] == 200
    idle += [socket.create_connection(("127.0.0.1", sink.port)) for _ in range(20)]
    sent_away: set[socket.socket] = set()
    while len(sent_away) < 16:
        newly = select.select(list(set(idle) - sent_away), [], [], 100)[0]
        assert newly
        sent_away |= set(newly)
    for open_socket in idle:
        open_socket.close()


def test_a_closed_one_gives_its_port_back() -> None:
    sink = PrometheusSink(STARTED, host="127.0.0.1", port=0, run="r")
    get(sink)
    sink.close()
    PrometheusSink(STARTED, host="127.0.0.1", port=sink.port, run="r").close()
