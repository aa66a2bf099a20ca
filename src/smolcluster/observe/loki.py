"""Logs to Loki, over its HTTP API: POST /loki/api/v1/push.

A thread follows the process's own log file (`follow`) and sends what is new in it, about once a second. Logging itself goes on
as ever: it writes a line to the file and knows nothing of all this, so training never waits for Loki.

    label        server               worker
    job          smolcluster-server   smolcluster-worker
    component    server               worker
    host         server-mini1         worker-rank0-mini2      the log file's name without .log
    rank         2                    0
    level        INFO, WARNING, ...   or STDERR for what was printed and not logged

What Loki answers decides what becomes of a batch:

    200, 204                stored: the place behind it is noted beside the log
    429, 5xx, no answer     sent again, after a pause that doubles up to half a minute, or as long as Retry-After says
    400 in Loki's words     there is a line in it that Loki will never take (too old, too long): halves are sent until it is
                            found. It alone is left out, and the log says so. One that is too new is sent again later
    400 in other words,     perhaps this is no Loki at all. A line is left out only where the same address takes another one at
    413                     the same time; else as below
    anything else           the address or the login is wrong: one warning, then a try every minute

An outage of any length costs nothing but time. A process that ends, however it ends, leaves the rest in its file; the next one
with the same log goes on there, and `push_rest` sends what is left of a run that is over. A batch whose acknowledgement was
lost is sent again, each line with the same labels, time and text as before: Loki drops those as duplicates.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import gzip
import http.client
import json
import logging
import os
import random
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from smolcluster.config.describe import hide_credentials
from smolcluster.errors import UserError
from smolcluster.observe.events import Event
from smolcluster.observe.follow import Entry, Follower
from smolcluster.observe.jsonl import json_object
from smolcluster.observe.logs import log_path
from smolcluster.observe.text import printable

# Not below smolcluster.observe, whose warnings reach no screen: a person should see that Loki cannot be reached.
log = logging.getLogger("smolcluster.loki")

PATH = "/loki/api/v1/push"
AUTH = "SMOLCLUSTER_LOKI_AUTH"  # user:password, where the URL has none
TENANT = "SMOLCLUSTER_LOKI_TENANT"  # where the URL has no ?tenant=
MOST_RETRY_AFTER_S = 300.0
TRIED_LINES = 8  # one by one, where a whole batch is refused and nothing says why
FAR_AHEAD_NS = 24 * 3600 * 10**9  # a line this far in the future has its time from a clock that was wrong
_LOG_NAME = re.compile(r"(?P<role>server|worker)-(rank(?P<rank>\d+)-)?.+")
# Loki's words about a line that no later try can help. What it says of labels is not among them: that is about all lines of a
# process alike, and its limits can be raised.
_NEVER = re.compile(r"out of order|too far behind|timestamp too old|max entry size", re.IGNORECASE)
_NOT_YET = re.compile(r"timestamp too new", re.IGNORECASE)
_WANTS_TLS = re.compile(r"\b(https|tls|ssl)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things take. Tests are in a hurry."""

    look_s: float = 1.0  # between two looks at the file
    retry_s: float = 0.5  # after the first failure; doubles with each
    most_retry_s: float = 30.0
    slow_s: float = 60.0  # where only a person can help
    request_s: float = 10.0  # until an answer is given up
    patience_s: float = 10.0  # an outage as short as this is not told
    close_s: float = 3.0  # the last lines of a process


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to push: the parts of `logging.loki_url`."""

    secure: bool
    host: str
    port: int
    path: str
    shown: str  # the URL without what is secret
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
        raise wrong("this is no URL") from None  # its words may have a part of the password in them
    if not host:
        raise wrong("it names no host")
    query = parse_qs(parts.query, keep_blank_values=True)
    if set(query) - {"tenant"} or parts.fragment:
        raise wrong("?tenant=NAME is all that may follow the address")
    tenant = query.get("tenant", [environ.get(TENANT, "")])[0]
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    auth = f"{user}:{password}" if user or password else environ.get(AUTH, "")
    if not tenant.isprintable() or not tenant.isascii():
        raise wrong("the tenant has characters that no header may have")
    secure = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix(PATH)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip", "User-Agent": "smolcluster"}
    if tenant:
        headers["X-Scope-OrgID"] = tenant
    if auth:
        headers["Authorization"] = "Basic " + base64.b64encode(auth.encode()).decode()
    return Endpoint(secure, host, port or (443 if secure else 80), base + PATH, shown.partition("?")[0], headers)


def labels_of(*, role: str, rank: int | str | None, host: str) -> dict[str, str]:
    """What all lines of one process have in common. `host` is the log file's name without .log."""
    labels = {"job": f"smolcluster-{role}", "component": role, "host": host}
    return labels | ({} if rank in (None, "") else {"rank": str(rank)})


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a batch."""

    kind: Literal["stored", "later", "refused", "early", "unclear", "wrong"]
    reason: str = ""
    after_s: float = 0.0


class Loki:
    """One connection to a Loki, opened when it is needed and kept while it is good."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._connection: http.client.HTTPConnection | None = None
        self._trouble = ""  # why there was no answer
        self._was_cut = False

    def push(self, labels: Mapping[str, str], entries: Sequence[Entry], *, timeout_s: float) -> Answer:
        body = gzip.compress(encode(labels, entries), compresslevel=5, mtime=0)
        kept = self._connection is not None
        answer = self._request(body, timeout_s)
        if answer is None and kept:  # a connection that was idle may have been closed by the other side
            answer = self._request(body, timeout_s)
        return answer or Answer("later", self._trouble)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, body: bytes, timeout_s: float) -> Answer | None:
        """None where there was no answer. All of it takes `timeout_s` at most: a server that drips is cut off."""
        self._was_cut = False
        cut = threading.Timer(timeout_s, self._cut)
        cut.daemon = True
        cut.start()
        try:
            connection = self._connect(timeout_s)
            connection.request("POST", self.endpoint.path, body, dict(self.endpoint.headers))
            response = connection.getresponse()
            text = response.read(4096).decode("utf-8", "replace")
            if not response.isclosed():  # there is more of it than anybody wants to read
                self.close()
            if self._was_cut:
                raise TimeoutError(f"no whole answer in {timeout_s:g} s")
            return answer_of(response.status, response.getheader("Retry-After"), text)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            self.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._trouble = f"cannot be reached ({reason})"
            return None
        finally:
            cut.cancel()

    def _cut(self) -> None:
        """From another thread: a read that waits returns at once."""
        self._was_cut = True
        connection = self._connection
        line = connection.sock if connection is not None else None
        if line is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self.endpoint.secure else http.client.HTTPConnection
            self._connection = kind(self.endpoint.host, self.endpoint.port)
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        return self._connection


