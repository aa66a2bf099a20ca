"""Federated averaging: after every `local_steps` steps all workers go on from the mean of their weights.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017.
"""

import torch
from torch import nn

from smolcluster.config.options import LocalStepOptions
from smolcluster.strategies.base.local_steps import LocalSteps


class FedAvg(LocalSteps[LocalStepOptions]):
    def outer_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """At rate 1 the mean of (old weights - new weights) leads from the old weights to the mean of the new ones."""
        return torch.optim.SGD(parameters, lr=1.0)
