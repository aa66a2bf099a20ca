"""Who may take part in a cluster: the token, and the keys, the certificate and the proofs that come of it.

A token is 32 random bytes, written so that a person can copy it. Everything else is derived from them, so that two
machines with the same token agree on all of it before they have exchanged a byte:

    secret --HKDF--> cluster id     8 bytes, public: names the token without giving it away
                     proof key      HMAC-SHA256, for `prove` and `verify`
                     Ed25519 key    signs one certificate, the same to the last bit on every machine

How two machines meet:

    client                                          server
      TLS 1.3, server name = its cluster id   --->
                                              <---  that token's certificate, and proof of its key; to a token it does
      that certificate, and proof of its key  --->  not know it shows one that nobody trusts
      HELLO with a nonce                      <-->  HELLO with a nonce
      PROOF as "client"                       <-->  PROOF as "server"

Each end trusts the one certificate and nothing else, and its key cannot be had without the token. So a man in the middle
can speak for neither, and nobody without a token gets past TLS: the parsers behind it hear members only. Tokens
are only ever random: the public id would let anybody try guesses at a password.
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
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from smolcluster.comm.addresses import is_loopback
from smolcluster.errors import MissingExtra, SmolclusterError, UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX = "smol1_"  # the number is the version of everything derived below
SECRET_BYTES = 32
CHECK_BYTES = 4
TOKEN_LENGTH = len(PREFIX) + (SECRET_BYTES + CHECK_BYTES) * 4 // 3
CLUSTER_ID_BYTES = 8
DOMAIN = ".smolcluster"  # ends every server name
MAX_TOKENS = 8  # a dialer may have to try them all
MAX_FILE_BYTES = 1 << 16

# Machines may disagree about the date, or start in 1970 for want of a clock: the certificate is good at any time.
_VALID_FROM = datetime.datetime(1950, 1, 1, tzinfo=datetime.UTC)
_VALID_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


class TokenRefused(SmolclusterError):
    """The other side does not hold a token of ours."""


# Tokens


def new_token() -> str:
    """A fresh secret as text: the prefix, then secret and checksum in URL-safe base64."""
    secret = secrets.token_bytes(SECRET_BYTES)
    return PREFIX + base64.urlsafe_b64encode(secret + _checksum(secret)).decode()


def read_secret(token: str, *, where: str = "token") -> bytes:
    """The secret in a token. A mistake is reported without repeating the token: messages end up in logs."""
    if not token.startswith(PREFIX):
        raise UserError(
            f"{where}: this is not a cluster token: one starts with {PREFIX} and is made by `smolcluster token new`"
        )
    if len(token) != TOKEN_LENGTH:
        raise UserError(
            f"{where}: the token has {len(token)} characters instead of {TOKEN_LENGTH}; was all of it copied, and no more?"
        )
    text = token.removeprefix(PREFIX)
    wrong = re.search(r"[^A-Za-z0-9_-]", text)
    if wrong is not None:
        place = len(PREFIX) + wrong.start() + 1
        raise UserError(f"{where}: character {place} of the token is none that a token can have; copy it again")
    raw = base64.urlsafe_b64decode(text)
    secret, checksum = raw[:SECRET_BYTES], raw[SECRET_BYTES:]
    if not hmac.compare_digest(checksum, _checksum(secret)):
        raise UserError(
            f"{where}: the token has a typing mistake: its checksum does not fit; copy it again "
            "from `smolcluster token show --secret`"
        )
    return secret


def _checksum(secret: bytes) -> bytes:
    return _derive(secret, "checksum")[:CHECK_BYTES]


def _derive(secret: bytes, purpose: str) -> bytes:
    """HKDF with SHA-256 (RFC 5869): 32 bytes for one purpose, from which neither the secret nor the others follow."""
    extracted = hmac.digest(b"smolcluster", secret, "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")


# One token


class Credentials:
    """What follows from one token. `cluster`, `certificate` and `fingerprint` are public, the rest stays inside."""

    cluster: bytes
    _proof_key: bytes

    def __init__(self, token: str, *, where: str = "token") -> None:
        secret = read_secret(token, where=where)
        self.cluster = _derive(secret, "cluster id")[:CLUSTER_ID_BYTES]
        self._proof_key = _derive(secret, "proof")
        self._key_seed = _derive(secret, "certificate")

    @property
    def name(self) -> str:
        """The cluster id for people: 16 hex digits."""
        return self.cluster.hex()

    @property
    def server_name(self) -> str:
        """What a client asks for in TLS, so that the server knows which certificate to show."""
        return self.name + DOMAIN

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def prove(self, role: str, *, mine: bytes, theirs: bytes) -> bytes:
        """That I hold the token, for one connection. `role` is my end of it: "client" dialled, "server" listened.

        The nonces make it worthless for any other connection, the role for the other direction, the fingerprint for a
        channel that another certificate protects.
        """
        if role not in ("client", "server"):
            raise ValueError(f"role must be client or server, not '{role}'")
        client, server = (mine, theirs) if role == "client" else (theirs, mine)
        parts = (b"smolcluster proof", role.encode(), client, server, self.fingerprint)
        # With lengths, no two lists of parts make the same bytes.
        return hmac.digest(self._proof_key, b"".join(len(p).to_bytes(4, "big") + p for p in parts), "sha256")

    def verify(self, proof: bytes, *, role: str, mine: bytes, theirs: bytes) -> bool:
        """Whether `proof` is what a peer at the `role` end makes of its nonce, `theirs`, and mine."""
        return hmac.compare_digest(proof, self.prove(role, mine=theirs, theirs=mine))

    @cached_property
    def certificate(self) -> bytes:
        """Self-signed, DER. Names, number and dates are fixed and Ed25519 signs without chance: always the same bytes."""
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
        """For listeners with this token alone, whatever name the client asks for."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """For dialers; goes with `server_hostname=server_name`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        """TLS 1.3 and nothing older. Shows this token's certificate, and wants to see the same one."""
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate is known to the last bit: its name adds nothing
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        self._load_key(context)
        # Every connection starts from nothing: there is no session to resume.
        context.options |= ssl.OP_NO_TICKET
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        return context

    def _load_key(self, context: ssl.SSLContext) -> None:
        """The ssl module takes keys from files only: a private folder, for a moment.

        The file is encrypted, so that if the process dies in that moment it leaves nothing behind that can be read.
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
    """Without a token: the same handshake, with `secret` as its key. An empty one authenticates nobody."""

    cluster = bytes(CLUSTER_ID_BYTES)
    certificate = b""
    fingerprint = bytes(32)

    def __init__(self, secret: bytes = b"") -> None:
        self._proof_key = secret

    def _context(self, protocol: int) -> ssl.SSLContext:
        raise RuntimeError("without a token there is no certificate, hence no TLS")


# All tokens of a machine


class Keyring:
    """The tokens that this machine accepts, best first. More than one while a token is being replaced."""

    def __init__(self, tokens: Iterable[str], *, source: str = "token") -> None:
        self.source = source  # where they were found, for messages
        self.credentials = tuple(Credentials(token, where=source) for token in dict.fromkeys(tokens))
        if not self.credentials:
            raise UserError(f"{source}: there is no token in it; make one with `smolcluster token new`")
        if len(self.credentials) > MAX_TOKENS:
            raise UserError(
                f"{source}: {len(self.credentials)} tokens are more than {MAX_TOKENS}; "
                "drop old ones with `smolcluster token revoke ID`"
            )

    @property
    def current(self) -> Credentials:
        return self.credentials[0]

    def __repr__(self) -> str:
        return f"Keyring({', '.join(known.name for known in self.credentials)})"

    def find(self, cluster: bytes) -> Credentials | None:
        """The credentials of the token with this public id."""
        return next((known for known in self.credentials if known.cluster == cluster), None)

    def server_context(self) -> ssl.SSLContext:
        """For listeners: shows the certificate of the token that the client names."""
        contexts = {known.server_name: known.server_context() for known in self.credentials}
        # A client of another cluster sees a certificate that cannot be right, and knows what is wrong: ending the handshake
        # would look like a broken line, since asyncio closes without sending the alert.
        stranger = Credentials(new_token()).server_context()

        def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
            if name is None or not name.endswith(DOMAIN):
                return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
            connection.context = contexts.get(name, stranger)
            return None

        stranger.sni_callback = choose
        return stranger

    @property
    def server_name(self) -> str:
        return self.current.server_name

    def client_context(self) -> ssl.SSLContext:
        """For dialers with the current token.

        A peer that has only an older one fails the verification: try `client_context` and `server_name` of the other
        `credentials` in turn before giving up.
        """
        return self.current.client_context()

    def check_certificate(self, der: bytes | None) -> Credentials:
        """Whose certificate this is, at either end; the connection goes on with those. Raises Refused when it is nobody's."""
        for known in self.credentials:
            if der == known.certificate:
                return known
        seen = f"fingerprint {hashlib.sha256(der).hexdigest()[:16]}..." if der else "none"
        raise TokenRefused(f"the other side's certificate ({seen}) is of no token here; known: {self!r}")


