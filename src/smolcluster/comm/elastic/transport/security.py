"""Authentication by cluster token: keys, certificate and proofs derived from it, and where tokens are stored.

A token is 32 random bytes as text. Everything else is derived from them, so machines with the same token agree on it
without exchanging a byte:

    secret --HKDF--> cluster id     8 bytes, public: identifies the token without revealing it
                     proof key      HMAC-SHA256, for `prove` and `verify`
                     Ed25519 key    signs one certificate, bit for bit the same on every machine

How two machines connect:

    client                                          server
      TLS 1.3, server name = its cluster id   --->
                                              <---  certificate of that token, and proof of its key; a random
      certificate, and proof of its key       --->  certificate if the token is unknown
      HELLO with a nonce                      <-->  HELLO with a nonce
      PROOF as "client"                       <-->  PROOF as "server"

Each end trusts only that certificate, whose key follows from the token. So a man in the middle can impersonate neither, and
no peer without a token gets past TLS: the parsers above it read only from members. Tokens are always random: the public
id would allow offline guesses at a password.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import os
import re
import secrets
import ssl
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from smolcluster.comm.addresses import is_loopback
from smolcluster.durable_files import atomic_write
from smolcluster.errors import MissingExtra, SmolclusterError, UserError
from smolcluster.folders import user_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX = "smol1_"  # the number is the version of the derivation
SECRET_BYTES = 32
CHECK_BYTES = 4
TOKEN_LENGTH = len(PREFIX) + (SECRET_BYTES + CHECK_BYTES) * 4 // 3
CLUSTER_ID_BYTES = 8
DOMAIN = ".smolcluster"  # ends every server name
MAX_TOKENS = 8  # a dialer may try them all
MAX_FILE_BYTES = 1 << 16

# Clocks may be wrong, or start in 1970: the certificate is valid at any time.
_VALID_FROM = datetime.datetime(1950, 1, 1, tzinfo=datetime.UTC)
_VALID_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


class TokenRefused(SmolclusterError):
    """The peer's certificate belongs to none of our tokens."""


# Tokens


def new_token() -> str:
    """Return a new token: the prefix, then a random secret and its checksum in URL-safe base64."""
    secret = secrets.token_bytes(SECRET_BYTES)
    return PREFIX + base64.urlsafe_b64encode(secret + _checksum(secret)).decode()


def read_secret(token: str, *, where: str = "token") -> bytes:
    """Return the secret in a token. Errors never contain the token: they end up in logs."""
    if not token.startswith(PREFIX):
        raise UserError(
            f"{where}: this is not a cluster token, which starts with {PREFIX}; make one with `smolcluster token new`"
        )
    if len(token) != TOKEN_LENGTH:
        raise UserError(
            f"{where}: the token has {len(token)} characters instead of {TOKEN_LENGTH}; copy all of it, and nothing else"
        )
    text = token.removeprefix(PREFIX)
    wrong = re.search(r"[^A-Za-z0-9_-]", text)
    if wrong is not None:
        place = len(PREFIX) + wrong.start() + 1
        raise UserError(f"{where}: character {place} of the token is invalid; copy it again")
    raw = base64.urlsafe_b64decode(text)
    secret, checksum = raw[:SECRET_BYTES], raw[SECRET_BYTES:]
    if not hmac.compare_digest(checksum, _checksum(secret)):
        raise UserError(
            f"{where}: the token has a typing mistake: its checksum does not match; copy it again "
            "from `smolcluster token show --secret`"
        )
    return secret


def _checksum(secret: bytes) -> bytes:
    return _derive(secret, "checksum")[:CHECK_BYTES]


def _derive(secret: bytes, purpose: str) -> bytes:
    """HKDF with SHA-256 (RFC 5869): derive an independent key of 32 bytes for one purpose."""
    extracted = hmac.digest(b"smolcluster", secret, "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")


# One token


