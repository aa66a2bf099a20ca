"""Push logs to Loki over its HTTP API: POST /loki/api/v1/push.

A thread follows the process's own log file (`log_queue`) and sends new lines about once a second. Logging only appends to the
file, so training never waits for Loki.

    label        server               worker
    job          smolcluster-server   smolcluster-worker
    component    server               worker
    host         server-mini1         worker-rank0-mini2      the log file's name without .log
    rank         2                    0
    level        INFO, WARNING, ...   or STDERR for what was printed and not logged

A batch is handled by Loki's response:

    200, 204                      stored: the offset after the batch is saved in a file next to the log
    429, 5xx, no response         retried with exponential backoff up to half a minute, or after Retry-After
    400 that names bad lines      too long, too old, too new: Loki stores the other lines of the batch. The refused lines are
                                  counted and logged, and not sent again; they stay in the file
    any other status              wrong address, login or proxy: one warning, then a retry every minute; no line is dropped

A process that ends leaves unsent lines in its file; the next process with the same log continues there, and `push_unsent`
sends the rest after the run. A batch whose acknowledgement was lost is sent again, each line with the same labels, time and
text: Loki drops these as duplicates.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import logging
import math
import os
import random
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from smolcluster.config.describe import hide_credentials
from smolcluster.errors import UserError
from smolcluster.observe.jsonl import json_object, lines_backwards
from smolcluster.observe.log_queue import LogEntry, LogQueue
from smolcluster.observe.logs import log_path
from smolcluster.observe.observer import Sink
from smolcluster.observe.text import printable

# Warnings of smolcluster.observe are not shown to the user (observer.NoticeHandler); warnings about Loki should be.
log = logging.getLogger("smolcluster.loki")

PATH = "/loki/api/v1/push"
AUTH = "SMOLCLUSTER_LOKI_AUTH"  # user:password, if the URL has none
TENANT = "SMOLCLUSTER_LOKI_TENANT"  # if the URL has no ?tenant=
MAX_RETRY_AFTER_S = 300.0
_MAX_RESPONSE_BYTES = 1 << 20
_LOG_NAME = re.compile(r"(?P<role>server|worker)-(rank(?P<rank>\d+)-)?.+")
# Loki's reasons, one for each line, for which a retry is useless. Errors about labels are not among them: they concern all
# lines of a process, and their limits can be raised.
_BAD_LINE = re.compile(r"out of order|too far behind|timestamp too (?:old|new)|max entry size", re.IGNORECASE)
_NUM_IGNORED = re.compile(r"total ignored: (\d+)")  # given in addition to a long list of reasons, which is truncated
_WANTS_TLS = re.compile(r"\b(https|tls|ssl)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LokiTiming:
    """Intervals and timeouts of a pusher. Tests use shorter ones."""

    poll_s: float = 1.0  # between two reads of the file
    retry_s: float = 0.5  # after the first failure; doubles with each
    max_retry_s: float = 30.0
    slow_s: float = 60.0  # if the configuration is wrong
    request_s: float = 10.0  # timeout of a request
    patience_s: float = 10.0  # shorter outages are not logged
    close_s: float = 3.0  # for the last lines of a process

    def pause_s(self, result: PushResult, failures: int) -> float:
        """Return the backoff before the next try, with jitter: other processes retry too."""
        wrong = result.kind == "misconfigured"
        backoff_s = self.slow_s if wrong else min(self.max_retry_s, self.retry_s * 2 ** min(failures - 1, 16))
        return max(backoff_s * random.uniform(0.7, 1.0), result.retry_after_s)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The parts of `logging.loki_url`."""

    secure: bool
    host: str
    port: int
    path: str
    shown: str  # the URL without its secrets
    headers: Mapping[str, str] = field(repr=False)