def open_credentials(secret: bytes = b"") -> Credentials:
    """For a transport without a keyring; `check_bind` keeps one that has no `secret` either on loopback."""
    return NoToken(secret)


# Other reasons, a record that does not fit its checksum say, may be gone at the next attempt. These stay.
_REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "the other side does not have our token",
    "TLSV1_ALERT_UNKNOWN_CA": "the other side does not have our token",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the other side has no token",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other side wants a token",
    "CALLBACK_FAILED": "the other side names no token",
    "TLSV1_UNRECOGNIZED_NAME": "the other side wants a token named",
    "WRONG_VERSION_NUMBER": "the other side does not speak TLS: has it no token?",
    "HTTP_REQUEST": "the other side speaks HTTP",
    "UNSUPPORTED_PROTOCOL": "the other side does not speak TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other side does not speak TLS 1.3",
    "NO_SHARED_CIPHER": "the other side has no cipher in common with us",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the other side has no cipher in common with us",
}


def explain(error: ssl.SSLError) -> str:
    """A failed handshake in words."""
    reason = getattr(error, "reason", None)  # not all have one
    return _REASONS.get(reason or "", f"TLS failed: {reason or error}")


def will_stay(error: ssl.SSLError) -> bool:
    """Whether another attempt would fail in the same way: the tokens or the protocols do not fit."""
    return isinstance(error, ssl.SSLCertVerificationError) or getattr(error, "reason", None) in _REASONS


