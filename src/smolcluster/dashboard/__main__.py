"""`python -m smolcluster.dashboard`: the dashboard in a separate process, started by a run.

Reads a `DashboardConfig` as one line of JSON from standard input, writes the address of the page to standard output, and exits
when standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from pathlib import Path

from smolcluster.dashboard.server import DashboardConfig, lower_priority, serve
from smolcluster.errors import SmolclusterError


def main() -> int:
    fields = json.loads(sys.stdin.readline())
    ended = threading.Event()

    def wait_for_eof() -> None:
        while sys.stdin.readline():
            pass
        ended.set()

    def respond(**fields: str) -> None:
        with contextlib.suppress(OSError):  # the parent is gone: standard input ends too
            print(json.dumps(fields), flush=True)

    config = DashboardConfig(**fields | {"folder": Path(fields["folder"])})
    threading.Thread(target=wait_for_eof, daemon=True, name="end of standard input").start()
    lower_priority()
    try:
        serve(config, ready=lambda url: respond(url=url), until=ended)
    except SmolclusterError as error:
        respond(error=str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
