"""Links to the stages after this one. All methods run on the transport's thread, except where noted."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from smolcluster.comm.addresses import is_loopback, join_address, split_address
from smolcluster.comm.elastic.transport.api import Dialer, Handler, Link, Transport
from smolcluster.comm.elastic.transport.messages import Message

DIAL_S = 1.5  # to connect to the next stage
PASSED_ON = 64  # batches remembered for each link: an older one is no longer in flight
EARLY_S = 0.05  # a timer may fire early by this much


def handler_of(
    base: Handler,
    *,
    linked: Callable[[Link], None],
    unlinked: Callable[[Link, str], None],
    refused: Callable[[str, str], None],
) -> Handler:
    """Return the handler of a dialled link; messages go to `base`."""
    hooks = SimpleNamespace(linked=linked, unlinked=unlinked, refused=refused, place=base.place, received=base.received)
    return cast(Handler, hooks)


class NextStages:
    def __init__(
        self,
        transport: Transport,
        handler: Handler,
        front: str,
        *,
        failed: Callable[[int, str], None],
        front_link: Callable[[], Link | None],
    ) -> None:
        """`failed(batch, reason)` is called for batches that could not be passed on."""
        self._transport, self._handler, self._failed, self._front_link = transport, handler, failed, front_link
        self._front_host = split_address(front)[0]
        self._links: dict[str, Link] = {}  # by instance
        self._dialers: dict[str, Dialer] = {}
        self._unsent: dict[str, list[tuple[float, Message]]] = {}  # until the dialled stage is connected
        self._passed_on: dict[Link, deque[int]] = {}

    def dial(self, instance: str, address: str) -> None:
        """Connect before the first batch. A loopback address is on the front's host: from another host, dial that host."""
        host, port = split_address(address)
        if is_loopback(host) and not is_loopback(self._front_host):
            address = join_address(self._front_host, port)
        if instance not in self._dialers:
            handler = handler_of(
                self._handler,
                linked=functools.partial(self._linked, instance),
                unlinked=functools.partial(self._unlinked, instance),
                refused=lambda _, reason: self._drop(instance, reason),
            )
            self._dialers[instance] = self._transport.dial(address, handler)

    def send(self, instance: str, address: str, message: Message) -> None:
        """Send a batch, from any thread. Over an open link at once: waking the transport's thread takes longer."""
        link = self._links.get(instance)
        if link is not None and link.open:
            self._pass_on(link, message)
        else:
            self._transport.call_later(0.0, lambda: self._dial_and_send(instance, address, message))

    def _dial_and_send(self, instance: str, address: str, message: Message) -> None:
        link = self._links.get(instance)
        if link is not None and link.open:
            self._pass_on(link, message)
            return
        self._unsent.setdefault(instance, []).append((time.monotonic(), message))
        self.dial(instance, address)
        self._transport.call_later(DIAL_S, lambda: self._expire(instance))

    def _expire(self, instance: str) -> None:
        """Fail the messages that have waited for DIAL_S."""
        due = time.monotonic() - DIAL_S + EARLY_S
        waiting = self._unsent.pop(instance, [])
        late = [message for at, message in waiting if at <= due]
        for message in late:
            self._failed(message.step, f"the next stage could not be reached within {DIAL_S:g} s")
        if len(late) < len(waiting):
            self._unsent[instance] = [(at, message) for at, message in waiting if at > due]
        elif late and instance not in self._links and instance in self._dialers:
            self._dialers.pop(instance).close()

    def _linked(self, instance: str, link: Link) -> None:
        if link.peer.instance != instance:
            link.close("this address belongs to another process")
            return
        self._links[instance] = link
        for _, message in self._unsent.pop(instance, []):
            self._pass_on(link, message)

    def _drop(self, instance: str, reason: str) -> None:
        self._links.pop(instance, None)
        dialer = self._dialers.pop(instance, None)
        if dialer is not None:
            dialer.close()
        for _, message in self._unsent.pop(instance, []):
            self._failed(message.step, f"lost the next stage: {reason}")

    def _unlinked(self, instance: str, link: Link, reason: str) -> None:
        """Fail the batches sent over this link, which may not have arrived, after DIAL_S: if the stage process is dead, the
        front must detect that first, or it would count these failures against the sequences."""
        front, numbers = self._front_link(), self._passed_on.pop(link, ())

        def fail_all() -> None:
            for number in numbers if self._front_link() is front else ():
                self._failed(number, f"lost the link to the next stage: {reason}")

        self._transport.call_later(DIAL_S, fail_all)
        self._drop(instance, reason)

    def _pass_on(self, link: Link, message: Message) -> None:
        def sent(complete: bool) -> None:
            if complete:
                self._passed_on.setdefault(link, deque(maxlen=PASSED_ON)).append(message.step)
            else:
                self._failed(message.step, f"lost {link.peer.name}")

        link.send(message, sent=sent)