# Where tokens are kept


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token where it was found."""

    token: str = field(repr=False)
    note: str = ""
    where: str = "token"


class TokenFile:
    """One token a line, the first is current; `#` starts a comment, and one behind a token is its note.

    Changes leave the other lines as they are, and are never seen half-written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[TokenEntry]:
        """The tokens, best first; none when there is no file."""
        return parse_tokens(self._read(), where=str(self.path))

    def add(self, entries: Sequence[TokenEntry]) -> None:
        """Put these first, in this order. One that was there already moves."""
        tokens = {entry.token for entry in entries}
        lines = [line for line in self._read().splitlines() if _split(line)[0] not in tokens]
        first = next((number for number, line in enumerate(lines) if _split(line)[0]), len(lines))
        # A note of several lines would be several tokens.
        notes = ["".join(c if c.isprintable() else " " for c in entry.note)[:200] for entry in entries]
        added = [f"{e.token}  # {note}" if note else e.token for e, note in zip(entries, notes, strict=True)]
        self._write([*lines[:first], *added, *lines[first:]])

    def remove(self, token: str) -> None:
        self._write([line for line in self._read().splitlines() if _split(line)[0] != token])

    def _read(self) -> str:
        try:
            with self.path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                # Windows has no such bits; there the user's folder is private by its access list.
                if os.name == "posix" and mode & 0o077:
                    raise UserError(
                        f"others can read the token file {self.path} (mode {mode & 0o777:04o}); "
                        f"mend it with: chmod 600 {self.path}"
                    )
                raw = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise UserError(f"cannot read the token file {self.path}: {error.strerror}") from error
        try:
            if len(raw) > MAX_FILE_BYTES:
                raise ValueError("too large")
            return raw.decode("utf-8-sig")  # with the mark that some editors on Windows put first
        except ValueError:
            raise UserError(f"{self.path} is not a token file: it should have one token on each line") from None

    def _write(self, lines: list[str]) -> None:
        path = self.path.resolve()  # a link stays a link
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write("".join(line + "\n" for line in lines).encode())
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write the token file {self.path}: {error.strerror}; "
                "set SMOLCLUSTER_TOKEN_FILE to one that can be written"
            ) from error


def parse_tokens(text: str, *, where: str) -> list[TokenEntry]:
    """The tokens of a token file's text, each checked."""
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
    """$SMOLCLUSTER_TOKEN_FILE, else `token` in smolcluster's part of the user's configuration folder."""
    chosen = environ.get("SMOLCLUSTER_TOKEN_FILE")
    if chosen:
        return TokenFile(Path(chosen).expanduser())
    if sys.platform == "win32":
        folder = environ.get("APPDATA") or Path.home() / "AppData" / "Roaming"
    else:
        folder = environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return TokenFile(Path(folder) / "smolcluster" / "token")


def find_tokens(config_token: str | None, environ: Mapping[str, str]) -> tuple[str, list[TokenEntry]] | None:
    """Where this machine's tokens are, and what is there; None when it has none. One place is used, never a mixture.

    First SMOLCLUSTER_TOKEN, then `cluster.token`, then the token file. The first two may hold several tokens with
    spaces or commas between.
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
        raise UserError(
            f"SMOLCLUSTER_TOKEN_FILE: there is no token in {file.path}; make one with `smolcluster token new`"
        )
    return None


def load_keyring(config_token: str | None, environ: Mapping[str, str]) -> Keyring | None:
    """The tokens of this machine, found as `find_tokens` does; `config_token` is `cluster.token`."""
    found = find_tokens(config_token, environ)
    return None if found is None else Keyring((entry.token for entry in found[1]), source=found[0])


def check_bind(host: str, keyring: Keyring | None) -> None:
    """Without a token only this machine may connect."""
    if keyring is None and not is_loopback(host):
        raise UserError(
            f"listening on '{host}' lets other machines in, and there is no cluster token to tell ours from others; make one "
            "with `smolcluster token new` and give it to every machine (its token file, or SMOLCLUSTER_TOKEN), "
            "or listen on 127.0.0.1"
        )


def check_dial(address: str, keyring: Keyring | None) -> None:
    """Beyond this machine nobody answers one who has no token."""
    host = address.rpartition(":")[0].strip("[]")
    if keyring is None and not is_loopback(host):
        raise UserError(
            f"the server at {address} is another machine's and there is no cluster token here; take over the server's with "
            "`smolcluster token add`, or give it in SMOLCLUSTER_TOKEN"
        )