def endpoint_of(url: str, *, environ: Mapping[str, str] = os.environ) -> Endpoint:
    """Read a URL such as `http://127.0.0.1:3100` or `https://user:password@logs.example?tenant=home`."""
    shown = hide_credentials(url)

    def wrong(why: str) -> UserError:
        return UserError(f"logging.loki_url '{shown}': {why}; write it as http://HOST:PORT, e.g. http://127.0.0.1:3100")

    if not url.startswith(("http://", "https://")):
        raise wrong("it does not begin with http:// or https://")
    try:
        parts = urlsplit(url)
        if "@" in url.replace(parts.netloc, "", 1):
            raise wrong("an @ in a name or password is written %40, a / in a password %2F")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong("this is not a URL") from None  # the cause may quote a part of the password
    if not host:
        raise wrong("it has no host")
    query = parse_qs(parts.query, keep_blank_values=True)
    if set(query) - {"tenant"} or parts.fragment:
        raise wrong("only ?tenant=NAME may follow the address")
    tenant = query.get("tenant", [environ.get(TENANT, "")])[0]
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    auth = f"{user}:{password}" if user or password else environ.get(AUTH, "")
    if not tenant.isprintable() or not tenant.isascii():
        raise wrong("the tenant has characters that are not allowed in a header")
    secure = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix(PATH)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip", "User-Agent": "smolcluster"}
    if tenant:
        headers["X-Scope-OrgID"] = tenant
    if auth:
        headers["Authorization"] = "Basic " + base64.b64encode(auth.encode()).decode()
    return Endpoint(secure, host, port or (443 if secure else 80), base + PATH, shown.partition("?")[0], headers)


def labels_of(*, role: str, rank: int | str | None, host: str) -> dict[str, str]:
    """Return the labels of all lines of one process. `host` is the log file's name without .log."""
    labels = {"job": f"smolcluster-{role}", "component": role, "host": host}
    return labels | ({} if rank in (None, "") else {"rank": str(rank)})


@dataclass(frozen=True, slots=True)
class PushResult:
    """The outcome of one batch. `stored` counts the lines that were refused; the other two are retried."""

    kind: Literal["stored", "retry", "misconfigured"]
    reason: str = ""
    refused: int = 0
    retry_after_s: float = 0.0


