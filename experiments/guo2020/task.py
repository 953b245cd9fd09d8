"""Digits, with an attack by the trained network on others that are trained on the same data."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from gradsurg.models.mlp import MLP
from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Chance, Data, Examination, Examined
from gradsurg.tasks.data.arrays import Count
from gradsurg.tasks.digits import Digits

STEP = 0.25  # step of the ascent, relative to the norm
HIDDEN = (64, 64)  # of the other networks
TRAINING = 400  # Adam steps of each, of a batch of 128 at 0.002


@validated
class TransferDigits(Examined):
    """Classify scikit-learn's digits; then attack the test images, and test other networks on them.

    The attack is gradient ascent of the trained network's loss in `num_steps` steps. A step goes
    `norm` / 4 along the gradient of each image, and then the perturbation is brought to the 2-norm
    `norm`, so every perturbation of every arm has exactly that norm. `source` is the accuracy of
    the trained network under the attack, `target` the mean accuracy of `num_targets` other MLPs
    under it. `target_clean` is their accuracy on the images, and `target_noise` with random
    perturbations of that norm. Pixels are standardized and not clamped. A subclass may have other
    networks and more attacks.
    """

    norm: Annotated[float, Field(gt=0)] = 2.0
    num_steps: Count = 10
    num_targets: Count = 3

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
        others = [_trained(self.other(data), data).to(device) for _ in range(self.num_targets)]
        noise = images + self.norm * _unit(torch.randn(images.shape).to(device))
        attacked = self.attacks(model, images, labels)
        numbers = {"source": _accuracy([model], attacked[""], labels)}
        for name, at in {**attacked, "_clean": images, "_noise": noise}.items():
            numbers[f"target{name}"] = _accuracy(others, at, labels)
        for name, at in attacked.items():
            numbers[f"norm{name}"] = (at - images).flatten(1).norm(dim=1).mean().item()
        return Examination(numbers)

    def other(self, data: Data) -> nn.Module:
        """Return one of the other networks, not trained yet."""
        return MLP(data.input_shape, data.num_outputs, hidden=HIDDEN)

    def attacks(self, model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the attacked images, by the suffix of their numbers."""
        moved = torch.zeros_like(images)
        for _ in range(self.num_steps):
            gradient = input_gradient(model, images + moved, labels)
            moved = self.norm * _unit(moved + STEP * self.norm * _unit(gradient))
        return {"": images + moved}


def input_gradient(model: nn.Module, points: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the cross-entropy with respect to the inputs."""
    points = points.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(functional.cross_entropy(model(points), labels), points)
    return gradient


def _unit(values: Tensor) -> Tensor:
    """Scale each image to the 2-norm 1; zero stays zero."""
    return functional.normalize(values.flatten(1), dim=1).view_as(values)


def _trained(network: nn.Module, data: Data) -> nn.Module:
    """Train a network on all training examples of the data, and return it."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.002)
    for _ in range(TRAINING):
        batch = torch.randint(len(data.train_inputs), (128,))
        optimizer.zero_grad()
        outputs = network(data.train_inputs[batch])
        functional.cross_entropy(outputs, data.train_targets[batch]).backward()
        optimizer.step()
    return network.eval()


@torch.no_grad()
def _accuracy(networks: list[nn.Module], inputs: Tensor, labels: Tensor) -> float:
    """Return the mean accuracy of several networks."""
    hits = torch.stack([network(inputs).argmax(dim=1) == labels for network in networks])
    return hits.double().mean().item()
