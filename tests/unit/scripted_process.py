"""A process of a run that executes a script instead of training: no torch, no sockets, fast to start.

`script.json` in the run directory has, for `server` and each `worker-RANK`, a list of actions for each start of that process:

    listen           the server, or rank 0 of the mesh plane, announces port 4711
    row N            log step N
    note NAME        make a file of this name in the run directory
    mkdir NAME       make a folder there
    lines NAME N     make a file of N lines {"step": i}
    await NAME       wait for one
    stop?            wait for the launcher's request to stop
    die              kill -9 itself
    fail KIND TEXT   report a failure, and exit: 2 for `user`, else 1
    finish, leave    end the run with 0; on request with 130. `finish and note NAME` makes a file first
    hang             ignore all signals

Further starts repeat the last list. `NAME-lives.txt` gets a line for each start: the process id, and the server's address in
the spec. `born.txt` in SCRIPT_FOLDER gets the id of every process, also of those that never received a spec; the fourth of them
creates `fourth` there.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.unit.samples import logged, started

from smolcluster.engine.spec import WorkerSpec
from smolcluster.observe.events import Failed, Phase, RunFinished, to_json


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(os.environ["SCRIPT_FOLDER"])
    with (folder / "born.txt").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if len((folder / "born.txt").read_text().split()) == 4:
        (folder / "fourth").touch()
    line = sys.stdin.readline()
    if line:
        Actor(WorkerSpec.from_json(line)).act()


class Actor:
    def __init__(self, spec: WorkerSpec) -> None:
        self.spec, self.folder = spec, Path(spec.run_dir)
        self.name = "server" if spec.role == "server" else f"worker-{spec.rank}"

    def act(self) -> None:
        lives = json.loads((self.folder / "script.json").read_text())[self.name]
        diary = self.folder / f"{self.name}-lives.txt"
        before = len(diary.read_text().splitlines()) if diary.exists() else 0
        with diary.open("a") as file:
            file.write(f"{os.getpid()} {self.spec.server}\n")
        with (self.folder / f"{self.name}-specs.jsonl").open("a") as file:
            file.write(self.spec.to_json() + "\n")
        for action in lives[min(before, len(lives) - 1)]:
            verb, _, rest = action.partition(" ")
            getattr(self, {"stop?": "stop_wanted", "await": "await_"}.get(verb, verb))(rest)

    def emit(self, event: object) -> None:
        print(to_json(event), flush=True)  # type: ignore[arg-type]

    def listen(self, _: str) -> None:
        spec = self.spec
        who = {"rank": spec.rank, "role": spec.role, "host": spec.host, "run_dir": spec.run_dir, "steps": 9}
        self.emit(started(**who, world_size=spec.world_size))
        self.emit(Phase(rank=spec.rank, name="port", detail="4711"))

    def row(self, step: str) -> None:
        self.emit(logged(int(step), self.spec.rank, role=self.spec.role, host=self.spec.host, time=time.time()))

    def note(self, name: str) -> None:
        (self.folder / name).touch()

    def mkdir(self, name: str) -> None:
        (self.folder / name).mkdir()

    def lines(self, rest: str) -> None:
        name, _, count = rest.partition(" ")
        (self.folder / name).write_text("".join(f'{{"step": {i}}}\n' for i in range(1, int(count) + 1)))

    def await_(self, name: str) -> None:
        while not (self.folder / name).exists():
            time.sleep(0.005)

    def stop_wanted(self, _: str) -> None:
        while '"stop"' not in sys.stdin.readline():
            pass

    def die(self, _: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self, rest: str) -> None:
        kind, _, text = rest.partition(" ")
        self.emit(Failed(rank=self.spec.rank, kind=kind, message=text, traceback="" if kind == "user" else "in line 7"))
        sys.exit(2 if kind == "user" else 1)

    def finish(self, then: str) -> None:
        self._end("finished", 0, then.removeprefix("and note "))

    def leave(self, _: str) -> None:
        self._end("interrupted", 130)

    def _end(self, status: str, code: int, note: str = "") -> None:
        tells = self.spec.role == "server" or (self.spec.plane == "mesh" and self.spec.rank == 0)
        if tells:
            summary = {"status": status, "steps": 9, "restarts": 0, "run_dir": self.spec.run_dir}
            (self.folder / "summary.json").write_text(json.dumps(summary))
            self.emit(RunFinished(summary=summary))
        if tells or status == "finished":
            self.emit(Phase(rank=self.spec.rank, name="finished"))
        if note:
            self.note(note)
        sys.exit(code)

    def hang(self, _: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(10)


if __name__ == "__main__":
    main()