def encode(labels: Mapping[str, str], entries: Sequence[Entry]) -> bytes:
    """The body of a push: one stream for each level, each in the order of the file."""
    values: dict[str, list[list[str]]] = {}
    for entry in entries:
        values.setdefault(entry.level, []).append([str(entry.time_ns), entry.text])
    streams = [{"stream": dict(labels) | {"level": level}, "values": lines} for level, lines in values.items()]
    return json.dumps({"streams": streams}, separators=(",", ":")).encode()


def answer_of(status: int, retry_after: str | None, text: str) -> Answer:
    """What an HTTP answer means for the batch."""
    said = " ".join(printable(text).split())[:200]
    reason = f"answers {status}" + (f" ({said})" if said else "")
    if status in (200, 204):
        return Answer("stored")
    if status == 429 or status >= 500:
        return Answer("later", reason, _seconds(retry_after))
    if status == 400 and _NEVER.search(text):
        return Answer("refused", reason)
    if status == 400 and _NOT_YET.search(text):
        return Answer("early", reason)
    # Loki explains itself in plain text. A page is from another server, whose 400 is not about our lines.
    if status == 413 or (status == 400 and not text.lstrip().startswith("<")):
        return Answer("unclear", reason)
    return Answer("wrong", reason + ("; give user:password@ in the URL or in " + AUTH if status in (401, 403) else ""))


