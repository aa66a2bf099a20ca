"""The coordinator: it agrees with workers on members and rounds, and trains no weights.

coordinator.py    members, views, commits
results.py        checks what members report of a round
round_numbers.py  round boundaries
local_rounds.py   steps and deadline of rounds with local steps
late_members.py   members that missed the deadline of a round
evictions.py      members that others cannot reach
followers.py      joining members that receive the state during training; rejoining.py: those that still hold it
state_upload.py   the state, requested from workers; held_state.py: the last that was received
"""
