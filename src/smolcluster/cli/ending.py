"""How a command ends: errors are reported in one place, and a process that was a worker does not linger."""

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
    """Be a worker in this process, then end it, however the work ended.

    The ordinary end of an interpreter would run the destructors of a backend whose threads still wait for other ranks, and
    they abort: a refusal with status 2 would now and then become a crash.
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