class LokiClient:
    """One connection to Loki, opened when needed and kept while it works."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._connection: http.client.HTTPConnection | None = None
        self._was_cut = False

    def push(self, labels: Mapping[str, str], entries: Sequence[LogEntry], *, timeout_s: float) -> PushResult:
        body = gzip.compress(encode(labels, entries), compresslevel=5, mtime=0)
        kept = self._connection is not None
        try:
            try:
                status, retry_after, text = self._request(body, timeout_s)
            except (OSError, http.client.HTTPException):
                if not kept:
                    raise
                status, retry_after, text = self._request(body, timeout_s)  # the server closes idle connections
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            return PushResult("retry", f"cannot be reached ({reason})")
        result = result_of(status, retry_after, text)
        if result.kind == "misconfigured" and not self.endpoint.secure and _WANTS_TLS.search(text):
            return replace(result, reason=f"{result.reason}; write https:// in logging.loki_url")
        return result

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, body: bytes, timeout_s: float) -> tuple[int, str | None, str]:
        """Return status, Retry-After and text, within `timeout_s` even if the server sends a byte at a time."""
        self._was_cut = False
        cut = threading.Timer(timeout_s, self._cut)
        cut.daemon = True
        cut.start()
        try:
            connection = self._connect(timeout_s)
            connection.request("POST", self.endpoint.path, body, dict(self.endpoint.headers))
            response = connection.getresponse()
            text = response.read(_MAX_RESPONSE_BYTES).decode("utf-8", "replace")
            if not response.isclosed():  # the rest is not read
                self.close()
            if self._was_cut:
                raise TimeoutError(f"no complete response in {timeout_s:g} s")
            return response.status, response.getheader("Retry-After"), text
        except (OSError, http.client.HTTPException, UnicodeError):
            self.close()
            raise
        finally:
            cut.cancel()

    def _cut(self) -> None:
        """Shut the socket down from another thread: a blocked read returns at once."""
        self._was_cut = True
        sock = None if self._connection is None else self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self.endpoint.secure else http.client.HTTPConnection
            self._connection = kind(self.endpoint.host, self.endpoint.port)
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        return self._connection


def encode(labels: Mapping[str, str], entries: Sequence[LogEntry]) -> bytes:
    """Return the body of a push: one stream for each level, each by time."""
    values: dict[str, list[list[str]]] = {}
    for entry in entries:
        values.setdefault(entry.level, []).append([str(entry.time_ns), entry.text])
    streams = [{"stream": dict(labels) | {"level": level}, "values": sorted(lines)} for level, lines in values.items()]
    return json.dumps({"streams": streams}, separators=(",", ":")).encode()


def result_of(status: int, retry_after: str | None, text: str) -> PushResult:
    """Return the outcome of a batch for an HTTP response."""
    shown = printable(" ".join(text.split()))[:200]
    reason = f"responds with status {status}" + (f" ({shown})" if shown else "")
    if status in (200, 204):
        return PushResult("stored")
    if status == 429 or status >= 500 or (status == 400 and "rate limit" in text):  # 400 if there are also bad lines
        return PushResult("retry", reason, retry_after_s=_seconds(retry_after))
    if status == 400 and (bad := len(_BAD_LINE.findall(text))):
        return PushResult("stored", reason, refused=max(bad, sum(map(int, _NUM_IGNORED.findall(text)))))
    if status in (401, 403):
        return PushResult("misconfigured", f"{reason}; give user:password@ in the URL or in {AUTH}")
    return PushResult("misconfigured", f"{reason}; is logging.loki_url the address of a Loki?")


def _seconds(retry_after: str | None) -> float:
    """Parse Retry-After, a number or a date; 0 for anything else."""
    value = (retry_after or "0").strip()
    with contextlib.suppress(ValueError):
        until = float(value) if value.isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
        return min(max(0.0, until), MAX_RETRY_AFTER_S)
    return 0.0


class BatchSender:
    """Sends the lines of one log, a batch at a time. The caller waits and retries."""

    def __init__(self, queue: LogQueue, client: LokiClient, labels: Mapping[str, str]) -> None:
        self.queue, self.client, self.labels = queue, client, labels
        self.lines = 0  # stored
        self.refused = 0

    def send(self, entries: Sequence[LogEntry], *, timeout_s: float) -> PushResult:
        if timeout_s <= 0:
            return PushResult("retry", "is slow")
        result = self.client.push(self.labels, entries, timeout_s=timeout_s)
        if result.kind == "stored":
            refused = min(result.refused, len(entries))
            self.lines += len(entries) - refused
            self.refused += refused
            # This error is a line of the log too: if Loki refuses it, do not log another one.
            if refused and any(entry.logger != log.name for entry in entries):
                log.error(
                    "Loki at %s %s and refused %d of %d lines of %s; they stay in the file and are not sent again",
                    *(self.client.endpoint.shown, result.reason, refused, len(entries), self.queue.path.name),
                )
            self.queue.acknowledge(entries[-1])
        return result


class Pusher(Sink):
    """The pushing thread of one process. Lines come from the log file; it is a sink so that it is closed with the others."""

    def __init__(self, sender: BatchSender, *, timing: LokiTiming) -> None:
        self._sender, self._timing = sender, timing
        self._closing = threading.Event()
        self._deadline = math.inf
        self._failures = 0  # in a row
        self._failing_since = 0.0
        self._reached = False  # Loki has stored a batch of this process
        self._warned = False  # about the current outage
        self._unsent_bytes: int | None = None  # once the thread has ended
        self._thread = threading.Thread(target=self._run, name="loki", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the last lines, for `close_s` at most. The rest stays in the file."""
        self._deadline = time.monotonic() + self._timing.close_s
        self._closing.set()
        self._thread.join(self._timing.close_s + 0.5)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the log that are not stored."""
        return self._sender.queue.unsent_bytes() if self._unsent_bytes is None else self._unsent_bytes

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._push_batch()):
                pass
            self._push_last()
        # A thread has no caller, and a failure to send logs must not end the training.
        except Exception as error:  # noqa: BLE001
            log.error("no more lines are sent to Loki: %s: %s", type(error).__name__, error)
        finally:
            self._sender.client.close()
            self._unsent_bytes = self._sender.queue.unsent_bytes()
            self._sender.queue.close()

    def _push_batch(self) -> float:
        """Send one batch. Return how long to wait before the next."""
        sender, timing = self._sender, self._timing
        try:
            entries = sender.queue.read() if sender.queue.claim() else []
            if not entries:
                return timing.poll_s
            result = sender.send(entries, timeout_s=timing.request_s)
        except OSError as error:  # of the disk; errors of the network are results
            result = PushResult("retry", f"gets nothing: {error}")
        if result.kind != "stored":
            return self._failed(result)
        if self._warned:
            log.info("Loki at %s is reachable again", sender.client.endpoint.shown)
        self._failures, self._warned, self._reached = 0, False, True
        return 0.0 if sender.queue.unsent_bytes() else timing.poll_s

    def _push_last(self) -> None:
        sender, timing = self._sender, self._timing
        with contextlib.suppress(OSError):
            while sender.queue.claim() and (entries := sender.queue.read()):
                timeout_s = min(timing.request_s, self._deadline - time.monotonic())
                if sender.send(entries, timeout_s=timeout_s).kind != "stored":
                    return

    def _failed(self, result: PushResult) -> float:
        """Warn once per outage. Return the backoff."""
        now = time.monotonic()
        if self._failures == 0:
            self._failing_since = now
        self._failures += 1
        long = now - self._failing_since > self._timing.patience_s
        if not self._warned and (long or not self._reached or result.kind == "misconfigured"):
            self._warned = True
            shown, path = self._sender.client.endpoint.shown, self._sender.queue.path
            log.warning("Loki at %s %s; lines are kept in %s and sent later", shown, result.reason, path)
        return self._timing.pause_s(result, self._failures)


def start_pushing(
    path: Path, *, url: str, role: str, rank: int | None, host: str, timing: LokiTiming | None = None
) -> Pusher:
    """Push this log from now on, with the unsent lines of earlier processes. Raises UserError if the URL is not valid."""
    endpoint = endpoint_of(url)
    labels = labels_of(role=role, rank=rank, host=log_path("", role, rank, host).stem)
    return Pusher(BatchSender(LogQueue(path), LokiClient(endpoint), labels), timing=timing or LokiTiming())


@dataclass(frozen=True, slots=True)
class PushReport:
    """The outcome of `push_unsent`."""

    lines: int  # stored
    refused: int = 0
    unsent: tuple[Path, ...] = ()  # logs with unsent lines
    busy: tuple[Path, ...] = ()  # logs that a running process pushes
    reason: str = ""  # why lines are unsent


def push_unsent(
    run_dir: str | Path, url: str, *, timeout_s: float = 30.0, timing: LokiTiming | None = None
) -> PushReport:
    """Push the unsent lines of a run that has ended: all logs of its directory (or one log, or a folder of them).

    Returns when all lines are sent, when the address is wrong, or after `timeout_s`. It is safe to call it again.
    """
    client, deadline = LokiClient(endpoint_of(url)), time.monotonic() + timeout_s
    lines, refused, reason = 0, 0, ""
    unsent: list[Path] = []
    busy: list[Path] = []
    for path in _logs_of(Path(run_dir)):
        queue = LogQueue(path)
        try:
            if not queue.claim():
                busy.append(path)
                continue
            sender = BatchSender(queue, client, _labels_of_file(path))
            failure = _send_all(sender, deadline=deadline, timing=timing or LokiTiming())
            lines, refused = lines + sender.lines, refused + sender.refused
            if failure:
                unsent.append(path)
                reason = reason or failure
        finally:
            queue.close()
    client.close()
    return PushReport(lines, refused, tuple(unsent), tuple(busy), reason)


def push_after_run(run_dir: str | Path, url: str, *, timeout_s: float = 3.0) -> str:
    """Push the lines that the processes of a launcher, all ended, have not sent. Return a warning if some remain unsent."""
    try:
        report = push_unsent(run_dir, url, timeout_s=timeout_s)
    except UserError:  # no process has logged anything
        return ""
    if not report.unsent:
        return ""
    return (
        f"Loki {report.reason}: not all log lines of this run were sent; "
        f"send the rest with: smolcluster logs push {run_dir}"
    )


def _send_all(sender: BatchSender, *, deadline: float, timing: LokiTiming) -> str:
    """Send a file to its end. Return why that failed; empty if it did not."""
    failures = 0
    while entries := sender.queue.read(final=True):
        result = sender.send(entries, timeout_s=min(timing.request_s, deadline - time.monotonic()))
        if result.kind == "stored":
            failures = 0
            continue
        failures += 1
        pause_s = timing.pause_s(result, failures)
        if result.kind == "misconfigured" or time.monotonic() + pause_s >= deadline:
            return result.reason
        time.sleep(pause_s)
    return ""


def _logs_of(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    folder = place / "logs" if (place / "logs").is_dir() else place
    found = [path for path in sorted(folder.glob("*.log")) if _LOG_NAME.fullmatch(path.stem)]
    if not found:
        raise UserError(f"there are no logs in {folder}; name a run directory, such as runs/my-run")
    return found


def _labels_of_file(path: Path) -> dict[str, str]:
    """Return the labels that the process would use. The rank of a server is not in its file's name, but in its records."""
    match = _LOG_NAME.fullmatch(path.stem)
    if match is None:
        raise UserError(f"{path.name} is not the log of a server or a worker")
    return labels_of(role=match["role"], rank=match["rank"] or _last_rank(path), host=path.stem)


def _last_rank(path: Path) -> str:
    records = (json_object(line) or {} for _, line in lines_backwards(path, path.stat().st_size))
    return next((str(rank) for record in records if isinstance(rank := record.get("rank"), int)), "")