def _seconds(retry_after: str | None) -> float:
    """Of a Retry-After, which is a number or a date."""
    value = retry_after or "0"
    with contextlib.suppress(ValueError):
        until = float(value) if value.strip().isdigit() else _until(value)
        return min(max(0.0, until), MOST_RETRY_AFTER_S)
    return 0.0


def _until(date: str) -> float:
    return email.utils.parsedate_to_datetime(date).timestamp() - time.time()


class Sender:
    """Sends a file's lines, batch after batch. It does not wait between tries: the caller does."""

    def __init__(self, follower: Follower, loki: Loki, labels: Mapping[str, str]) -> None:
        self.follower, self.loki, self.labels = follower, loki, labels
        self.lines = 0  # that arrived
        self.refused = 0  # that never will
        self._taken: Entry | None = None  # the last line that arrived

    def send(self, entries: Sequence[Entry], *, deadline: float, request_s: float) -> Answer:
        """`stored`: all have arrived but those that never will. Else: why the rest of them is to be sent again.

        What has arrived is acknowledged piece by piece, in the order of the file.
        """
        refused: list[tuple[Entry, str]] = []
        doubted: list[Entry] = []  # refused by something that may be no Loki
        answer, pieces, proven = Answer("stored"), [entries], False
        while pieces and len(doubted) < TRIED_LINES:
            piece = pieces.pop(0)
            answer = self._push(piece, proven=proven, deadline=deadline, request_s=request_s)
            if answer.kind in ("later", "wrong"):
                break
            proven = proven or answer.kind != "unclear"
            if answer.kind == "stored":
                self._taken = piece[-1]
            if doubted and proven:  # perhaps it was mended just now: those before it get another try
                pieces[:0] = [*([entry] for entry in doubted), piece]
                doubted = []
            elif answer.kind == "stored":
                self.lines += len(piece)
                self.follower.acknowledge(piece[-1])
            elif len(piece) > 1:
                pieces[:0] = _halves(piece) if proven or self._taken else _one_by_one(piece)
            elif answer.kind == "unclear":
                doubted.append(piece[0])
            elif answer.kind == "early" and piece[0].time_ns < time.time_ns() + FAR_AHEAD_NS:
                answer = Answer("later", answer.reason + "; do the clocks agree?")
                break
            else:
                refused.append((piece[0], answer.reason))
                self.refused += 1
                self.follower.acknowledge(piece[0])
                answer = Answer("stored")
        self._tell(refused)
        return self._not_loki(answer) if answer.kind == "unclear" else answer

    def _push(self, entries: Sequence[Entry], *, proven: bool, deadline: float, request_s: float) -> Answer:
        """`unclear` for several lines, or for one where nothing proves yet that this is a Loki."""

        def push(entries: Sequence[Entry]) -> Answer:
            timeout_s = min(request_s, deadline - time.monotonic())
            if timeout_s <= 0:
                return Answer("later", "is slow")
            return self.loki.push(self.labels, entries, timeout_s=timeout_s)

        answer = push(entries)
        if answer.kind != "unclear" or len(entries) > 1:
            return answer
        if self._taken is not None:
            # A Loki still takes what it took before, and drops it as a duplicate. Only then is it the line's own fault.
            again = push([self._taken])
            if again.kind not in ("stored", "refused", "early"):
                return self._not_loki(again) if again.kind == "unclear" else again
            answer, proven = push(entries), True
        return Answer("refused", answer.reason) if answer.kind == "unclear" and proven else answer

    def _not_loki(self, answer: Answer) -> Answer:
        """No line was taken, in words that are none of Loki's: only a person can help."""
        tls = not self.loki.endpoint.secure and _WANTS_TLS.search(answer.reason)
        remedy = "write https:// in logging.loki_url" if tls else "is logging.loki_url the address of a Loki?"
        return Answer("wrong", f"{answer.reason}; {remedy}")

    def _tell(self, refused: Sequence[tuple[Entry, str]]) -> None:
        """In the log, and so perhaps in Loki. That Loki refuses what is said here is not said again: it would never end."""
        news = [(entry, reason) for entry, reason in refused if entry.logger != log.name]
        if news:
            entry, reason = news[0]
            log.error(
                "Loki at %s takes %d line%s of %s in no way, and will not get %s; the first: it %s to %.100r",
                self.loki.endpoint.shown,
                len(news),
                "s" * (len(news) > 1),
                self.follower.path.name,
                "them" if len(news) > 1 else "it",
                reason,
                entry.text,
            )


