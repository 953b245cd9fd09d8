"""Least squares in one dimension, where clipping the gradient of each example has a bias."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, Task


@validated
class ClippingToy(Task):
    """f(x) = Σ (x - a)² / 2 over the `centres` a, least at their mean.

    For `model=point` and a batch of all examples. Every output is x itself, so the gradient at an
    output is x - a, that of its example. `gradient` is f'(x), not clipped. After Chen, Wu and Hong,
    NeurIPS 2020 (arXiv 2006.15429).
    """

    centres: tuple[float, ...] = (-3.0, 3.0)
    start: Annotated[float, Field(allow_inf_nan=False)] = 1.5

    def load(self) -> Data:
        targets = torch.tensor(self.centres)[:, None]
        ones = torch.ones_like(targets)
        return Data(
            train_inputs=ones,
            train_targets=targets,
            test_inputs=ones.clone(),
            test_targets=targets.clone(),
            input_shape=(1,),
            num_outputs=1,
            start=(self.start,),
        )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum() / 2

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return {
            "loss": self.loss(outputs, targets).item(),
            "x": outputs.double().mean().item(),
            "gradient": (outputs - targets).double().sum().item(),
        }
