"""Tokens, keys derived from them, authentication over real TLS on loopback, token files."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.places import eventually

from smolcluster.comm.elastic.transport import security
from smolcluster.comm.elastic.transport.security import (
    MAX_TOKENS,
    PREFIX,
    TOKEN_LENGTH,
    Credentials,
    Keyring,
    NoToken,
    TokenEntry,
    TokenFile,
    TokenRefused,
    check_bind,
    explain,
    find_tokens,
    is_permanent,
    load_keyring,
    new_token,
    read_secret,
    token_file,
)
from smolcluster.errors import MissingExtra, UserError

# The secret 00 01 02 ... 1f. What is derived from it must never change, or machines with unlike versions do not meet.
FIXED = "smol1_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh_U8hNU"
FIXED_CLUSTER = "8969752e388f07c9"
FIXED_FINGERPRINT = "85debe0ded8a99988c5d42d5a62a0841e1257c7d760104577c92e337a922e438"
FIXED_PROOF = "15e49efe9822ca5ccbb964ee45834ab2e95af750e8718ec6b58335bbc2c05998"

posix = pytest.mark.skipif(os.name != "posix", reason="file modes")


# Two ends of a connection


def shake(
    server: ssl.SSLContext, client: ssl.SSLContext, *, name: str | None, session: ssl.SSLSession | None = None
) -> tuple[Any, Any]:
    """A handshake and one byte from the server; for each end what it saw, or the error it got."""
    shown: list[Any] = []

    def serve(listener: socket.socket) -> None:
        raw, _ = listener.accept()
        raw.settimeout(300)
        with raw:
            try:
                with server.wrap_socket(raw, server_side=True) as connection:
                    connection.sendall(b"!")
                    shown.append({"der": connection.getpeercert(binary_form=True)})
            except (ssl.SSLError, ConnectionError) as error:
                shown.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        seen: Any
        with socket.create_connection(listener.getsockname(), timeout=300) as raw:
            try:
                with client.wrap_socket(raw, server_hostname=name, session=session) as connection:
                    assert connection.recv(1) == b"!"  # in TLS 1.3 a client learns only now that it was refused
                    seen = {"der": connection.getpeercert(binary_form=True), "version": connection.version()}
                    seen |= {"session": connection.session, "reused": connection.session_reused}
            except (ssl.SSLError, ConnectionError) as error:
                seen = error
        thread.join(300)
    return shown[0], seen


# Tokens


def test_a_token_is_long_random_and_fits_on_a_line() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    for token in tokens:
        assert token.startswith(PREFIX)
        assert len(token) == TOKEN_LENGTH == 54
        assert len(read_secret(token)) == 32


def test_every_single_typing_mistake_is_seen_and_the_token_never_repeated() -> None:
    for place in range(len(PREFIX), TOKEN_LENGTH):
        for letter in "AZaz09-_":
            if letter == FIXED[place]:
                continue
            with pytest.raises(UserError, match="typing mistake") as caught:
                Credentials(FIXED[:place] + letter + FIXED[place + 1 :])
            assert FIXED[8:20] not in str(caught.value)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "not a cluster token"),
        ("correct horse battery staple", "not a cluster token"),
        (f'"{FIXED}"', "not a cluster token"),
        (FIXED.upper(), "not a cluster token"),
        (FIXED[:-1], "53 characters instead of 54"),
        (FIXED + "=", "55 characters instead of 54"),
        (FIXED[:10] + "+" + FIXED[11:], "character 11 of the token"),
        (FIXED[:10] + "\n" + FIXED[11:], "character 11 of the token"),
        (FIXED[:10] + "é" + FIXED[11:], "character 11 of the token"),
        (FIXED[:10] + FIXED[11] + FIXED[10] + FIXED[12:], "typing mistake"),
    ],
)
def test_an_invalid_token_is_reported_with_its_source(token: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Keyring([token], source="SMOLCLUSTER_TOKEN")
    assert str(caught.value).startswith("SMOLCLUSTER_TOKEN: ")
    assert FIXED[12:24] not in str(caught.value)


# What is derived


def test_what_is_derived_never_changes() -> None:
    known = Credentials(FIXED)
    assert read_secret(FIXED) == bytes(range(32))
    assert known.name == known.cluster.hex() == FIXED_CLUSTER
    assert known.fingerprint.hex() == FIXED_FINGERPRINT
    assert known.prove("client", mine=b"a" * 32, theirs=b"b" * 32).hex() == FIXED_PROOF


def test_key_derivation_is_that_of_the_standard() -> None:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = bytes(range(32))
    expected = HKDF(SHA256(), length=32, salt=b"smolcluster", info=b"cluster id").derive(secret)
    assert Credentials(FIXED).cluster == expected[:8]


def test_the_certificate_is_a_sound_one_and_good_at_any_time() -> None:
    from cryptography import x509

    certificate = x509.load_der_x509_certificate(Credentials(FIXED).certificate)
    certificate.verify_directly_issued_by(certificate)
    assert certificate.subject.rfc4514_string() == f"CN={FIXED_CLUSTER}.smolcluster"
    assert certificate.not_valid_before_utc.year < 1970
    assert certificate.not_valid_after_utc.year == 9999


def test_a_proof_is_good_for_one_token_role_and_pair_of_nonces() -> None:
    known, stranger = Credentials(FIXED), Credentials(new_token())
    a, b, c = b"a" * 32, b"b" * 32, b"c" * 32
    proof = known.prove("client", mine=a, theirs=b)
    assert known.verify(proof, role="client", mine=b, theirs=a)
    assert not known.verify(proof, role="server", mine=b, theirs=a)  # sent back where it came from
    assert not known.verify(proof, role="server", mine=a, theirs=b)
    assert not known.verify(proof, role="client", mine=a, theirs=b)
    assert not known.verify(proof, role="client", mine=c, theirs=a)  # replayed to a new nonce
    assert not known.verify(proof, role="client", mine=b, theirs=c)
    assert not known.verify(proof[:-1], role="client", mine=b, theirs=a)
    assert not known.verify(b"", role="client", mine=b, theirs=a)
    assert not known.verify(stranger.prove("client", mine=a, theirs=b), role="client", mine=b, theirs=a)
    # Bytes cannot wander from one nonce to the other.
    assert known.prove("client", mine=b"xy", theirs=b"z") != known.prove("client", mine=b"x", theirs=b"yz")
    with pytest.raises(ValueError, match="role"):
        known.prove("worker", mine=a, theirs=b)


def test_a_proof_is_bound_to_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    known, elsewhere = Credentials(FIXED), Credentials(FIXED)
    monkeypatch.setitem(elsewhere.__dict__, "fingerprint", bytes(32))
    a, b = b"a" * 32, b"b" * 32
    assert not known.verify(elsewhere.prove("client", mine=a, theirs=b), role="client", mine=b, theirs=a)


def test_without_a_token_the_handshake_is_the_same_and_proves_nothing() -> None:
    one, other = NoToken(), NoToken()
    assert one.cluster == bytes(8)
    assert one.fingerprint == bytes(32)
    proof = one.prove("client", mine=b"a", theirs=b"b")
    assert other.verify(proof, role="client", mine=b"b", theirs=b"a")
    with pytest.raises(RuntimeError, match="TLS needs a token"):
        one.server_context()


def test_no_secret_is_ever_shown(caplog: pytest.LogCaptureFixture) -> None:
    ring = Keyring([FIXED, new_token()])
    known = ring.current
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("smolcluster").info("%s %r %s", ring, known, TokenEntry(FIXED, "note"))
        with pytest.raises(TokenRefused) as caught:
            ring.check_certificate(b"something else")
    shown = " ".join([repr(ring), str(ring), f"{known}", repr(known), str(caught.value), caplog.text])
    assert known.name in shown
    for hidden in (FIXED[len(PREFIX) : -6], known._proof_key.hex(), known._key_seed.hex(), repr(known._proof_key)):
        assert hidden not in shown


# Over TLS


def test_two_machines_with_the_same_token_meet_over_tls_13() -> None:
    server, client = Keyring([FIXED]), Keyring([FIXED])
    shown, seen = shake(server.server_context(), client.current.client_context(), name=client.current.server_name)
    assert seen["version"] == "TLSv1.3"
    assert client.check_certificate(seen["der"]) is client.current
    assert server.check_certificate(shown["der"]) is server.current


def test_a_wrong_token_is_refused_and_both_ends_know_why() -> None:
    server, client = Keyring([new_token()]), Keyring([new_token()])
    refused, told = shake(server.server_context(), client.current.client_context(), name=client.current.server_name)
    assert explain(refused) == explain(told) == "the peer does not have our token"
    assert is_permanent(refused)
    assert is_permanent(told)


@pytest.mark.parametrize("name", [None, "localhost", "smolcluster", f"{FIXED_CLUSTER}", f"{FIXED_CLUSTER}.example.org"])
def test_a_client_without_a_token_name_sees_no_certificate(name: str | None) -> None:
    refused, told = shake(Keyring([FIXED]).server_context(), without_token(), name=name)
    assert explain(refused) == "the peer sent no token name"
    assert told.reason == "TLSV1_UNRECOGNIZED_NAME"


def without_token() -> ssl.SSLContext:
    """A client that believes whatever it is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.mark.parametrize("name", [f"{FIXED_CLUSTER}.smolcluster", "0000000000000000.smolcluster"])
