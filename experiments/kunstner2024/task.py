"""Clusters whose classes have frequencies of 1 / k, for the convergence of the training loss."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Classification, Data
from gradsurg.tasks.data.arrays import Count, Seed


@validated
class LongTail(Classification):
    """Classify points of `num_classes` Gaussian clusters, class k as often as 1 / k^`tail`.

    The centres are Gaussian with an expected square of 1. Around them the points have `spread`
    times the centres' deviation. `tail` 0 makes the classes equally likely. The
    question is about optimization, so the test examples are the training examples. `loss_rare` and
    `loss_common` are the mean losses of the half of the examples whose classes are less frequent,
    and of the other half. A synthetic set after Kunstner et al., NeurIPS 2024 (arXiv
    2402.19449); everything depends on `data_seed` alone.
    """

    num_classes: Annotated[int, Field(ge=2)] = 256
    num_examples: Annotated[int, Field(ge=8)] = 2048
    num_features: Count = 64
    tail: Annotated[float, Field(ge=0)] = 1.0
    spread: Annotated[float, Field(ge=0)] = 0.7
    data_seed: Seed = 0

    def load(self) -> Data:
        generator = torch.Generator().manual_seed(self.data_seed)
        shares = torch.arange(1, self.num_classes + 1).double() ** -self.tail
        labels = torch.multinomial(shares, self.num_examples, replacement=True, generator=generator)
        centres = torch.randn(self.num_classes, self.num_features, generator=generator)
        noise = torch.randn(self.num_examples, self.num_features, generator=generator)
        points = (centres[labels] + self.spread * noise) / self.num_features**0.5
        return Data(
            train_inputs=points,
            train_targets=labels,
            test_inputs=points.clone(),
            test_targets=labels.clone(),
            input_shape=(self.num_features,),
            num_outputs=self.num_classes,
        )

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        losses = functional.cross_entropy(outputs, targets, reduction="none").double()
        order = torch.bincount(targets, minlength=self.num_classes)[targets].argsort(stable=True)
        rare, common = losses[order].split([len(order) // 2, len(order) - len(order) // 2])
        return {
            **super().metrics(outputs, targets),
            "loss_common": common.mean().item(),
            "loss_rare": rare.mean().item(),
        }