def _halves(entries: Sequence[Entry]) -> list[Sequence[Entry]]:
    middle = len(entries) // 2
    return [entries[:middle], entries[middle:]]


def _one_by_one(entries: Sequence[Entry]) -> list[Sequence[Entry]]:
    """The first of them. From the front, for Loki may refuse what is much older than a line that it has."""
    rest = entries[TRIED_LINES:]
    return [[entry] for entry in entries[:TRIED_LINES]] + ([rest] if rest else [])


class Pusher:
    """The thread of one process. A sink only in that it is closed with the others; it needs no events."""

    def __init__(self, sender: Sender, *, pace: Pace) -> None:
        self._sender, self._pace = sender, pace
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._failures = 0  # in a row
        self._failing_since: float | None = None
        self._reached = False  # Loki has taken a batch of this process
        self._told = False  # of the present outage
        self._left: int | None = None  # when the thread has ended
        self._thread = threading.Thread(target=self._work, name="loki", daemon=True)
        self._thread.start()

    def handle(self, event: Event) -> None:
        """What is to be sent is in the file."""

    def close(self) -> None:
        """Send the last lines, for a few seconds at most. What is left stays in the file, and is sent from there later."""
        self._deadline = time.monotonic() + self._pace.close_s
        self._closing.set()
        self._thread.join(self._pace.close_s + 0.5)

    @property
    def left(self) -> int:
        """Bytes of the log that have not arrived."""
        return self._sender.follower.left() if self._left is None else self._left

    def _work(self) -> None:
        try:
            while not self._closing.wait(self._round()):
                pass
            self._last_lines()
        # A thread has no caller, and a log in another place is never worth a training run.
        except Exception as error:  # noqa: BLE001
            log.error("lines are not sent to Loki any more: %s: %s", type(error).__name__, error)
        finally:
            self._sender.loki.close()
            self._left = self._sender.follower.left()
            self._sender.follower.close()

    def _round(self) -> float:
        """Send what is there. Returns how long to rest."""
        sender, pace = self._sender, self._pace
        try:
            entries = sender.follower.read() if sender.follower.claim() else []
            if not entries:
                return pace.look_s
            answer = sender.send(entries, deadline=float("inf"), request_s=pace.request_s)
        except OSError as error:  # of the disk; the network's are answers
            answer = Answer("later", f"gets nothing: {error}")
        if answer.kind == "stored":
            self._is_well()
            return 0.0 if sender.follower.left() else pace.look_s
        return self._is_ill(answer)

    def _last_lines(self) -> None:
        sender = self._sender
        with contextlib.suppress(OSError):
            while sender.follower.claim() and (entries := sender.follower.read()):
                if sender.send(entries, deadline=self._deadline, request_s=self._pace.request_s).kind != "stored":
                    return

    def _is_well(self) -> None:
        if self._told:
            log.info("Loki at %s answers again", self._sender.loki.endpoint.shown)
        self._failures, self._failing_since, self._told, self._reached = 0, None, False, True

    def _is_ill(self, answer: Answer) -> float:
        """Tell of it, once in an outage. Returns how long to wait, never the same twice: other processes wait too."""
        pace, now = self._pace, time.monotonic()
        self._failing_since = self._failing_since or now
        self._failures += 1
        hopeless = answer.kind == "wrong"
        if not self._told and (hopeless or not self._reached or now - self._failing_since > pace.patience_s):
            self._told = True
            log.warning(
                "Loki at %s %s; lines are kept in %s and sent when it takes them",
                self._sender.loki.endpoint.shown,
                answer.reason,
                self._sender.follower.path,
            )
        pause_s = pace.slow_s if hopeless else min(pace.most_retry_s, pace.retry_s * 2 ** min(self._failures - 1, 16))
        return max(pause_s * random.uniform(0.7, 1.0), answer.after_s)


