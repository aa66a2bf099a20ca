"""Start the processes of a run.

prepare.py      sources, overrides and flags to a checked run
api.py          `smolcluster.train(...)`
local/          processes on this machine, supervised
environment.py  one rank that torchrun, Slurm or a user starts
restart/        `train --elastic`
join/           `join`, `worker`: a machine that joins a run
cluster/        `up`, `down`: many machines over ssh
batch/          Slurm, Kubernetes, Compose
doctor/         find the layer that fails, and its remedy
scaling.py, scaling_report.py    `bench scaling`
logstack.py     `logs up`: Grafana, Loki, Prometheus
"""
