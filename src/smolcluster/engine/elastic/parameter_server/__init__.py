"""A parameter server and the rounds of its workers.

base.py           checks, averages, records and applies pushed gradients
synchronous.py    the server of `syncps`
asynchronous.py   the server of `edp`
pushed_rounds.py  a worker's rounds: push, then apply what the server sends
"""
