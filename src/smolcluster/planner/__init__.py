"""Forecasts for a set of machines; nothing is trained.

report.py           what `smolcluster plan` prints; memory_table.py: its table
candidates.py       the strategies that are considered
forecast.py         the memory that each needs
memory_estimate.py  the estimate of a rank: one step on fake tensors
fake_tensors.py, fake_group.py, estimate_pool.py    its parts
dry_run.py          `train --dry-run`
world_sizes.py      the same samples per step at several world sizes
"""
