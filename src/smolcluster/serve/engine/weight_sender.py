"""Send weights from the front to stages without the model's files: one stage at a time, a few slices in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from smolcluster.comm.elastic.collectives.state_transfer import state_messages
from smolcluster.comm.elastic.transport.api import Link, Message, Transport
from smolcluster.serve.engine.model_source import ModelSource

SLICES_AHEAD = 4  # queued on a link


class WeightSender:
    """Reads and sends on a separate thread, the layers of one stage at a time."""

    def __init__(self, transport: Transport, source: ModelSource) -> None:
        self._transport, self._source = transport, source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="smolcluster-weights")
        self._closed = False

    def send(
        self,
        link: Link,
        assignment: int,
        layers: range,
        dtype: torch.dtype,
        *,
        wanted: Callable[[], bool],
        failed: Callable[[str], None],
    ) -> None:
        """Send the layers in the stage's dtype while `wanted()`. `failed` is called on the transport's thread."""

        def load_and_send() -> None:
            try:
                first, last = layers.start == 0, layers.stop == self._source.config.num_layers
                device = torch.device("cpu")
                tensors = self._source.load(layers, first=first, last=last, dtype=dtype, device=device)
                messages = iter(state_messages(tensors, {"assignment": assignment}))
            except Exception as error:  # noqa: BLE001 - of any kind: else the stage would wait forever
                problem = f"the server cannot read the weights: {str(error)[:400] or type(error).__name__}"
                self._transport.call_later(0.0, lambda: failed(problem))
            else:
                self._send(messages, link, wanted)

        self._thread.submit(load_and_send)

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(cancel_futures=True)

    def _send(self, messages: Iterator[Message], link: Link, wanted: Callable[[], bool]) -> None:
        done = threading.Event()

        def send_next(delivered: bool = True) -> None:
            message = next(messages, None) if delivered and wanted() else None
            if message is None:
                done.set()
            else:
                link.send(message, sent=send_next)

        for _ in range(SLICES_AHEAD):
            self._transport.call_later(0.0, send_next)
        while not done.wait(0.2) and not self._closed:
            pass  # hold the thread until these layers are sent
