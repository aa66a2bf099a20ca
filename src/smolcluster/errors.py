"""Exceptions of the package; subpackages derive theirs from these.

    SmolclusterError          exit status 1: the run failed
    ├── UserError             exit status 2: the input is wrong; one message, no traceback
    │   └── MissingExtra      an optional package is needed; names what to install
    ├── WorkerFailed          a process of the run died; names the rank and the reason
    ├── DamagedCheckpoint     a checkpoint exists but its bytes are not what was saved
    ├── DamagedJournal        a server's journal is not what was written (engine/elastic/wal/)
    ├── JournalFull           a step cannot be recorded, so it is not committed (engine/elastic/wal/)
    ├── CodecError            a tensor or payload that a codec cannot carry (comm/codecs)
    └── PeerLost              another process was lost (comm/work.py)

A message gives the value, the place and the remedy.
"""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class SmolclusterError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class UserError(SmolclusterError):
    """The input is wrong; the message names the value, the place and the remedy."""

    exit_code = 2


class MissingExtra(UserError):
    """An optional package is not installed."""

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}'; install it with: pip install 'smolcluster[{extra}]'"
        )


@contextlib.contextmanager
def needed(*, extra: str, purpose: str) -> Iterator[None]:
    """Turn an ImportError inside into a MissingExtra that names the package."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(str(error.name).partition(".")[0], extra=extra, purpose=purpose) from error


class WorkerFailed(SmolclusterError):
    """A process of the run died and took the run with it."""


class DamagedCheckpoint(SmolclusterError):
    """The bytes on disk are not the bytes that were saved."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the nearest known name and all known names, to end an error message about an unknown one."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    listed = ", ".join(known)
    return f"did you mean '{near[0]}'? known: {listed}" if near else f"known: {listed}"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return an error such as `unknown strategy 'allredce'; did you mean 'allreduce'? known: allreduce, single`."""
    return UserError(f"unknown {kind} '{name}'; {suggest(name, known)}")
