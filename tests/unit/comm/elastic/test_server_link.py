"""A worker's link to its server: large transfers do not delay other messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from smolcluster.comm.elastic.membership.mailbox import Mailbox
from smolcluster.comm.elastic.membership.server_link import BULK_QUEUED, ServerLink
from smolcluster.comm.elastic.transport.api import Link, Transport
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.group import PeerLost


class FakeLink:
    """Keeps what is sent; it leaves when a test says so."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.leaving: list[Callable[[bool], None]] = []

    def send(self, message: Message, *, sent: Callable[[bool], None] | None = None) -> None:
        self.sent.append(message)
        if sent is not None:
            self.leaving.append(sent)


def linked() -> tuple[ServerLink, FakeLink]:
    dialled: list[Mailbox] = []

    def dial(address: str, mailbox: Mailbox) -> SimpleNamespace:
        dialled.append(mailbox)
        return SimpleNamespace(close=lambda: None)

    transport = SimpleNamespace(dial=dial, close=lambda: None)
    server_link, link = ServerLink(cast(Transport, cast(Any, transport)), "testhost:1"), FakeLink()
    dialled[0].linked(cast(Link, cast(Any, link)))
    assert server_link.get(0) is None
    link.sent.clear()  # its ASK
    return server_link, link


def state(count: int) -> list[Message]:
    return [Message(kind=Kind.STATE, step=number) for number in range(count)]


def test_a_message_goes_before_the_rest_of_a_state() -> None:
    server_link, link = linked()
    server_link.send_bulk(state(10))
    assert len(link.sent) == BULK_QUEUED
    server_link.send(Kind.DONE, step=7)
    while link.leaving:
        link.leaving.pop(0)(True)
    assert [message.kind for message in link.sent].index(Kind.DONE) == BULK_QUEUED
    assert [message.step for message in link.sent if message.kind is Kind.STATE] == list(range(10))


def test_parts_of_a_state_keep_their_order_between_threads() -> None:
    """The next ones leave on the transport's thread, while the worker's own thread adds more."""
    server_link, link = linked()
    over = threading.Event()

    def transport() -> None:
        while not over.is_set() or link.leaving:
            if link.leaving:
                link.leaving.pop(0)(True)

    thread = threading.Thread(target=transport)
    thread.start()
    messages = state(3000)
    for start in range(0, 3000, 3):
        server_link.send_bulk(messages[start : start + 3])
    over.set()
    thread.join()
    assert [message.step for message in link.sent] == list(range(3000))


def test_a_worker_that_leaves_sends_the_rest_first() -> None:
    server_link, link = linked()
    server_link.send_bulk(state(10))
    server_link.close()
    assert [message.step for message in link.sent] == list(range(10))


@pytest.mark.parametrize("count", [None, "9", -1, 2.0, True])
def test_a_welcome_has_the_number_of_tensors_of_its_state(count: object) -> None:
    link, _ = linked()
    with pytest.raises(PeerLost, match="without the number of tensors"):
        link.state(count)