def start_pushing(path: Path, *, url: str, role: str, rank: int | None, host: str, pace: Pace | None = None) -> Pusher:
    """Send this log from now on, and what earlier processes have left in it. Raises `UserError` for a URL that is none."""
    endpoint = endpoint_of(url)
    follower = Follower(path)
    follower.told["rank"] = "" if rank is None else str(rank)
    labels = labels_of(role=role, rank=rank, host=log_path("", role, rank, host).stem)
    return Pusher(Sender(follower, Loki(endpoint), labels), pace=pace or Pace())


@dataclass(frozen=True, slots=True)
class Rest:
    """What `push_rest` did."""

    lines: int  # that arrived
    refused: int = 0  # that Loki takes in no way, and that are not tried again
    left: tuple[Path, ...] = ()  # logs of which lines are still to be sent
    busy: tuple[Path, ...] = ()  # logs that a process is sending itself
    reason: str = ""  # why some are left


def push_rest(run_dir: str | Path, url: str, *, within_s: float = 30.0, pace: Pace | None = None) -> Rest:
    """Send what is left of a run that is over: all logs of its directory (or one log, or a folder of them).

    A line is sent once, by the first process that claims the file; calling this again does no harm. Returns when all is sent,
    when Loki refuses the rest, or after `within_s`.
    """
    loki, pace = Loki(endpoint_of(url)), pace or Pace()
    deadline, lines, refused, reason = time.monotonic() + within_s, 0, 0, ""
    left: list[Path] = []
    busy: list[Path] = []
    for path in _logs_of(Path(run_dir)):
        follower = Follower(path)
        try:
            if not follower.claim():
                busy.append(path)
                continue
            sender = Sender(follower, loki, _labels_of_file(path, follower))
            said = _send_all(sender, deadline=deadline, pace=pace)
            lines, refused = lines + sender.lines, refused + sender.refused
            if said:
                left.append(path)
                reason = reason or said
        finally:
            follower.close()
    loki.close()
    return Rest(lines, refused, tuple(left), tuple(busy), reason)


def push_leftovers(run_dir: str | Path, url: str, *, within_s: float = 3.0) -> str:
    """For a launcher whose processes have all ended: send what they could not. Says what is still left, if anything is."""
    try:
        rest = push_rest(run_dir, url, within_s=within_s)
    except UserError:  # no process came as far as to log anything
        return ""
    if not rest.left:
        return ""
    return (
        f"Loki {rest.reason}: not all lines of this run are there; send the rest with: smolcluster logs push {run_dir}"
    )


def _send_all(sender: Sender, *, deadline: float, pace: Pace) -> str:
    """Why not all of a file could be sent; empty if it was."""
    failures = 0
    while entries := sender.follower.read(final=True):
        answer = sender.send(entries, deadline=deadline, request_s=pace.request_s)
        if answer.kind == "stored":
            failures = 0
            continue
        failures += 1
        pause_s = max(answer.after_s, min(pace.most_retry_s, pace.retry_s * 2 ** min(failures - 1, 16)))
        if answer.kind == "wrong" or time.monotonic() + pause_s > deadline:
            return answer.reason
        time.sleep(pause_s)
        if time.monotonic() >= deadline:  # it may have slept longer than that
            return answer.reason
    return ""


def _logs_of(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    folder = place / "logs" if (place / "logs").is_dir() else place
    found = [path for path in sorted(folder.glob("*.log")) if _LOG_NAME.fullmatch(path.stem)]
    if not found:
        raise UserError(f"there are no logs in {folder}; name a run directory, such as runs/my-run")
    return found


def _labels_of_file(path: Path, follower: Follower) -> dict[str, str]:
    """As the process itself would have them: from the file's name, and a server's rank from the note beside it."""
    match = _LOG_NAME.fullmatch(path.stem)
    if match is None:
        raise UserError(f"{path.name} is not the log of a server or a worker")
    rank = match["rank"] or follower.told.get("rank") or _rank_in(path)
    return labels_of(role=match["role"], rank=rank, host=path.stem)


def _rank_in(path: Path) -> str:
    """Of the first record that has one."""
    with path.open("rb") as file:
        for line in file.read(64 * 1024).split(b"\n"):
            rank = (json_object(line) or {}).get("rank")
            if isinstance(rank, int):
                return str(rank)
    return ""