class Credentials:
    """Everything derived from one token. `cluster`, `certificate` and `fingerprint` are public, the rest is secret."""

    cluster: bytes
    _proof_key: bytes

    def __init__(self, token: str, *, where: str = "token") -> None:
        secret = read_secret(token, where=where)
        self.cluster = _derive(secret, "cluster id")[:CLUSTER_ID_BYTES]
        self._proof_key = _derive(secret, "proof")
        self._key_seed = _derive(secret, "certificate")

    @property
    def name(self) -> str:
        """The cluster id as 16 hex digits."""
        return self.cluster.hex()

    @property
    def server_name(self) -> str:
        """The TLS server name, by which the server selects the certificate."""
        return self.name + DOMAIN

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def prove(self, role: str, *, mine: bytes, theirs: bytes) -> bytes:
        """Return a MAC that proves possession of the token. `role` is our end: "client" dialled, "server" listened.

        It is bound to this connection by the nonces, to this direction by the role, and to this channel by the
        certificate's fingerprint.
        """
        if role not in ("client", "server"):
            raise ValueError(f"role must be client or server, not '{role}'")
        client, server = (mine, theirs) if role == "client" else (theirs, mine)
        parts = (b"smolcluster proof", role.encode(), client, server, self.fingerprint)
        # Length prefixes make the encoding injective.
        return hmac.digest(self._proof_key, b"".join(len(p).to_bytes(4, "big") + p for p in parts), "sha256")

    def verify(self, proof: bytes, *, role: str, mine: bytes, theirs: bytes) -> bool:
        """Return whether `proof` is that of a peer at the `role` end. `mine` and `theirs`: our nonce and the peer's."""
        return hmac.compare_digest(proof, self.prove(role, mine=theirs, theirs=mine))

    @cached_property
    def certificate(self) -> bytes:
        """Self-signed, DER. Deterministic: names, number and dates are fixed, and Ed25519 signatures use no randomness."""
        key = self._private_key()
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding

        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, self.server_name)])
        builder = x509.CertificateBuilder(
            issuer_name=name,
            subject_name=name,
            public_key=key.public_key(),
            serial_number=1,
            not_valid_before=_VALID_FROM,
            not_valid_after=_VALID_UNTIL,
        )
        return builder.sign(key, algorithm=None).public_bytes(Encoding.DER)

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate."""
        return hashlib.sha256(self.certificate).digest()

    def server_context(self) -> ssl.SSLContext:
        """For listeners with this token alone, whatever server name the client sends."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """For dialers; goes with `server_hostname=server_name`. Verification fails for a peer that has only other tokens."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        """TLS 1.3 only. Presents this token's certificate and requires the same one from the peer."""
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is pinned
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        self._load_key(context)
        # No session resumption: every connection has a full handshake.
        context.options |= ssl.OP_NO_TICKET
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        return context

    def _load_key(self, context: ssl.SSLContext) -> None:
        """Load the key through a temporary file, since the ssl module takes keys from files only.

        The file is encrypted: a process that is killed meanwhile leaves no readable key behind.
        """
        key = self._private_key()
        from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

        password = secrets.token_hex(32).encode()
        sealed = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))
        with tempfile.TemporaryDirectory(prefix="smolcluster-") as folder:
            path = Path(folder) / "certificate.pem"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(ssl.DER_cert_to_PEM_cert(self.certificate).encode() + sealed)
            context.load_cert_chain(path, password=password)

    def _private_key(self) -> Ed25519PrivateKey:
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ImportError:
            raise MissingExtra("cryptography", extra="cluster", purpose="a cluster token") from None
        return Ed25519PrivateKey.from_private_bytes(self._key_seed)


class NoToken(Credentials):
    """Credentials without a token: the same handshake, with `secret` as its key.

    An empty secret authenticates nobody: then `check_bind` restricts the transport to loopback.
    """

    cluster = bytes(CLUSTER_ID_BYTES)
    certificate = b""
    fingerprint = bytes(32)

    def __init__(self, secret: bytes = b"") -> None:
        self._proof_key = secret

    def _context(self, protocol: int) -> ssl.SSLContext:
        raise RuntimeError("TLS needs a token: without one there is no certificate")


# All tokens of a machine


