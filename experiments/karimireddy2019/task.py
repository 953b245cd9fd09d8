"""The counter-examples of Karimireddy et al., ICML 2019 (arXiv 1901.09847), as tasks."""

from functools import lru_cache
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Chance, Data, Task
from gradsurg.tasks.data.arrays import Seed
from gradsurg.tasks.quadratics_toy import starting_at

TIMES = 4  # one example in four has the slope 4, the others -1
NUM_PRIVATE = 5  # coordinates that belong to a single example


@validated
class RareSlope(Task):
    """f = x / 4, as the mean of 4 x for one example in four and of -x for the others.

    Counter-example 1, where x is kept in [-1, 1]. It needs `model=boxed_point` and a batch size of
    1. Targets are the slopes, in an order that each epoch draws anew; exactly a quarter are 4.
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


@validated
class AbsoluteToy(Task):
    """f = epsilon |x1 + x2| + |x1 - x2|, least at (0, 0).

    Counter-example 2, which starts at (1, 1) with an epsilon below 1. The two entries of every
    subgradient have opposite signs, so a step by signs leaves x1 + x2 unchanged. At a tie the slope
    of |z| is taken to be +1; with torch's 0 the sign of the gradient could be 0.
    """

    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.5
    start: tuple[float, float] = (1.0, 1.0)

    def load(self) -> Data:
        return starting_at(self.start)

    def values(self, points: Tensor) -> Tensor:
        """Return f at each of the points (number, 2)."""
        x1, x2 = points.unbind(dim=1)
        return self.epsilon * _magnitude(x1 + x2) + _magnitude(x1 - x2)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.values(outputs).mean()

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        x1, x2 = outputs.mean(dim=0).tolist()
        return {"loss": self.loss(outputs, targets).item(), "x1": x1, "x2": x2}


def _magnitude(z: Tensor) -> Tensor:
    return torch.where(z >= 0, z, -z)


@validated
class Wilson(Task):
    """Predict labels of -1 and 1, equally likely, by least squares from misleading coordinates.

    Example i with label y is y, 1, 1, then zeros except for five coordinates that only it has. If y
    = 1 the first of these is 1, if y = -1 all five are. There are more weights than examples, so
    the solution depends on the method. Half of the examples are for the test. Section 3.3 of Wilson
    et al., NeurIPS 2017 (arXiv 1705.08292), used in section 5.2 of the paper. All depends on
    `data_seed` alone.
    """

    num_examples: Annotated[int, Field(ge=4)] = 200
    data_seed: Seed = 0

    def load(self) -> Data:
        return _wilson(self).copy()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        accuracy = (outputs * targets > 0).double().mean().item()
        return {"loss": self.loss(outputs, targets).item(), "accuracy": accuracy}

    def chance(self, targets: Tensor) -> Chance:
        most = max((targets > 0).double().mean().item(), (targets < 0).double().mean().item())
        variance = targets.double().var(correction=0).item()
        return Chance(variance, "accuracy", most, 1.0, "chance for 2 classes is")


@lru_cache(maxsize=2)
def _wilson(task: Wilson) -> Data:
    count = task.num_examples
    labels = np.random.default_rng(task.data_seed).choice([-1.0, 1.0], size=count)
    inputs = np.zeros((count, 3 + NUM_PRIVATE * count), dtype=np.float32)
    inputs[:, 0], inputs[:, 1:3] = labels, 1
    for example, label in enumerate(labels):
        first = 3 + NUM_PRIVATE * example
        inputs[example, first : first + (1 if label > 0 else NUM_PRIVATE)] = 1
    examples, targets = torch.from_numpy(inputs), torch.from_numpy(labels[:, None]).float()
    half = count // 2
    return Data(
        train_inputs=examples[:half],
        train_targets=targets[:half],
        test_inputs=examples[half:],
        test_targets=targets[half:],
        input_shape=(inputs.shape[1],),
        num_outputs=1,
    )
