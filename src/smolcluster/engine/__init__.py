"""Runs a training process: reads samples, calls the strategy, evaluates, reports, saves.

loop.py            the training loop
role.py            base of every process of a run: log, observer, task, checkpoints
worker.py          a rank of the mesh plane; elastic/: server and workers of the elastic plane
process/           entry points of these processes
checkpoint/        what is saved, and how it becomes durable
reader.py          the samples of a step
evaluate.py        metrics on the validation set; best.py: the best checkpoint
record.py          metric rows and the final report; step_clock.py: times of steps
summary.py         summary.json; profiler.py: `--profile`
run_dir.py         the run directory; run_length.py: the number of steps
spec.py, channel.py, identity.py    the specification of a process, its control channel, its identity
checks.py, trial.py, link_preset.py    before step 1, and for finite weights at the end
"""
