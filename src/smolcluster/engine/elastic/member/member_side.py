"""The membership of a worker, under every strategy: handle messages of the server, load its state, take leases.

A worker that joins or rejoins gets the weights, the optimizer state and a lease, and trains from the next step boundary on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from smolcluster.comm.elastic.membership.server_link import Lease, ServerLink, Stopped
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.strategies.base import State
from smolcluster.strategies.base.replicated import Exchanging


class MemberSide:
    alone = False  # trains without the server
    recall: Callable[[int], Mapping[str, Tensor]] | None = (
        None  # loads the local state that this worker saved after a step
    )

    def init_member(self, strategy: Exchanging[Any]) -> None:
        """Call once, before the link is used."""
        self._strategy, self.context, self.replica = strategy, strategy.context, strategy.replica
        self._over = False  # the server has sent STOP
        self._epoch = 0  # of the last WELCOME
        self.replica.led = True
        state_bytes = sum(t.nbytes for t in self.replica.weights().values())
        self._link.allow(Kind.STATE, max_bytes=8 * state_bytes + 2**20)

    @property
    def _link(self) -> ServerLink:
        assert self.context.server_link is not None
        return self.context.server_link

    def end_alone(self) -> None:
        """Stop training without the server."""

    def introduction(self) -> dict[str, Any]:
        """Return what a strategy adds to JOIN."""
        return {}

    def _handle(self, message: Message) -> None:
        """Handle one message of the server. Subclasses add their kinds."""
        if message.kind is Kind.WELCOME:
            self._enter(message)
        elif message.kind is Kind.STOP:
            self._over = True
        self._use_scale(message)

    def _use_scale(self, message: Message) -> None:
        """Use the loss scale that the server sent last: only the server changes it."""
        if self.replica.scale is not None and self.replica.led and "scale" in message.meta:
            self.replica.scale.load_state_dict(message.meta["scale"])

    def _enter(self, welcome: Message) -> None:
        """Become a member, with the server's state."""
        self._epoch = welcome.epoch
        count = welcome.meta.get("state")
        if count is None:
            return
        tensors = self._link.state(count)
        if tensors is not None:  # else the link was lost, and another WELCOME follows
            state = State.unpacked(tensors, welcome.meta["numbers"])
            state.own = self.recall(welcome.step) if self.recall is not None else {}
            self._strategy.load_state(state)

    def lease(self) -> Lease | None:
        """Return the next lease; None when the run is over."""
        while not self._over:
            self._check_stop()
            message = self._link.get(0)
            if message is None and self._link.leases:
                return self._link.leases.popleft()
            message = message or self._link.get()
            if message is not None:
                self._handle(message)
        return None

    def holds(self, step: int) -> bool:
        """Return whether the lease that `lease` returned last, with this step, is still held."""
        return True

    def _check_stop(self) -> None:
        if self.context.stop_requested():
            raise Stopped
