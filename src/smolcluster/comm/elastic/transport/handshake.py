"""The handshake of two peers: a state machine that takes received messages and returns those to send.

    client (dialled)                              server (listened)
      HELLO  identity, a nonce            ---->     finds the token with the header's cluster id
                                          <----   HELLO  a nonce, no identity yet
      PROOF  over both nonces             ---->     verifies it
                                          <----   PROOF  over both nonces;  ACCEPT  identity
      verifies it: the link is up                   the link is up

Both nonces are new for every connection, so a recorded handshake cannot be replayed. A peer that fails receives REFUSE with
the same reason for a wrong token, an unknown one and none.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from smolcluster.comm.elastic.transport.api import Kind, Message, Peer
from smolcluster.errors import SmolclusterError

if TYPE_CHECKING:
    from smolcluster.comm.elastic.transport.security import Credentials

NONCE_BYTES = 32
PROOF_BYTES = 32
ROLES = ("worker", "server", "stage", "front", "member")
MAX_RANK = 1 << 20
MAX_HOST = 255
MAX_VERSIONS = 16
MAX_VERSION = 100
MAX_REASON = 500

_HEX = re.compile("[0-9a-f]*")

NOT_A_MEMBER = "the cluster token is missing or not the one used here"


class Refusal(SmolclusterError):
    """The handshake failed. `notify`: send the peer the reason."""

    def __init__(self, reason: str, *, notify: bool = True) -> None:
        super().__init__(reason)
        self.notify = notify


class Handshake:
    """One side. `begin` returns the first messages, `handle` the replies to one; `peer` is set when it is done."""

    def __init__(
        self,
        me: Peer,
        *,
        credentials: Credentials | None = None,
        find: Callable[[bytes], Credentials | None] | None = None,
    ) -> None:
        """A client passes its `credentials`, a server a function from the client's cluster id to them."""
        assert (credentials is None) != (find is None), "a client has credentials, a server looks them up"
        self.peer: Peer | None = None
        self._me, self._credentials, self._find = me, credentials, find
        self._mine, self._theirs = secrets.token_bytes(NONCE_BYTES), b""
        self._claimed: Peer | None = None  # the client's identity, before its proof
        self._next = Kind.HELLO

    @property
    def binding(self) -> bytes:
        """Return a value that both ends know and that no other connection shares: a hash over both nonces."""
        client, server = (self._mine, self._theirs) if self._find is None else (self._theirs, self._mine)
        return hashlib.sha256(client + server).digest()

    def begin(self) -> list[Message]:
        if self._find is not None:
            return []
        return [Message(kind=Kind.HELLO, meta={"nonce": self._mine.hex(), **asdict(self._me)})]

    def handle(self, message: Message, *, cluster: bytes) -> list[Message]:
        """Return the replies to a message. `cluster`: the id in the frame's header. Raises Refusal."""
        if message.kind is Kind.REFUSE:
            raise Refusal(printable(message.meta.get("reason"), limit=MAX_REASON) or "no reason given", notify=False)
        if message.kind is not self._next:
            raise Refusal(f"received {message.kind.name}, expected {self._next.name}")
        return self._as_client(message) if self._find is None else self._as_server(message, cluster)

    def _as_server(self, message: Message, cluster: bytes) -> list[Message]:
        if message.kind is Kind.HELLO:
            assert self._find is not None
            self._credentials = self._find(cluster)
            if self._credentials is None:
                raise Refusal(NOT_A_MEMBER)
            self._theirs, self._claimed = _nonce(message.meta), read_peer(message.meta)
            self._next = Kind.PROOF
            return [Message(kind=Kind.HELLO, meta={"nonce": self._mine.hex()})]

        self._verify(message.meta, role="client")
        assert self._claimed is not None
        self._accept(self._claimed)
        return [self._proof("server"), Message(kind=Kind.ACCEPT, meta=asdict(self._me))]

    def _as_client(self, message: Message) -> list[Message]:
        if message.kind is Kind.HELLO:
            self._theirs = _nonce(message.meta)
            self._next = Kind.PROOF
            return [self._proof("client")]
        if message.kind is Kind.PROOF:
            self._verify(message.meta, role="server")
            self._next = Kind.ACCEPT
        else:
            self._accept(read_peer(message.meta))
        return []

    def _proof(self, role: str) -> Message:
        assert self._credentials is not None
        proof = self._credentials.prove(role, mine=self._mine, theirs=self._theirs)
        return Message(kind=Kind.PROOF, meta={"proof": proof.hex()})

    def _verify(self, meta: Mapping[str, Any], *, role: str) -> None:
        assert self._credentials is not None
        proof = _hex(meta, "proof", PROOF_BYTES)
        if not self._credentials.verify(proof, role=role, mine=self._mine, theirs=self._theirs):
            raise Refusal(NOT_A_MEMBER)

    def _accept(self, peer: Peer) -> None:
        if peer.run and self._me.run and peer.run != self._me.run:
            raise Refusal(f"{peer.name} belongs to run {peer.run}, {self._me.name} to run {self._me.run}")
        self.peer = peer


def read_peer(meta: Mapping[str, Any]) -> Peer:
    """Parse and validate a peer from the meta of HELLO or ACCEPT. Raises Refusal."""
    role, rank, host = meta.get("role"), meta.get("rank"), meta.get("host")
    if role not in ROLES:
        raise Refusal(f"the role must be one of {', '.join(ROLES)}")
    if type(rank) is not int or not 0 <= rank < MAX_RANK:
        raise Refusal(f"the rank must be a number from 0 to {MAX_RANK - 1}")
    if not isinstance(host, str) or not 0 < len(host) <= MAX_HOST or not host.isprintable():
        raise Refusal(f"the host must be a name of at most {MAX_HOST} characters")
    return Peer(
        role=role,
        rank=rank,
        host=host,
        instance=_hex(meta, "instance", 8).hex(),
        run=_hex(meta, "run", 8).hex() if meta.get("run") else "",
        versions=_versions(meta.get("versions", {})),
    )


def printable(text: object, *, limit: int) -> str:
    """Return a peer's text for the log: one line of at most `limit` characters, without control characters."""
    if not isinstance(text, str):
        return ""
    return "".join(c if c.isprintable() else " " for c in text[:limit])


def _versions(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_VERSIONS:
        raise Refusal(f"versions must be a mapping of at most {MAX_VERSIONS} names to versions")
    for text in (*value.keys(), *value.values()):
        if not isinstance(text, str) or len(text) > MAX_VERSION or not text.isprintable():
            raise Refusal(f"versions must be strings of at most {MAX_VERSION} printable characters")
    return value


def _nonce(meta: Mapping[str, Any]) -> bytes:
    return _hex(meta, "nonce", NONCE_BYTES)


def _hex(meta: Mapping[str, Any], name: str, size: int) -> bytes:
    text = meta.get(name)
    if not isinstance(text, str) or len(text) != 2 * size or not _HEX.fullmatch(text):
        raise Refusal(f"{name} must be {2 * size} hex digits")
    return bytes.fromhex(text)