def test_nobody_gets_past_tls_without_the_tokens_key(name: str) -> None:
    # The public id is there to be read on the wire. With it, or with a guess: no certificate, then one of the same name.
    server, forger = Keyring([FIXED]).server_context(), Credentials(new_token())
    forger.cluster = Credentials(FIXED).cluster
    forged = forger.client_context()
    forged.verify_mode = ssl.CERT_NONE
    for client, reason in ((without_token(), "has no token"), (forged, "does not have our token")):
        refused, told = shake(server, client, name=name)
        assert explain(refused) == f"the peer {reason}"
        assert isinstance(told, ssl.SSLError | ConnectionError)


def test_somebody_in_between_is_refused() -> None:
    client = Keyring([FIXED])
    # Knows the public id, from the wire, and makes a certificate with that name and another key.
    between = Credentials(new_token())
    between.cluster = client.current.cluster
    assert between.certificate != client.current.certificate
    refused, told = shake(between.server_context(), client.current.client_context(), name=client.current.server_name)
    assert explain(told) == "the peer does not have our token"
    assert isinstance(refused, ssl.SSLError)
    with pytest.raises(TokenRefused, match="belongs to none of our tokens"):
        client.check_certificate(between.certificate)
    with pytest.raises(TokenRefused, match="none"):
        client.check_certificate(None)


