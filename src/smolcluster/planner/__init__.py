"""Forecasts for a set of machines; nothing is trained.

report.py           the result of `smolcluster plan`; memory_table.py: printed
candidates.py       the strategies that are considered
forecast.py         the memory of each strategy
memory_estimate.py  the estimate of a rank: one step on fake tensors
fake_tensors.py, fake_group.py    used by it; estimate_pool.py: several estimates in parallel
dry_run.py          `train --dry-run`
world_sizes.py      the same samples per step at several world sizes
"""
