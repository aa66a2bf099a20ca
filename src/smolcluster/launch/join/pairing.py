"""Pair a machine that runs `join` with the cluster that accepts it, by a code on its screen.

    new machine (listens)                                    cluster (dials)
                                             <----   commit: hash of my key and nonce
      my key, my nonce                       ---->
                                             <----   my key, my nonce: must be what was committed to
      shows the code, 5 + 5 digits                   prompts the user for the code
        first five: random                             last five must equal its own, or it aborts
        last five: from both keys and nonces  <----   proof that it knows the first five
      checks the proof                       <----   sealed: token, server, rank

A man in the middle has different keys on each side, so the last five digits differ. A client that cannot see the screen has one
guess of the first five for each code, and after three codes the machine stops. Keys are fresh for every attempt (X25519);
sealing uses ChaCha20-Poly1305.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from smolcluster.errors import MissingExtra, SmolclusterError

PROTOCOL = "smolcluster-pair-1"
MAX_BYTES = 64 << 10
REPLY_S = 15.0
TYPING_S = 300.0  # for the user to type the code on the other machine
MAX_CODES = 3
NOT_OURS = "the peer does not speak this protocol"


class PairingFailed(SmolclusterError):
    """The pairing was aborted."""


class _KeyPair:
    """Key and nonce of one attempt."""

    def __init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        except ImportError:
            raise MissingExtra("cryptography", extra="cluster", purpose="pairing") from None
        self._private = X25519PrivateKey.generate()
        self.key = self._private.public_key().public_bytes_raw()
        self.nonce = secrets.token_bytes(32)

    @property
    def commitment(self) -> str:
        return commitment(self.key, self.nonce)

    def agree(self, key: bytes, nonce: bytes, *, dialled: bool) -> Agreement:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(key))
        except ValueError as error:
            raise PairingFailed(f"the peer's key is invalid: {error}") from error
        mine, theirs = self.key + self.nonce, key + nonce
        both = mine + theirs if dialled else theirs + mine
        return Agreement(shared, both)


def commitment(key: bytes, nonce: bytes) -> str:
    return hashlib.sha256(b"commit" + key + nonce).hexdigest()


class Agreement:
    """The secret that both sides derive."""

    def __init__(self, shared: bytes, both: bytes) -> None:
        self._base = hmac.digest(hashlib.sha256(both).digest(), shared, "sha256")

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._base, purpose.encode(), "sha256")

    @property
    def digits(self) -> str:
        """Return five digits, which differ if there is a man in the middle."""
        return f"{int.from_bytes(self._derive('digits')[:8]) % 100_000:05}"

    def proof(self, secret: str) -> str:
        return hmac.digest(self._derive("proof"), secret.encode(), "sha256").hex()

    def seal(self, fields: dict[str, Any]) -> str:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        nonce = secrets.token_bytes(12)
        return (nonce + ChaCha20Poly1305(self._derive("seal")).encrypt(nonce, json.dumps(fields).encode(), None)).hex()

    def open(self, sealed: str) -> dict[str, Any]:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        try:
            raw = bytes.fromhex(sealed)
            fields: dict[str, Any] = json.loads(
                ChaCha20Poly1305(self._derive("seal")).decrypt(raw[:12], raw[12:], None)
            )
        except (InvalidTag, ValueError) as error:
            raise PairingFailed("the sealed message cannot be decrypted") from error
        return fields


class _JsonLines:
    """JSON objects over a socket, one a line, with limits on size and time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def send(self, **fields: Any) -> None:
        try:
            self._sock.sendall(json.dumps(fields).encode() + b"\n")
        except OSError as error:
            raise PairingFailed(f"the connection was lost: {error.strerror or error}") from error

    def receive(self, timeout_s: float = REPLY_S) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        try:
            while b"\n" not in self._rest:
                self._sock.settimeout(max(0.01, deadline - time.monotonic()))
                if time.monotonic() >= deadline:
                    raise TimeoutError
                chunk = self._sock.recv(4096)
                if not chunk:
                    raise PairingFailed("the peer closed the connection")
                self._rest += chunk
                if len(self._rest) > MAX_BYTES:
                    raise PairingFailed(f"the peer sent more than {MAX_BYTES >> 10} KiB")
        except TimeoutError as error:
            raise PairingFailed(f"no response in {timeout_s:g} s") from error
        except OSError as error:
            raise PairingFailed(f"the connection was lost: {error.strerror or error}") from error
        first, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(first)
        except (ValueError, RecursionError) as error:
            raise PairingFailed(NOT_OURS) from error
        if not isinstance(message, dict):
            raise PairingFailed(NOT_OURS)
        return message


def _bytes(message: dict[str, Any], name: str, size: int) -> bytes:
    try:
        value = bytes.fromhex(str(message[name]))
    except (KeyError, ValueError) as error:
        raise PairingFailed(NOT_OURS) from error
    if len(value) != size:
        raise PairingFailed(NOT_OURS)
    return value


def _same(one: str, other: str) -> bool:
    """Compare in constant time, whatever characters the peer sends."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))


def offer(sock: socket.socket, facts: dict[str, Any], *, show: Callable[[str], None]) -> dict[str, Any]:
    """Pair as the new machine, once. `show` gets the code. Return the cluster's grant. Raises PairingFailed."""
    channel, keys = _JsonLines(sock), _KeyPair()
    hello = channel.receive()
    if hello.get("protocol") != PROTOCOL:
        raise PairingFailed(f"the peer speaks {hello.get('protocol')!r}, not {PROTOCOL}")
    channel.send(key=keys.key.hex(), nonce=keys.nonce.hex(), facts=facts)
    message = channel.receive()
    key, nonce = _bytes(message, "key", 32), _bytes(message, "nonce", 32)
    if not _same(commitment(key, nonce), str(hello.get("commitment"))):
        raise PairingFailed("the peer's key does not match its commitment")
    session = keys.agree(key, nonce, dialled=False)
    secret = f"{secrets.randbelow(100_000):05}"
    show(f"{secret}-{session.digits}")
    reply = channel.receive(TYPING_S)
    if not _same(session.proof(secret), str(reply.get("proof"))):
        raise PairingFailed("the code was mistyped")
    given = session.open(str(reply.get("sealed")))
    channel.send(done=True)
    return given


def accept(sock: socket.socket, given: dict[str, Any], *, ask: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    """Pair as the cluster. `ask` gets the machine's facts and returns the typed code; `given` is sent sealed. Return the facts.
    Raises PairingFailed."""
    channel, keys = _JsonLines(sock), _KeyPair()
    channel.send(protocol=PROTOCOL, commitment=keys.commitment)
    message = channel.receive()
    key, nonce = _bytes(message, "key", 32), _bytes(message, "nonce", 32)
    facts = message.get("facts")
    if not isinstance(facts, dict):
        raise PairingFailed(NOT_OURS)
    channel.send(key=keys.key.hex(), nonce=keys.nonce.hex())
    session = keys.agree(key, nonce, dialled=True)
    code = "".join(c for c in ask(facts) if c in "0123456789")
    if len(code) != 10:
        raise PairingFailed("a code has ten digits, such as 48291-57120; no token was sent")
    if not _same(code[5:], session.digits):
        raise PairingFailed(
            "the code does not belong to this connection: mistyped, or a man in the middle; no token was sent"
        )
    channel.send(proof=session.proof(code[:5]), sealed=session.seal(given))
    channel.receive()
    return facts
