"""Who takes part: the roster, views, proofs, heartbeats, the link to the server."""
