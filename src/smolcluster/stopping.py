"""Signals that ask a process to stop: Ctrl-C, SIGTERM, and SIGHUP of a terminal that was closed."""

from __future__ import annotations

import contextlib
import os
import signal

HANGUP: int | None = getattr(signal, "SIGHUP", None)  # Windows has none


def stop_signals() -> tuple[int, ...]:
    """Those that this process should handle. A SIGHUP that is ignored stays so: that is what `nohup` is for."""
    hangup = () if HANGUP is None or signal.getsignal(HANGUP) is signal.SIG_IGN else (HANGUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def ignore_hangup() -> None:
    """For a process whose launcher acts on it."""
    if HANGUP is not None:
        signal.signal(HANGUP, signal.SIG_IGN)


def terminals() -> tuple[int, ...]:
    """Which of standard output and standard error are a terminal. Ask before it is gone."""
    return tuple(number for number in (1, 2) if os.isatty(number))


def leave_terminal(descriptors: tuple[int, ...]) -> None:
    """Send what is still written there to nowhere: a terminal that was closed fails every write."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in descriptors:
            os.dup2(nowhere, number)
        os.close(nowhere)
