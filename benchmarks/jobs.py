"""Run independent measurements, several at a time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def call_each(function: Callable[..., Any], orders: Iterable[tuple[Any, ...]], *, jobs: int) -> list[Any]:
    """Call the function with the arguments of each order, `jobs` calls at a time. Return the results in order."""
    if jobs == 1:
        return [function(*order) for order in orders]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(function, *order) for order in orders]]
