"""Computation on one machine.

replica.py          a model, or this rank's part of one, on a device: forward, backward, apply
optim.py            optimizers, the learning-rate schedule
muon.py             the optimizer Muon; bare_optimizers.py: AdamW and SGD that import fast
precision.py        autocast, loss scale
buffers.py          running statistics, such as BatchNorm's
device.py           the device of a worker
memory.py           memory of a machine
memory_tracker.py   records allocations of tensors, for memory estimates
timing.py, rng.py   time spans; seeds from the position in the run
"""