class Keyring:
    """The tokens that this machine accepts, the current one first. Several while a token is being replaced."""

    def __init__(self, tokens: Iterable[str], *, source: str = "token") -> None:
        self.source = source  # where the tokens came from, for messages
        self.credentials = tuple(Credentials(token, where=source) for token in dict.fromkeys(tokens))
        if not self.credentials:
            raise UserError(f"{source} contains no token; make one with `smolcluster token new`")
        if len(self.credentials) > MAX_TOKENS:
            raise UserError(
                f"{source} contains {len(self.credentials)} tokens, at most {MAX_TOKENS} are allowed; "
                "remove old ones with `smolcluster token revoke ID`"
            )

    @property
    def current(self) -> Credentials:
        return self.credentials[0]

    def __repr__(self) -> str:
        return f"Keyring({', '.join(known.name for known in self.credentials)})"

    def find(self, cluster: bytes) -> Credentials | None:
        """Return the credentials with this cluster id, or None."""
        return next((known for known in self.credentials if known.cluster == cluster), None)

    def server_context(self) -> ssl.SSLContext:
        """For listeners: presents the certificate of the token that the client's server name selects."""
        contexts = {known.server_name: known.server_context() for known in self.credentials}
        # A client of another cluster receives a random certificate and fails with a clear error. If we ended the handshake
        # instead, it would look like a network error: asyncio closes without sending the alert.
        unknown = Credentials(new_token()).server_context()

        def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
            if name is None or not name.endswith(DOMAIN):
                return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
            connection.context = contexts.get(name, unknown)
            return None

        unknown.sni_callback = choose
        return unknown

    def check_certificate(self, der: bytes | None) -> Credentials:
        """Return the credentials that this certificate belongs to. Raises TokenRefused if there are none."""
        for known in self.credentials:
            if der == known.certificate:
                return known
        seen = f"fingerprint {hashlib.sha256(der).hexdigest()[:16]}..." if der else "none"
        raise TokenRefused(f"the peer's certificate ({seen}) belongs to none of our tokens; known: {self!r}")


# Permanent failures. Others, such as a corrupted record, may not happen at the next attempt.
_REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "the peer does not have our token",
    "TLSV1_ALERT_UNKNOWN_CA": "the peer does not have our token",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer has no token",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer requires a token",
    "CALLBACK_FAILED": "the peer sent no token name",
    "TLSV1_UNRECOGNIZED_NAME": "the peer requires a token name",
    "WRONG_VERSION_NUMBER": "the peer does not speak TLS; it may have no token",
    "HTTP_REQUEST": "the peer speaks HTTP",
    "UNSUPPORTED_PROTOCOL": "the peer does not speak TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the peer does not speak TLS 1.3",
    "NO_SHARED_CIPHER": "the peer has no cipher in common with us",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the peer has no cipher in common with us",
}


def explain(error: ssl.SSLError) -> str:
    """Return the reason of a failed TLS handshake."""
    reason = getattr(error, "reason", None)  # not all have one
    return _REASONS.get(reason or "", f"TLS failed: {reason or error}")


def is_permanent(error: ssl.SSLError) -> bool:
    """Return whether a retry would fail in the same way: tokens or protocols do not match."""
    return isinstance(error, ssl.SSLCertVerificationError) or getattr(error, "reason", None) in _REASONS


# Token files


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token, its note and its location."""

    token: str = field(repr=False)
    note: str = ""
    where: str = "token"


class TokenFile:
    """One token per line, the current one first; `#` starts a comment, which after a token is its note.

    Changes keep the other lines and are atomic.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[TokenEntry]:
        """Return the tokens, the current one first; none if there is no file."""
        return parse_tokens(self._read(), where=str(self.path))

    def add(self, entries: Sequence[TokenEntry]) -> None:
        """Insert these first, in this order. Existing ones are moved."""
        tokens = {entry.token for entry in entries}
        lines = [line for line in self._read().splitlines() if _split(line)[0] not in tokens]
        first = next((number for number, line in enumerate(lines) if _split(line)[0]), len(lines))
        # A line break in a note would start another token.
        notes = ["".join(c if c.isprintable() else " " for c in entry.note)[:200] for entry in entries]
        added = [f"{e.token}  # {note}" if note else e.token for e, note in zip(entries, notes, strict=True)]
        self._write([*lines[:first], *added, *lines[first:]])

    def remove(self, token: str) -> None:
        self._write([line for line in self._read().splitlines() if _split(line)[0] != token])

    def _read(self) -> str:
        try:
            with self.path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                # Windows has no permission bits; there the user's folder is private by its access list.
                if os.name == "posix" and mode & 0o077:
                    raise UserError(
                        f"others can read the token file {self.path} (mode {mode & 0o777:04o}); "
                        f"restrict it with: chmod 600 {self.path}"
                    )
                raw = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise UserError(f"cannot read the token file {self.path}: {error.strerror}") from error
        try:
            if len(raw) > MAX_FILE_BYTES:
                raise ValueError("too large")
            return raw.decode("utf-8-sig")  # some editors on Windows write a byte order mark
        except ValueError:
            raise UserError(f"{self.path} is not a token file, which has one token per line") from None

    def _write(self, lines: list[str]) -> None:
        path = self.path.resolve()  # keep symlinks
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_write(path, mode=0o600) as file:
                file.write("".join(line + "\n" for line in lines).encode())
        except OSError as error:
            raise UserError(
                f"cannot write the token file {self.path}: {error.strerror}; "
                "set SMOLCLUSTER_TOKEN_FILE to a path that can be written"
            ) from error


