"""The traceback of a worker as its user wants to see it: the lines of the user's own code, and the error."""

from __future__ import annotations

import site
import sysconfig
import traceback
from pathlib import Path

_OURS = Path(__file__).parents[1]
_INSTALLED = tuple(
    {*(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages()}
)


def told(error: BaseException) -> str:
    """Without the frames of libraries and of this package, if any are left. The whole of it is in the worker's log."""
    summary = traceback.TracebackException.from_exception(error)
    mine = [frame for frame in summary.stack if _is_users(frame.filename)]
    if not mine:
        return "".join(summary.format())
    head = "Traceback (your own code only; the log has all of it):\n"
    return head + "".join(traceback.StackSummary.from_list(mine).format()) + "".join(summary.format_exception_only())


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):  # made at run time
        return False
    return _OURS not in Path(filename).parents and not filename.startswith(_INSTALLED)
