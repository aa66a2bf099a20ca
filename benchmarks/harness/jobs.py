"""Run independent measurements, several at a time, each in a process of its own; keep each result at once."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any


def add_job_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--jobs", type=int, default=1, help=f"{what} at a time (default: 1)")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="append each result to this file; results that are in it are not measured again",
    )


def call_each(
    function: Callable[..., Any], orders: Iterable[tuple[Any, ...]], *, jobs: int, keep: Path | None = None
) -> list[Any]:
    """Call the function with the arguments of each order, `jobs` calls at a time. Return the results in order.

    `keep`: a file of JSON lines, with the result of each call. Calls whose results are in it are left out.
    """
    keys = {f"{function.__qualname__}{order!r}": order for order in orders}
    lines = keep.read_text(encoding="utf-8").splitlines() if keep is not None and keep.is_file() else []
    kept = {line["call"]: line["result"] for line in map(json.loads, lines)}

    def done(key: str, result: Any) -> None:
        kept[key] = result
        if keep is not None:
            with keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"call": key, "result": result}) + "\n")

    missing = {key: order for key, order in keys.items() if key not in kept}
    if jobs == 1:
        for key, order in missing.items():
            done(key, function(*order))
    elif missing:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(function, *order): key for key, order in missing.items()}
            for future in as_completed(futures):
                done(futures[future], future.result())
    return [kept[key] for key in keys]
