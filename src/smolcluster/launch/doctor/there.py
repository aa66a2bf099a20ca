"""A server somewhere, seen from here: name, route, firewall, port, token, in this order; the first that fails ends it."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator

from smolcluster.comm.addresses import is_loopback
from smolcluster.errors import SmolclusterError
from smolcluster.launch.doctor.layers import Finding, Layer, Verdict, remedy

ANSWER_S = 5.0
_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL}


def classify(error: OSError) -> Layer:
    """The layer that a failed connection failed in."""
    if isinstance(error, socket.gaierror):
        return Layer.NAME
    if isinstance(error, ConnectionRefusedError):
        return Layer.PORT
    if isinstance(error, TimeoutError):
        return Layer.FIREWALL
    return Layer.ROUTE if error.errno in _NO_ROUTE else Layer.PORT


def examine(host: str, port: int) -> Iterator[Finding]:
    place = f"{host}:{port}"
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError) as error:
        yield _bad(Layer.NAME, f"no machine is called {host} ({getattr(error, 'strerror', None) or error})")
        return
    yield Finding(layer=Layer.NAME, verdict=Verdict.GOOD, what=f"{host} is {', '.join(addresses)}")
    try:
        with socket.create_connection((host, port), timeout=ANSWER_S) as line:
            yield Finding(
                layer=Layer.ROUTE, verdict=Verdict.GOOD, what=f"from {line.getsockname()[0]} to {addresses[0]}"
            )
            yield Finding(layer=Layer.PORT, verdict=Verdict.GOOD, what=f"somebody listens at {place}")
            yield from _token(line, host)
    except OSError as error:
        layer = classify(error)
        words = "no answer in 5 s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        yield _bad(layer, f"{place}: {words}")


def _token(line: socket.socket, host: str) -> Iterator[Finding]:
    """Whether that server and this machine have a token in common: TLS itself tells."""
    try:
        from smolcluster.comm.elastic.security import load_keyring
    except ImportError:  # pragma: no cover
        yield _bad(Layer.TOKEN, "the package for tokens is missing", "pip install 'smolcluster[cluster]'")
        return
    try:
        keyring = load_keyring(None, os.environ)
    except SmolclusterError as error:
        yield _bad(Layer.TOKEN, str(error))
        return
    if keyring is None:
        verdict = Verdict.GOOD if is_loopback(host) else Verdict.BAD
        what = "no token here" + (", and none is needed on this machine" if is_loopback(host) else "")
        yield Finding(
            layer=Layer.TOKEN, verdict=verdict, what=what, remedy="" if is_loopback(host) else remedy(Layer.TOKEN)
        )
        return
    try:
        line.settimeout(ANSWER_S)
        with keyring.client_context().wrap_socket(line, server_hostname=keyring.server_name) as secure:
            keyring.check_certificate(secure.getpeercert(binary_form=True))
    except (ssl.SSLError, SmolclusterError, OSError) as error:
        words = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error)
        yield _bad(Layer.TOKEN, f"that server does not have the token {keyring.current.name} of this machine ({words})")
        return
    yield Finding(layer=Layer.TOKEN, verdict=Verdict.GOOD, what=f"both have {keyring.current.name}")


def _bad(layer: Layer, what: str, mend: str = "") -> Finding:
    return Finding(layer=layer, verdict=Verdict.BAD, what=what, remedy=mend or remedy(layer))
