"""A slope that is mostly seen the wrong way round: the sign of a gradient against its mean."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, Task

TIMES = 4  # one example in so many has the slope of this size up, the others have 1 down


@validated
class RareSlope(Task):
    """f = x / 4, seen as 4 x by one example in four and as -x by the others.

    Counter-example 1 of Karimireddy et al., ICML 2019 (arXiv 1901.09847), where x is kept in
    [-1, 1]: for `model=boxed_point` and a batch size of 1. Targets are the slopes, in an order
    that each epoch draws anew; the share is exactly a quarter of the examples.
    """

    num_quarter: Annotated[int, Field(ge=1)] = 1024
    start: float = 0.0

    def load(self) -> Data:
        slopes = torch.full((TIMES * self.num_quarter, 1), -1.0)
        slopes[: self.num_quarter] = TIMES
        ones = torch.ones_like(slopes)
        return Data(
            train_inputs=ones,
            train_targets=slopes,
            test_inputs=ones.clone(),
            test_targets=slopes.clone(),
            input_shape=(1,),
            num_outputs=1,
            start=(self.start,),
        )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets).mean()

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        x = outputs.double().mean().item()
        return {"loss": x * targets.double().mean().item(), "x": x}
