"""`python -m tools.abuse`: see the package."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from smolcluster.errors import UserError
from tools import abuse
from tools.abuse import serving, training
from tools.abuse.elastic import NUM_IDLE
from tools.abuse.outside import opens_without_a_token, unpacks_nothing
from tools.abuse.report import Report, show
from tools.abuse.web import Web

SUBJECTS = {"training": tuple(training.RUNS), "serving": serving.RUNS}
NAMES = tuple(dict.fromkeys((*serving.Forger.names, *Web.names)))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    _check_possible()
    folder = Path(tempfile.mkdtemp(prefix="abuse-")) if options.out is None else options.out
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    print(f"seed {options.seed}; runs are in {folder}", flush=True)
    reports = []
    for subject, known in SUBJECTS.items():
        runs = [run for run in options.run if run in known]
        sockets = sum(_sockets(run, options.door) for run in runs)
        for run in runs:
            report = _attacked(subject, run, folder, options, frames_each=-(-options.frames // sockets))
            reports.append(report)
            show(report)
            (folder / f"abuse-{run}.json").write_text(json.dumps(asdict(report), indent=1) + "\n")
    found = [*opens_without_a_token(folder), *unpacks_nothing()]
    for sentence in found or ["without a token nobody listens beyond loopback; nothing on the wire is decompressed"]:
        print(f"VIOLATION: {sentence}" if found else sentence)
    wrong = len(found) + sum(len(report.violations) for report in reports)
    frames_sent = sum(result.count for r in reports for result in r.results if result.attack == "flood")
    print(f"{frames_sent} damaged frames; " + ("all rules kept" if not wrong else f"{wrong} violations"), flush=True)
    return 1 if wrong else 0


def _sockets(run: str, doors: Sequence[str]) -> int:
    """Return how many sockets of the elastic plane share the damaged frames."""
    if run in serving.RUNS:
        return max(1, len([door for door in doors if door != "http"]))
    return 1 if run.startswith("syncps") else 3


def _attacked(subject: str, run: str, folder: Path, options: argparse.Namespace, *, frames_each: int) -> Report:
    if subject == "training":
        return training.attack(run, folder, attacks=options.attack, frames_each=frames_each, seed=options.seed)
    return serving.attack(
        run,
        folder,
        attacks=options.attack,
        frames_each=frames_each,
        seed=options.seed,
        doors=options.door,
        most_s=60 * options.minutes,
    )


def _check_possible() -> None:
    if not Path("/proc/self/fd").is_dir():
        raise UserError("abuse needs Linux: it reads the memory and sockets of other processes in /proc")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3 * NUM_IDLE:
        raise UserError(f"abuse needs {3 * NUM_IDLE} open files at once and {hard} are allowed; raise `ulimit -n`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * NUM_IDLE), hard))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="abuse", description=(abuse.__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=10**6, help="damaged ones, spread over all sockets of a subject")
    parser.add_argument("--only", choices=list(SUBJECTS), help="one of the two; default: both")
    parser.add_argument("--run", nargs="+", choices=[run for known in SUBJECTS.values() for run in known])
    parser.add_argument("--door", nargs="+", choices=serving.DOORS, default=list(serving.DOORS), help="of serving")
    parser.add_argument("--attack", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--minutes", type=float, default=math.inf, help="most for the flood at a socket of serving")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, help="folder for the runs; default: a new one in the system's temporary folder"
    )
    options = parser.parse_args(arguments)
    known = [run for subject, runs in SUBJECTS.items() if options.only in (None, subject) for run in runs]
    options.run = [run for run in options.run or known if run in known]
    if not options.run:
        parser.error(f"none of these runs is of {options.only}; known: {', '.join(known)}")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
