"""Wilson: more weights than examples, where it shows which solution a method finds."""

from functools import lru_cache
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks._generated import Seed
from gradsurg.tasks.base import Chance, Data, Task

OWN = 5  # coordinates that belong to one example alone


@validated
class Wilson(Task):
    """Tell labels of -1 and 1, each as likely, by least squares from coordinates that mislead.

    The example i with label y is y, 1, 1, then zeros but for the five coordinates that are its own:
    the first is 1 if y = 1, all of them if y = -1. Half of the examples are for the test. Section
    3.3 of Wilson et al., NeurIPS 2017 (arXiv 1705.08292), as taken up by Karimireddy et al., ICML
    2019 (arXiv 1901.09847), section 5.2. All depends on `data_seed` alone.
    """

    num_examples: Annotated[int, Field(ge=4)] = 200
    data_seed: Seed = 0

    def load(self) -> Data:
        return _data(self).copy()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        right = (outputs * targets > 0).double().mean().item()
        return {"loss": self.loss(outputs, targets).item(), "accuracy": right}

    def chance(self, targets: Tensor) -> Chance:
        most = max((targets > 0).double().mean().item(), (targets < 0).double().mean().item())
        spread = targets.double().var(correction=0).item()
        return Chance(spread, "accuracy", most, 1.0, "chance for 2 classes is")


@lru_cache(maxsize=2)
def _data(task: Wilson) -> Data:
    count = task.num_examples
    labels = np.random.default_rng(task.data_seed).choice([-1.0, 1.0], size=count)
    inputs = np.zeros((count, 3 + OWN * count), dtype=np.float32)
    inputs[:, 0], inputs[:, 1:3] = labels, 1
    for example, label in enumerate(labels):
        first = 3 + OWN * example
        inputs[example, first : first + (1 if label > 0 else OWN)] = 1
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
