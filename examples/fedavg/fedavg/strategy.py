"""Federated averaging: after every `local_steps` steps all workers go on from the mean of their weights.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017.
"""

from smolcluster.config.options import LocalStepOptions
from smolcluster.strategies.local_steps import LocalSteps


class FedAvg(LocalSteps[LocalStepOptions]):
    def update(self) -> None:
        """The mean of (anchor - weights) leads from the anchor to the mean of the weights."""
        for parameter in self.replica.parameters:
            if parameter.grad is not None:
                parameter -= parameter.grad