def test_a_certificate_that_the_operating_system_trusts_is_still_refused() -> None:
    assert [c for c in Credentials(FIXED).client_context().get_ca_certs() if FIXED_CLUSTER not in str(c)] == []


def test_tls_12_is_refused_both_ways() -> None:
    ring = Keyring([FIXED])
    old_client, old_server = ring.current.client_context(), ring.current.server_context()
    for old in (old_client, old_server):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    refused, told = shake(ring.server_context(), old_client, name=ring.current.server_name)
    assert explain(refused) == explain(told) == "the peer does not speak TLS 1.3"
    refused, told = shake(old_server, ring.current.client_context(), name=ring.current.server_name)
    assert explain(refused) == explain(told) == "the peer does not speak TLS 1.3"


def test_a_session_cannot_be_resumed() -> None:
    ring = Keyring([FIXED])
    server, client = ring.server_context(), ring.current.client_context()
    _, first = shake(server, client, name=ring.current.server_name)
    assert not first["session"].has_ticket
    _, second = shake(server, client, name=ring.current.server_name, session=first["session"])
    assert not second["reused"]


@pytest.mark.parametrize(
    ("spoken", "reason"), [(b"SMOL\0\0\0\1hello", "does not speak TLS"), (b"GET / HTTP/1.1\r\n\r\n", "speaks HTTP")]
)
def test_a_peer_without_tls_is_named_as_such(spoken: bytes, reason: str) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(spoken)
        with pytest.raises(ssl.SSLError) as caught:
            Keyring([FIXED]).server_context().wrap_socket(here, server_side=True)
    assert reason in explain(caught.value)
    assert is_permanent(caught.value)


def test_an_error_without_a_sentence_of_ours_keeps_its_reason_and_may_pass() -> None:
    assert explain(ssl.SSLError(1, "odd")) == "TLS failed: odd"
    assert not is_permanent(ssl.SSLError(1, "odd"))
    assert is_permanent(ssl.SSLCertVerificationError(1, "odd"))


# More than one token


