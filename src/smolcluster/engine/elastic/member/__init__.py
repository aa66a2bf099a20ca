"""A worker's side of the membership, and of the rounds that a coordinator commits.

member_side.py    joins, rejoins and leaves; also the base of the rounds of a parameter server
rounds.py         views, leases and the agreement on each round
alone.py          training without a link to the coordinator
busy_time.py      what a step costs the worker's CPU besides computing
own_state.py      local state of the worker, on its disk
"""
