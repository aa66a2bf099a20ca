"""Signals that ask a process to stop: Ctrl-C, SIGTERM, and SIGHUP of a closed terminal."""

from __future__ import annotations

import contextlib
import os
import signal

HANGUP: int | None = getattr(signal, "SIGHUP", None)  # Windows has none


def stop_signals() -> tuple[int, ...]:
    """Return the signals to handle. A SIGHUP that is ignored stays ignored, for `nohup`."""
    hangup = () if HANGUP is None or signal.getsignal(HANGUP) is signal.SIG_IGN else (HANGUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def ignore_hangup() -> None:
    """Ignore SIGHUP in a process whose launcher handles it."""
    if HANGUP is not None:
        signal.signal(HANGUP, signal.SIG_IGN)


def terminals() -> tuple[int, ...]:
    """Return which of standard output and standard error are a terminal. Call it before the terminal closes."""
    return tuple(number for number in (1, 2) if os.isatty(number))


def leave_terminal(descriptors: tuple[int, ...]) -> None:
    """Redirect these descriptors to the null device: every write to a closed terminal fails."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in descriptors:
            os.dup2(nowhere, number)
        os.close(nowhere)