def test_a_keyring_finds_by_public_id_and_holds_each_token_once() -> None:
    other = new_token()
    ring = Keyring([FIXED, other, FIXED])
    assert [known.name for known in ring.credentials] == [FIXED_CLUSTER, Credentials(other).name]
    assert ring.find(Credentials(other).cluster) is ring.credentials[1]
    assert ring.find(bytes(8)) is None
    assert ring.current.server_name == f"{FIXED_CLUSTER}.smolcluster"


def test_a_keyring_has_one_to_eight_tokens() -> None:
    tokens = [new_token() for _ in range(MAX_TOKENS)]
    assert len(Keyring(tokens).credentials) == MAX_TOKENS
    with pytest.raises(UserError, match="contains 9 tokens, at most 8 are allowed"):
        Keyring([*tokens, new_token()])
    with pytest.raises(UserError, match="contains no token"):
        Keyring([])


# The key's moment on the disk


@posix
def test_the_private_key_is_on_the_disk_for_a_moment_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[Path] = []

    load = ssl.SSLContext.load_cert_chain

    def watched(context: ssl.SSLContext, path: Path, **options: Any) -> None:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"BEGIN ENCRYPTED PRIVATE KEY" in path.read_bytes()
        assert b"BEGIN PRIVATE KEY" not in path.read_bytes()
        seen.append(path)
        load(context, path, **options)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    old = os.umask(0)
    try:
        Keyring([FIXED]).server_context()
    finally:
        os.umask(old)
    assert len(seen) == 2  # the token's, and that for strangers
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    ring = Keyring([new_token()])
    assert len(ring.current.cluster) == 8  # the id needs nothing
    for use in (ring.server_context, ring.current.client_context, lambda: ring.current.fingerprint):
        with pytest.raises(MissingExtra, match=r"pip install 'smolcluster\[cluster\]'"):
            use()
    assert NoToken().prove("client", mine=b"a", theirs=b"b")


def test_neither_torch_nor_cryptography_is_imported_for_it() -> None:
    code = (
        "import sys, smolcluster.comm.elastic.transport.security; print({'torch', 'cryptography'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert ended.stdout == "set()\n"


# Where tokens are kept


def test_the_order_of_places(tmp_path: Path) -> None:
    ours, configured, kept = new_token(), new_token(), new_token()
    environ = {"SMOLCLUSTER_TOKEN_FILE": str(tmp_path / "token")}
    TokenFile(tmp_path / "token").add([TokenEntry(kept)])
    for config_token, more, expected, source in (
        (configured, {"SMOLCLUSTER_TOKEN": ours}, ours, "SMOLCLUSTER_TOKEN"),
        (configured, {"SMOLCLUSTER_TOKEN": " \n"}, configured, "cluster.token"),
        (configured, {}, configured, "cluster.token"),
        (None, {}, kept, str(tmp_path / "token")),
    ):
        ring = load_keyring(config_token, environ | more)
        assert [known.name for known in ring.credentials] == [Credentials(expected).name]
        assert ring.source == source
    assert load_keyring(None, {"XDG_CONFIG_HOME": str(tmp_path), "APPDATA": str(tmp_path)}) is None


def test_a_variable_may_hold_several_tokens() -> None:
    one, other = new_token(), new_token()
    for between in (",", " ", "\n", ", "):
        found = find_tokens(None, {"SMOLCLUSTER_TOKEN": f"{one}{between}{other}\n"})
        assert [entry.token for entry in found[1]] == [one, other]
    with pytest.raises(UserError, match=r"^cluster\.token: "):
        load_keyring("hunter2", {})


def test_the_file_is_in_the_users_configuration_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert token_file({"SMOLCLUSTER_TOKEN_FILE": str(tmp_path / "x")}).path == tmp_path / "x"
    monkeypatch.setattr(sys, "platform", "linux")
    assert token_file({}).path == tmp_path / ".config" / "smolcluster" / "token"
    assert token_file({"XDG_CONFIG_HOME": str(tmp_path / "c")}).path == tmp_path / "c" / "smolcluster" / "token"
    monkeypatch.setattr(sys, "platform", "win32")
    assert token_file({}).path == tmp_path / "AppData" / "Roaming" / "smolcluster" / "token"
    assert token_file({"APPDATA": str(tmp_path / "r")}).path == tmp_path / "r" / "smolcluster" / "token"


def test_a_file_that_was_named_must_have_a_token(tmp_path: Path) -> None:
    environ = {"SMOLCLUSTER_TOKEN_FILE": str(tmp_path / "token")}
    with pytest.raises(UserError, match=r"SMOLCLUSTER_TOKEN_FILE: .* contains no token"):
        load_keyring(None, environ)


def written(path: Path, text: str | bytes, *, mode: int = 0o600) -> TokenFile:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return TokenFile(path)


def test_lines_comments_and_notes(tmp_path: Path) -> None:
    other = new_token()
    file = written(tmp_path / "token", f"\ufeff# ours\r\n\r\n  {FIXED}  # home # lab\r\n{other}\r\n{FIXED}\r\n")
    assert [(entry.token, entry.note) for entry in file.entries()] == [(FIXED, "home # lab"), (other, "")]


@posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644, 0o666])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = written(tmp_path / "token", FIXED, mode=mode)
    with pytest.raises(UserError, match=rf"mode {mode:04o}\); restrict it with: chmod 600 {file.path}"):
        file.entries()
    with pytest.raises(UserError, match="chmod 600"):
        file.add([TokenEntry(new_token())])
    assert file.path.read_text() == FIXED


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"# one\n{FIXED[:-1]}x\n", "line 2: the token has a typing mistake"),
        (b"\xff\xfe\x00", "not a token file"),
        (b"#" * (1 << 17), "not a token file"),
    ],
)
def test_a_damaged_file_is_told_and_left_alone(tmp_path: Path, content: str | bytes, message: str) -> None:
    file = written(tmp_path / "token", content)
    before = file.path.read_bytes()
    with pytest.raises(UserError, match=message):
        file.entries()
    assert file.path.read_bytes() == before


