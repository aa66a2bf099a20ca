"""The members of a run: which are connected, alive, and can reach each other.

roster.py           the server's list of members; pauses the silent ones, removes those whose link ended
server_link.py      a worker's link to its server; reconnects
mailbox.py          callbacks of the transport as a queue of events
eviction_policy.py  which member to evict when two of them cannot reach each other
pairwise_keys.py    keys by which two workers authenticate to each other
received_state.py   the state for a joining worker: sent in slices, received
link_probe.py       speed of the link to the server
"""
