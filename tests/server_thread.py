"""A server on a thread of this process, for as long as a block lasts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def served(serve: Callable[[Callable[[str], None], threading.Event], None]) -> Iterator[int]:
    """`serve(ready, until)` tells its address and serves until the event is set. Its port; ended with the block."""
    urls: list[str] = []
    there, ended = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def ready(url: str) -> None:
        urls.append(url)
        there.set()

    def run() -> None:
        try:
            serve(ready, ended)
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)
            there.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert there.wait(300)
        assert not failed, failed
        yield int(urls[0].split(":")[2].split("/")[0])
    finally:
        ended.set()
        thread.join(300)
        assert not thread.is_alive()
        assert not failed, failed
