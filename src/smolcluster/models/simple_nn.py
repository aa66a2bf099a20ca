"""A two-layer classifier: the smallest model worth training on more than one machine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SimpleNN(nn.Module):
    """flatten -> Linear -> ReLU -> Linear. The default is 784-128-10: MNIST, 101,770 parameters."""

    def __init__(self, *, input_dim: int = 784, hidden: int = 128, out: int = 10) -> None:
        super().__init__()
        for name, value in (("input_dim", input_dim), ("hidden", hidden), ("out", out)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        self.input_dim = input_dim
        self.hidden = nn.Linear(input_dim, hidden)
        self.out = nn.Linear(hidden, out)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, out). Each sample may have any shape with `input_dim` elements."""
        flat = images.flatten(1)
        if flat.size(1) != self.input_dim:
            found = f"a sample of shape {tuple(images.shape[1:])} holds {flat.size(1)} numbers"
            raise ValueError(f"{found}, the model takes {self.input_dim}: set input_dim to match")
        logits: Tensor = self.out(torch.relu(self.hidden(flat)))
        return logits

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy, in fp32."""
        return F.cross_entropy(self(images).float(), labels)
