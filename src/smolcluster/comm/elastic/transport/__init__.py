"""Typed frames over TCP and TLS: handshake, framing, connections."""
