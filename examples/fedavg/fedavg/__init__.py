"""The record of `fedavg`: what launchers and the configuration know of it. Nothing here imports torch."""

from smolcluster.config.options import LocalStepOptions
from smolcluster.config.strategies import Record

RECORD = Record(
    name="fedavg",
    algorithm="FedAvg",
    summary="workers train independently and average their weights every local_steps steps",
    where={"mesh": "fedavg.strategy:FedAvg", "elastic": "fedavg.strategy:FedAvg"},
    options=LocalStepOptions,
    use_when="the network is too slow to exchange every step",
)
