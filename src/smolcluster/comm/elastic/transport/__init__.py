"""Typed frames over TCP and TLS.

api.py                  the interface: links that carry typed messages
tcp.py                  its implementation: asyncio on a separate thread, TLS 1.3
messages.py             the kinds of messages, the identity of a peer
frames.py, parser.py    messages as bytes, and back: every length is checked here
handshake.py            authentication of a new connection, as a state machine
security.py             cluster tokens, keys, certificate
connection.py           one connection: reading, writing, heartbeats; send_queue.py: what waits to be sent
pending_connections.py  accepted connections that are not yet authenticated
payloads.py, sockets.py helpers
"""