def test_a_folder_is_no_token_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the token file"):
        TokenFile(tmp_path).entries()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="SMOLCLUSTER_TOKEN_FILE"):
        TokenFile(blocked / "token")._write([FIXED])


def test_changes_leave_the_other_lines_alone(tmp_path: Path) -> None:
    one, other = new_token(), new_token()
    file = written(tmp_path / "token", f"# ours\n{FIXED}  # first\n# more\n{one}\n")
    file.add([TokenEntry(other, "new"), TokenEntry(one)])
    assert file.path.read_text() == f"# ours\n{other}  # new\n{one}\n{FIXED}  # first\n# more\n"
    file.remove(one)
    assert file.path.read_text() == f"# ours\n{other}  # new\n{FIXED}  # first\n# more\n"


@posix
def test_what_is_written_is_private_whatever_the_umask(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "smolcluster" / "token")
    old = os.umask(0)
    try:
        file.add([TokenEntry(FIXED)])
        file.add([TokenEntry(new_token())])
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.path.parent.iterdir()] == ["token"]


@posix
def test_a_link_stays_a_link(tmp_path: Path) -> None:
    written(tmp_path / "real", FIXED)
    (tmp_path / "token").symlink_to(tmp_path / "real")
    TokenFile(tmp_path / "token").add([TokenEntry(new_token())])
    assert (tmp_path / "token").is_symlink()
    assert len(TokenFile(tmp_path / "real").entries()) == 2


