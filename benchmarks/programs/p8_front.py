"""A front for `p8`, which answers messages with measurements.

python -m benchmarks.programs.p8_front MODEL STAGES HOST:PORT        waits for its stages, then writes {"ready": true}
{"what": "tokens", "streams": 8, "count": 64}          ->   {"seconds": ..., "tokens": ..., "outside_s": ...}
        and "prompt": 300, where it is not 16 tokens
{"what": "first", "prompt": 256}                       ->   {"seconds": ...}
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time

from benchmarks.harness.pipes import Message, answer_each, open_answers
from smolcluster.comm.addresses import split_address
from smolcluster.comm.elastic.transport.security import load_keyring
from smolcluster.comm.elastic.transport.tcp import TcpTransport
from smolcluster.engine.identity import new_peer
from smolcluster.serve.engine.front import LINKS, Front
from smolcluster.serve.engine.layout import LayoutOptions
from smolcluster.serve.engine.sources import find_source
from smolcluster.serve.engine.types import SamplingParams, SequenceRequest

PROMPT = 16  # tokens before those that are timed


def prompt(length: int, stream: int = 0) -> tuple[int, ...]:
    return tuple((37 * n + 101 * stream) % 255 + 1 for n in range(length))


async def tokens(front: Front, *, streams: int, count: int, length: int) -> Message:
    """Measure from when all streams have their first token until the first stream is complete.

    `outside_s`: the part of a batch's round trip in which no stage computed.
    """
    front.hops.clear()
    times: list[list[float]] = [[] for _ in range(streams)]

    async def one(number: int) -> None:
        ask = SequenceRequest(tokens=prompt(length, number), max_tokens=count, sampling=SamplingParams(temperature=0.0))
        async for _ in front.stream(ask):
            times[number].append(time.perf_counter())

    await asyncio.gather(*map(one, range(streams)))
    began, ended = max(row[0] for row in times), min(row[-1] for row in times)
    made = sum(sum(began < when <= ended for when in row) for row in times)
    outside_s = statistics.median(whole - sum(one.computed_s for one in spent) for whole, spent in front.hops)
    return {"seconds": ended - began, "tokens": made, "outside_s": outside_s}


async def first(front: Front, *, length: int) -> Message:
    began = time.perf_counter()
    async for _ in front.stream(
        SequenceRequest(tokens=prompt(length), max_tokens=1, sampling=SamplingParams(temperature=0.0))
    ):
        break
    return {"seconds": time.perf_counter() - began}


def main() -> None:
    answer = open_answers()
    model, stages, listen = sys.argv[1:4]
    transport = TcpTransport(
        new_peer(role="front", rank=0, host="front"), keyring=load_keyring(None, os.environ), limits=LINKS
    )
    front = Front(
        transport, find_source(model), options=LayoutOptions(stages=int(stages)), listen=split_address(listen)
    )

    def handle(message: Message) -> Message:
        length = message.get("prompt", PROMPT)
        if message["what"] == "first":
            return asyncio.run(first(front, length=length))
        return asyncio.run(tokens(front, streams=message["streams"], count=message["count"], length=length))

    try:
        if not front.wait_ready(120):
            sys.exit(f"not ready: {front.problems()}")
        answer_each(answer, handle)
    finally:
        front.close()


if __name__ == "__main__":
    main()
