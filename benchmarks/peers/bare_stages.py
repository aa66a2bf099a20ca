"""Stages with nothing around them, for `p8`: blocking sockets, one sequence, no protocol, no checks, no failures handled.

This is our layers, and fp16 activations sent from one process to the next. It shows what several processes cost beside one:
they sleep, and wake up to cold caches and a slow clock.

python -m benchmarks.peers.bare_stages MODEL STAGES PLACE LISTEN NEXT      a stage; waits for the one before it
python -m benchmarks.peers.bare_stages MODEL STAGES -1 LISTEN NEXT         takes the messages of `programs/p8_front.py`
"""

from __future__ import annotations

import socket
import struct
import sys
import time

import numpy as np
import torch

from benchmarks.harness.pipes import Message, answer_each, open_answers
from benchmarks.programs.p8_front import PROMPT, prompt
from smolcluster.comm.addresses import split_address
from smolcluster.serve.engine.sources import find_source
from smolcluster.serve.engine.stage_model import Row, StageModel

HEAD = struct.Struct("<qq")  # the position of the first token, and how many come
CONNECT_S = 120.0


class Line:
    """Connections from the process before and to the next one."""

    def __init__(self, listen: str, behind: str) -> None:
        with socket.create_server(split_address(listen)) as door:
            self._out = _connect(behind)
            self._in, _ = door.accept()
        for end in (self._in, self._out):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, got = memoryview(data), 0
        while got < nbytes:
            more = self._in.recv_into(view[got:])
            if not more:
                sys.exit()
            got += more
        return data

    def put(self, data: bytes) -> None:
        self._out.sendall(data)


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection(split_address(address))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def stage(model: str, stages: int, place: int, listen: str, behind: str) -> None:
    source = find_source(model)
    config, cpu = source.config, torch.device("cpu")
    edges = [n * config.num_layers // stages for n in range(stages + 1)]
    layers, first, last = range(edges[place], edges[place + 1]), place == 0, place == stages - 1
    weights = source.load(layers, first=first, last=last, dtype=torch.float32, device=cpu)
    part = StageModel(config, layers, first=first, last=last, weights=weights, device=cpu, dtype=torch.float32)
    line = Line(listen, behind)
    while True:
        head = bytes(line.get(HEAD.size))
        start, count = HEAD.unpack(head)
        if first:
            x = torch.frombuffer(line.get(8 * count), dtype=torch.int64)
        else:
            x = torch.frombuffer(line.get(2 * count * config.model_dim), dtype=torch.float16)
            x = x.view(count, config.model_dim).float()
        out = part.run([Row(sequence=0, start=start, count=count, logits=True)], x).numpy()
        line.put(int(out.argmax()).to_bytes(8, "little") if last else head + out.astype(np.float16).tobytes())


def front(listen: str, behind: str) -> None:
    answer = open_answers()
    line = Line(listen, behind)

    def forward(tokens: tuple[int, ...], start: int) -> int:
        line.put(HEAD.pack(start, len(tokens)) + np.array(tokens, np.int64).tobytes())
        return int.from_bytes(line.get(8), "little")

    def generate(tokens: tuple[int, ...], count: int) -> list[float]:
        times, start = [], 0
        for _ in range(count):
            start, tokens = start + len(tokens), (forward(tokens, start),)
            times.append(time.perf_counter())
        return times

    def handle(message: Message) -> Message:
        began = time.perf_counter()
        if message["what"] == "first":
            return {"seconds": generate(prompt(message["prompt"]), 1)[-1] - began}
        times = generate(prompt(PROMPT), message["count"])
        return {"seconds": times[-1] - times[0], "tokens": len(times) - 1}

    answer_each(answer, handle)


def main() -> None:
    model, stages, place, listen, behind = sys.argv[1:6]
    if place == "-1":
        front(listen, behind)
    else:
        stage(model, int(stages), int(place), listen, behind)


if __name__ == "__main__":
    main()
