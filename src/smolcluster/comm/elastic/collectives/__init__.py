"""Sums and copies between the members of a view, over the elastic transport.

group.py           the group: `all_reduce`, `broadcast` and others
schedule.py        plans of rings and trees: pure functions
operations.py      runs those plans
peers.py           links between workers, one group for each view
peer_links.py      the order of messages on those links, memory for received ones
packed_tensors.py  lists of tensors as encoded buckets
state_transfer.py  weights and optimizer state from one member to another
"""
