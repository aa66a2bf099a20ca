"""Tracebacks with only the frames of the user's code."""

from __future__ import annotations

import site
import sysconfig
import traceback
from pathlib import Path

_OURS = Path(__file__).parents[1]
_INSTALLED = tuple(
    {*(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages()}
)


def user_traceback(error: BaseException) -> str:
    """Format an error without frames of libraries and of this package, unless there are no others. The log has all frames."""
    summary = traceback.TracebackException.from_exception(error)
    user_frames = [frame for frame in summary.stack if _is_users(frame.filename)]
    if not user_frames:
        return "".join(summary.format())
    head = "Traceback (your own code only; the log has all of it):\n"
    return (
        head
        + "".join(traceback.StackSummary.from_list(user_frames).format())
        + "".join(summary.format_exception_only())
    )


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):  # generated code
        return False
    return _OURS not in Path(filename).parents and not filename.startswith(_INSTALLED)
