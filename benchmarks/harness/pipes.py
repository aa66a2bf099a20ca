"""JSON lines between a benchmark and a process that it starts: messages on standard input, answers on standard output."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from smolcluster.errors import SmolclusterError

Message = dict[str, Any]


# In the benchmark


def send(process: subprocess.Popen[bytes], message: Message) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise SmolclusterError(f"a process of the benchmark ended with status {process.wait()}") from None


def receive(process: subprocess.Popen[bytes], *, timeout_s: float | None = None) -> Message:
    """Return the next answer. `timeout_s`: only for a process that writes one line, then waits for the next message."""
    assert process.stdout is not None
    if timeout_s is not None and not select.select([process.stdout], [], [], timeout_s)[0]:
        raise SmolclusterError(f"a process of the benchmark wrote nothing for {timeout_s:g} s")
    line = process.stdout.readline()
    if not line:
        raise SmolclusterError(f"a process of the benchmark ended with status {process.wait()}")
    answer: Message = json.loads(line)
    return answer


def ask(process: subprocess.Popen[bytes], **message: Any) -> Message:
    send(process, message)
    return receive(process)


# In the process


def open_answers() -> Callable[[Message], None]:
    """Return a function that writes an answer. Redirect all else that is printed to standard error: libraries print."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def answer(message: Message) -> None:
        answers.write(json.dumps(message).encode() + b"\n")

    return answer


def answer_each(answer: Callable[[Message], None], handle: Callable[[Message], Message]) -> None:
    """Report that this process is ready, then answer every message until the input ends."""
    answer({"ready": True})
    for line in sys.stdin.buffer:
        answer(handle(json.loads(line)))
