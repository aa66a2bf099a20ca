"""`python -m smolcluster.dashboard`: the dashboard beside a run. Its order is a line of JSON on standard input; it answers with
its address on standard output, and leaves when its standard input ends."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from pathlib import Path

from smolcluster.dashboard.server import DashboardConfig, give_way, serve
from smolcluster.errors import SmolclusterError


def main() -> int:
    order = json.loads(sys.stdin.readline())
    ended = threading.Event()

    def wait_for_the_end() -> None:
        while sys.stdin.readline():
            pass
        ended.set()

    def answer(**fields: str) -> None:
        with contextlib.suppress(OSError):  # the parent is gone already: then standard input ends too
            print(json.dumps(fields), flush=True)

    place = DashboardConfig(**order | {"folder": Path(order["folder"])})
    threading.Thread(target=wait_for_the_end, daemon=True, name="end of standard input").start()
    give_way()
    try:
        serve(place, ready=lambda url: answer(url=url), until=ended)
    except SmolclusterError as error:
        answer(error=str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
