"""A view: the set of members that the coordinator has agreed on, numbered by its epoch, from a step on.

Members are sorted by rank. A member's index is its rank in the view's group, so groups are dense although ranks have gaps
after a loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smolcluster.comm.group import PeerLost

_INSTANCE = re.compile(r"[0-9a-f]{16}")
_MAX_MEMBERS = 4096
_MAX_TEXT = 255


class ViewChanged(PeerLost):
    """The membership has changed: operations in progress must be repeated in the next view."""


@dataclass(frozen=True, slots=True)
class ViewMember:
    rank: int
    instance: str  # of the process: 16 hex digits, new at every start
    host: str
    address: str  # host:port where it listens for other workers

    @property
    def name(self) -> str:
        """Return the name for logs: `worker 2 (pi5)`."""
        return f"worker {self.rank} ({self.host})"

    def to_meta(self) -> dict[str, Any]:
        return {"rank": self.rank, "instance": self.instance, "host": self.host, "address": self.address}

    @classmethod
    def from_meta(cls, value: Any) -> ViewMember:
        fields = _fields(value, "member", ("rank", "instance", "host", "address"))
        instance = _text(fields, "instance")
        if _INSTANCE.fullmatch(instance) is None:
            raise ValueError(f"a member's instance must be 16 hex digits, not {instance!r}")
        address = _text(fields, "address")
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"a member's address must be host:port, not {address!r}")
        return cls(rank=_count(fields, "rank"), instance=instance, host=_text(fields, "host"), address=address)


@dataclass(frozen=True, slots=True)
class View:
    epoch: int
    step: int
    members: tuple[ViewMember, ...]

    def __post_init__(self) -> None:
        ranks = [member.rank for member in self.members]
        if ranks != sorted(set(ranks)):
            raise ValueError(f"the members of a view must be sorted by rank, without duplicates, not {ranks}")
        if len({member.instance for member in self.members}) != len(ranks):
            raise ValueError("two members of a view have the same instance")

    def index(self, instance: str) -> int | None:
        """Return this process's index in the view, or None."""
        return next((i for i, member in enumerate(self.members) if member.instance == instance), None)

    def to_meta(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": self.step, "members": [member.to_meta() for member in self.members]}

    @classmethod
    def from_meta(cls, value: Any) -> View:
        fields = _fields(value, "view", ("epoch", "step", "members"))
        members = fields["members"]
        if not isinstance(members, list) or len(members) > _MAX_MEMBERS:
            raise ValueError(f"the members of a view must be a list of at most {_MAX_MEMBERS}")
        return cls(
            epoch=_count(fields, "epoch"),
            step=_count(fields, "step"),
            members=tuple(ViewMember.from_meta(member) for member in members),
        )


# Validation of received fields


def _fields(value: Any, what: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or set(value) != set(names):
        raise ValueError(f"a {what} must have exactly the fields {', '.join(names)}")
    return value


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields[name]
    if type(value) is not int or not 0 <= value < 2**63:  # excludes bool
        raise ValueError(f"{name} must be an integer >= 0, not {str(value)[:80]!r}")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or not value.isprintable():
        raise ValueError(f"{name} must be printable text of at most {_MAX_TEXT} characters, not {str(value)[:80]!r}")
    return value
