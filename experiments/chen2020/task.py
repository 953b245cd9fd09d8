"""Least squares in one dimension and MNIST, with the bias of clipping each example's gradient."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, Examination, Examined, Task
from gradsurg.tasks.data.arrays import Count
from gradsurg.tasks.mnist import MNIST

CHUNK = 250  # examples whose gradients are in memory at a time


@validated
class ClippingToy(Task):
    """f(x) = Σ (x - a)² / 2 over the `centres` a, least at their mean.

    It needs `model=point` and a batch of all examples. Every output is x itself, so the gradient at
    an output is its example's, x - a. `gradient` is f'(x), not clipped. After Chen, Wu and Hong,
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


@validated
class ClippedMNIST(MNIST, Examined):
    """MNIST; then the gradients of `count` training examples, clipped at `max_norm` and not.

    `gradient` is the norm of the mean gradient of these examples, `clipped` the norm of the mean of
    their clipped gradients, and `cosine` the cosine of the two means. `share` is the share of
    examples whose gradients are clipped.
    """

    max_norm: Annotated[float, Field(gt=0)] = 1.0
    count: Count = 2000

    def examine(self, model: nn.Module, data: Data) -> Examination:
        params = {name: param.detach() for name, param in model.named_parameters()}

        def loss(values: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            return self.loss(functional_call(model, values, (image[None],)), label[None])

        size = sum(param.numel() for param in params.values())
        mean, clipped = torch.zeros(2, size, dtype=torch.float64).unbind()
        above, chosen = 0.0, slice(0, self.count)
        images, labels = data.train_inputs[chosen], data.train_targets[chosen]
        for some, named in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
            grads = vmap(grad(loss), (None, 0, 0))(params, some, named)
            rows = torch.cat([one.flatten(1) for one in grads.values()], dim=1).double()
            norms = rows.norm(dim=1, keepdim=True)
            mean += rows.sum(dim=0)
            clipped += (rows * (self.max_norm / norms).clamp(max=1.0)).sum(dim=0)
            above += (norms > self.max_norm).sum().item()
        cosine = torch.nn.functional.cosine_similarity(mean, clipped, dim=0)
        numbers = {
            "gradient": mean.norm().item() / len(images),
            "clipped": clipped.norm().item() / len(images),
            "cosine": cosine.item(),
            "share": above / len(images),
        }
        return Examination(numbers)