def parse_tokens(text: str, *, where: str) -> list[TokenEntry]:
    """Parse and validate the text of a token file."""
    found: dict[str, TokenEntry] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        token, note = _split(line)
        if token:
            entry = TokenEntry(token, note, f"{where}, line {number}")
            read_secret(token, where=entry.where)
            found.setdefault(token, entry)
    return list(found.values())


def _split(line: str) -> tuple[str, str]:
    token, _, note = line.partition("#")
    return token.strip(), note.strip()


def token_file(environ: Mapping[str, str]) -> TokenFile:
    """Return the file $SMOLCLUSTER_TOKEN_FILE, else smolcluster/token in the user's configuration folder."""
    chosen = environ.get("SMOLCLUSTER_TOKEN_FILE")
    if chosen:
        return TokenFile(Path(chosen).expanduser())
    return TokenFile(user_folder("config", environ) / "token")


def find_tokens(config_token: str | None, environ: Mapping[str, str]) -> tuple[str, list[TokenEntry]] | None:
    """Return this machine's tokens and their source, or None.

    The first of SMOLCLUSTER_TOKEN, `cluster.token` and the token file that has any; sources are never combined. The first
    two may hold several tokens, separated by spaces or commas.
    """
    for source, text in (("SMOLCLUSTER_TOKEN", environ.get("SMOLCLUSTER_TOKEN")), ("cluster.token", config_token)):
        tokens = re.split(r"[\s,]+", text.strip()) if text and text.strip() else []
        if tokens:
            return source, [TokenEntry(token, where=source) for token in tokens]
    file = token_file(environ)
    entries = file.entries()
    if entries:
        return str(file.path), entries
    if environ.get("SMOLCLUSTER_TOKEN_FILE"):
        raise UserError(f"SMOLCLUSTER_TOKEN_FILE: {file.path} contains no token; make one with `smolcluster token new`")
    return None


def load_keyring(config_token: str | None, environ: Mapping[str, str]) -> Keyring | None:
    """Load this machine's tokens (see `find_tokens`); `config_token` is `cluster.token`."""
    found = find_tokens(config_token, environ)
    return None if found is None else Keyring((entry.token for entry in found[1]), source=found[0])


def check_bind(host: str, keyring: Keyring | None) -> None:
    """Raise UserError for listening beyond loopback without a token."""
    if keyring is None and not is_loopback(host):
        raise UserError(
            f"listening on '{host}' accepts connections from other machines, but there is no cluster token; make one with "
            "`smolcluster token new` and give it to every machine (its token file, or SMOLCLUSTER_TOKEN), "
            "or listen on 127.0.0.1"
        )


def check_dial(address: str, keyring: Keyring | None) -> None:
    """Raise UserError for dialling beyond loopback without a token."""
    host = address.rpartition(":")[0].strip("[]")
    if keyring is None and not is_loopback(host):
        raise UserError(
            f"the server at {address} is on another machine and this one has no cluster token; add the server's token with "
            "`smolcluster token add`, or set SMOLCLUSTER_TOKEN"
        )
