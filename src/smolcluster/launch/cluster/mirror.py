"""Mirror a run on other machines into a run directory here: rows, history and the logs of all machines, as they are written.

    mini1   clusters/NAME/runs/RUN/   ──┐
    mini1   clusters/NAME/logs/RUN/   ──┼── ssh ──>  .../mirrors/NAME/RUN/       for `dashboard` and `top`
    pi5     clusters/NAME/logs/RUN/   ──┘

One connection to each machine, whatever the number of viewers. A lost machine is reconnected; only missing bytes are sent. No
weights are copied.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch.cluster.agent.following import digest_of
from smolcluster.launch.cluster.control import RECONNECT_S, connected_agent
from smolcluster.launch.cluster.host import HostError
from smolcluster.launch.cluster.layout import ClusterRecord
from smolcluster.launch.cluster.record import state_folder, writable

FIRST_S = 30.0  # limit for the first read of all machines
_PLACE = re.compile(r"(?:(?:logs|checkpoints/step-\d{8})/)?[\w.-]+\.(?:jsonl?|yaml|log)")


@contextlib.contextmanager
def mirrored(cluster: ClusterRecord) -> Iterator[Path]:
    """Copy the run while the context lasts; yield the folder. Raises UserError when no machine can be read."""
    folder = state_folder().parent / "mirrors" / cluster.name / cluster.run
    with writable(folder):
        pass
    copying = _Copying(cluster, folder)
    try:
        copying.wait_for_all()
        yield folder
    finally:
        copying.stop()


class _Copying:
    def __init__(self, cluster: ClusterRecord, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._names = list(dict.fromkeys(cluster.hosts.values()))
        self._first_pass = threading.Event()
        self._copied: set[str] = set()  # machines that are fully copied
        self._problems: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._all())
        self._thread = threading.Thread(target=self._work, name="smolcluster-mirror", daemon=True)
        self._thread.start()

    def wait_for_all(self) -> None:
        """Wait until every machine is copied or has failed."""
        self._first_pass.wait(FIRST_S)
        if not self._copied:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._problems.items())
            raise UserError(f"no machine of {self._cluster.name} could be read: {reasons or 'no response'}")

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(self._loop):
            self._loop.run_until_complete(self._task)

    async def _all(self) -> None:
        await asyncio.gather(*(self._one(name) for name in self._names))

    def _check_first_pass(self) -> None:
        if all(name in self._copied or name in self._problems for name in self._names):
            self._first_pass.set()

    async def _one(self, name: str) -> None:
        while True:
            try:
                async with connected_agent(self._cluster.machines, name) as agent:
                    async for update in agent.stream_call(
                        "copy", name=self._cluster.name, run=self._cluster.run, have=self._have()
                    ):
                        if "file" in update:
                            with writable(self._folder):
                                put(self._folder, update)
                        elif "up_to_date" in update:
                            self._copied.add(name)
                            self._check_first_pass()
            except SmolclusterError as error:
                self._problems[name] = getattr(error, "what", str(error))
                self._check_first_pass()
                await asyncio.sleep(RECONNECT_S)

    def _have(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for path in self._folder.rglob("*"):
            if path.suffix in (".jsonl", ".log"):
                size = path.stat().st_size
                with path.open("rb") as file:
                    found[path.relative_to(self._folder).as_posix()] = [size, digest_of(file, size)]
        return found


def put(folder: Path, update: Mapping[str, Any]) -> None:
    """Write the content of a file that a machine sent: all of it, or from byte `at` on.

    Raises HostError for a file outside the folder, invalid fields, or an offset beyond the end of the local file.
    """
    place, sent, at = update.get("file"), update.get("data"), update.get("at")
    if not isinstance(place, str) or not _PLACE.fullmatch(place):
        raise HostError("mirror", f"{place!r:.80} is not a file of a run")
    try:
        data = base64.b64decode(sent if isinstance(sent, str) else "-", validate=True)
    except ValueError as error:
        raise HostError("mirror", f"the content of {place} cannot be read") from error
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if "at" not in update:
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_bytes(data)
        fresh.replace(path)
        return
    size = path.stat().st_size if path.exists() else 0
    if type(at) is not int or not 0 <= at <= size:
        raise HostError("mirror", f"{place} has {size} bytes here, so the offset {at!r:.40} is invalid")
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(at)
        file.seek(at)
        file.write(data)
