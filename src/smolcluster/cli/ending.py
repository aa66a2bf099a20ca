"""Report errors, and exit from a process that ran a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from smolcluster.errors import SmolclusterError


def tell(error: SmolclusterError) -> int:
    """Print the error to standard error and return its exit status."""
    from smolcluster.observe.text import printable

    print("smolcluster:", printable(str(error), keep="\t\n"), file=sys.stderr)
    return error.exit_code


def leave_after(work: Callable[[], int]) -> NoReturn:
    """Run a worker in this process, then exit with its status.

    A normal interpreter exit would run destructors of a backend whose threads still wait for other ranks, and abort.
    """
    from smolcluster.engine.spec import ENVIRONMENT

    os.environ.update(ENVIRONMENT | os.environ)
    from smolcluster.engine.process.main import leave  # and torch with it

    try:
        status = work()
    except SmolclusterError as error:
        status = tell(error)
    except KeyboardInterrupt:
        status = 130
    leave(status)
