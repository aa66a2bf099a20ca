"""Pairwise keys, by which two workers authenticate to each other as members of a view.

Every member knows the instances and addresses of all others, so these prove nothing. The coordinator, which has verified each
worker's instance at its JOIN, sends every pair of members a separate key with the view. On a link each side sends a MAC
with that key over the connection's binding, so a MAC is useless on another connection and to a third member.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

KEY_BYTES = 16
_KEY = re.compile(r"[0-9a-f]{32}")


class PairwiseKeys:
    """The coordinator's keys: a pair has the same key in every view."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def of(self, instance: str, others: Iterable[str]) -> dict[str, str]:
        """Return the keys of a member, by the other member's instance."""
        return {other: self._key(*sorted((instance, other))) for other in others if other != instance}

    def _key(self, first: str, second: str) -> str:
        return hmac.digest(self._secret, f"{first} {second}".encode(), "sha256")[:KEY_BYTES].hex()


def parse_keys(value: Any) -> dict[str, bytes]:
    """Parse the keys received with a view. Raises ValueError."""
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and _KEY.fullmatch(k) for k in value.values()):
        raise ValueError(f"keys of a view must be {2 * KEY_BYTES} hex digits each")
    return {str(instance): bytes.fromhex(key) for instance, key in value.items()}


def member_mac(key: bytes, *, binding: bytes, instance: str) -> str:
    """Return the MAC that the worker with this instance sends. `binding`: `Link.binding`."""
    return hmac.new(key, b"smolcluster member " + binding + instance.encode(), hashlib.sha256).hexdigest()


def is_valid_mac(given: object, key: bytes, *, binding: bytes, instance: str) -> bool:
    expected = member_mac(key, binding=binding, instance=instance)
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())