# Listening


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    check_bind(host, None)
    check_bind(host, Keyring([FIXED]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.10", "fe80::1", "mini1", "localhost.example.org"])
def test_any_other_address_needs_one(host: str) -> None:
    with pytest.raises(UserError, match="smolcluster token new") as caught:
        check_bind(host, None)
    assert "SMOLCLUSTER_TOKEN" in str(caught.value)
    assert f"'{host}'" in str(caught.value)
    check_bind(host, Keyring([FIXED]))


def test_another_machine_is_dialled_only_with_a_token() -> None:
    security.check_dial("127.0.0.1:1", None)
    security.check_dial("[::1]:1", None)
    security.check_dial("10.0.0.1:1", security.Keyring([security.new_token()], source="test"))
    with pytest.raises(UserError, match="token add"):
        security.check_dial("10.0.0.1:65432", None)


# Keys of pages


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_browser_is_opened_without_the_key_in_its_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every user of the machine sees the arguments of every process. A browser that is a snap sees nothing of /tmp, and of its
    user's home only what is not hidden."""
    import queue
    import tempfile
    import webbrowser

    from smolcluster.web import server

    home, elsewhere = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    elsewhere.mkdir()
    opened: queue.Queue[str] = queue.Queue()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.setattr(webbrowser, "open", opened.put)

    def page_of(url: str) -> Path:
        server.open_browser(url)
        return Path(opened.get(timeout=300).removeprefix("file://"))

    page = page_of("http://127.0.0.1:5050/#key=topsecret")
    assert not any(part.startswith(".") for part in page.relative_to(home).parts)
    assert "topsecret" not in str(page)
    assert 'content="0;url=http://127.0.0.1:5050/#key=topsecret"' in page.read_text()
    assert (page.stat().st_mode & 0o777, page.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    server.open_browser("http://127.0.0.1:5050/")
    assert opened.get(timeout=300) == "http://127.0.0.1:5050/"
    home.rename(tmp_path / "gone")
    assert page_of("http://127.0.0.1:5050/#key=topsecret").is_relative_to(elsewhere)


def test_the_page_with_the_key_is_soon_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import webbrowser

    from smolcluster.web import server

    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(server, "_OPEN_S", 0.05)
    read = threading.Event()
    monkeypatch.setattr(webbrowser, "open", lambda _: read.set())
    server.open_browser("http://127.0.0.1:5050/#key=topsecret")
    assert read.wait(300)
    eventually(lambda: list(tmp_path.iterdir()) == [])


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_folders_of_runs_and_logs_are_their_owners_alone(tmp_path: Path) -> None:
    from smolcluster.engine.run_dir import RunDir
    from smolcluster.observe.logs import reset_logging, setup_logging

    before = os.umask(0o022)
    try:
        with RunDir(tmp_path / "runs" / "one").opened("a: 1\n", resume=False):
            pass
        setup_logging(tmp_path / "logs" / "worker.log", level="INFO", role="worker", rank=0, host="here")
    finally:
        reset_logging()
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("runs/one", "logs")] == [0o700, 0o700]


# Words of others


def test_a_note_of_several_lines_adds_no_tokens(tmp_path: Path) -> None:
    """The name of a cluster that a machine joins becomes the note of its token."""
    file = TokenFile(tmp_path / "token")
    mine, theirs = new_token(), new_token()
    file.add([TokenEntry(mine, note=f"of home\n{theirs}\r{theirs}\u2028{theirs}\x1b[2J")])
    assert [entry.token for entry in file.entries()] == [mine]


HOSTILE = "evil\x1b]0;title\x07\x1b[2J\u202e\x9b31m"


def test_what_others_say_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from smolcluster.cli.doctor import report
    from smolcluster.cli.screen import print_line, print_note, print_text
    from smolcluster.launch.doctor.layers import Finding, Verdict

    print_text(HOSTILE)
    print_text(HOSTILE, err=True)
    print_note("pi5", HOSTILE)
    print_line("pi5", "worker-0", HOSTILE)
    report([Finding(host="pi5", layer="login", verdict=Verdict.BAD, what=HOSTILE, remedy=HOSTILE)], as_json=False)
    shown = "".join(capsys.readouterr())
    assert shown.count("evil") == 6
    assert all(c in "\n\t" or c.isprintable() for c in shown)


@pytest.mark.parametrize("command", ["status", "logs", "token list"])
def test_commands_print_no_control_characters_of_peers(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Last lines of processes, problems of machines, notes of tokens."""
    from smolcluster.cli import main

    async def found(_: object) -> dict[str, Any]:
        process = {"state": "running", "host": "pi5", "last": HOSTILE}
        return {"name": "lab", "run": "one", "run_directory": "x", "processes": {"w": process}, "unreachable": {}}

    async def shown(*_: object, **__: object) -> list[str]:
        return [HOSTILE]

    known = SimpleNamespace(hosts={}, machines={})
    monkeypatch.setattr("smolcluster.launch.cluster.request.known_cluster", lambda _: known)
    monkeypatch.setattr(importlib.import_module("smolcluster.cli.status"), "_status", found)
    monkeypatch.setattr(importlib.import_module("smolcluster.cli.logs"), "_show", shown)
    (tmp_path / "token").write_text(f"{new_token()}  # {HOSTILE}\n", encoding="utf-8")
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("SMOLCLUSTER_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(SystemExit):
        main(command.split())
    text = "".join(capsys.readouterr())
    assert "evil" in text
    assert all(c in "\n\t" or c.isprintable() for c in text)
