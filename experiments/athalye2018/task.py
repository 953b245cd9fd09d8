"""Digits, with an attack on the trained network: accuracy under projected gradient ascent."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Chance, Data, Examination, Examined
from gradsurg.tasks.data.arrays import Count
from gradsurg.tasks.digits import Digits

STEP = 0.25  # step of the ascent, relative to the radius


@validated
class AttackedDigits(Examined):
    """Classify scikit-learn's digits; then attack the test images.

    The attack is projected gradient ascent of the loss (Madry et al., ICLR 2018, arXiv 1706.06083).
    It starts at a random point of the cube of `radius` around the image. Each of `num_steps` steps
    adds radius / 4 times the sign of the gradient and projects the result to the cube. Pixels are
    standardized and not clamped. `clean`, `noise` and `attacked` are the accuracies of the images,
    of the random points, and after the attack.
    """

    radius: Annotated[float, Field(gt=0)] = 0.5
    num_steps: Count = 20

    def load(self) -> Data:
        return Digits().load()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return Digits().loss(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return Digits().metrics(outputs, targets)

    def chance(self, targets: Tensor) -> Chance:
        return Digits().chance(targets)

    def examine(self, model: nn.Module, data: Data) -> Examination:
        device = next(model.parameters()).device
        images, labels = data.test_inputs.to(device), data.test_targets.to(device)
        noise = (2 * torch.rand(images.shape) - 1) * self.radius
        start = images + noise.to(device)
        points = start
        for _ in range(self.num_steps):
            points = points.detach().requires_grad_()
            loss = functional.cross_entropy(model(points), labels)
            (gradient,) = torch.autograd.grad(loss, points)
            moved = points.detach() + STEP * self.radius * gradient.sign()
            points = torch.clamp(moved, images - self.radius, images + self.radius)
        each = {"clean": images, "noise": start, "attacked": points}
        with torch.no_grad():
            right = {name: model(at).argmax(dim=1) == labels for name, at in each.items()}
        return Examination({name: hits.double().mean().item() for name, hits in right.items()})
