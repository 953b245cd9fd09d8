"""A trunk whose features are returned beside the outputs of a linear head."""

import torch
from torch import Tensor, nn


class WithFeatures(nn.Module):
    """An MLP of one hidden layer, `width` tanh features, and a linear head.

    Returns (n, num_outputs + width): the head's outputs, then the features.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        hidden: int = 64,
        width: int = 8,
    ) -> None:
        super().__init__()
        size = torch.Size(input_shape).numel()
        layers = [nn.Flatten(), nn.Linear(size, hidden), nn.ReLU()]
        self.trunk = nn.Sequential(*layers, nn.Linear(hidden, width), nn.Tanh())
        self.head = nn.Linear(width, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.trunk(inputs)
        return torch.cat([self.head(features), features], dim=1)
