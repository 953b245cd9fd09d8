"""Digits, with attacks by a trained ResNet on others, with and without a common 2-norm."""

import torch
from gradsurg.experiments.guo2020.task import TransferDigits, input_gradient
from torch import Tensor, nn

from gradsurg.models.resnet import ResNet
from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data
from gradsurg.tasks.data.arrays import Count

PIXELS = 64
WIDTH = 8  # of the other networks, of depth 8


@validated
class TransferResNets(TransferDigits):
    """The task and the attack of guo2020 on ResNets, and an attack with steps by signs.

    Steps by signs follow iterated FGSM (Kurakin et al. 2017, arXiv 1611.01236). Each moves a pixel
    by a quarter of `norm` / 8 and bounds its change by `norm` / 8. An image has 64 pixels, so the
    2-norm of the perturbation is at most `norm`, but it may differ between the arms. `norm_sign` is
    its mean, `target_sign` the accuracy of the other networks.
    """

    num_targets: Count = 2

    def other(self, data: Data) -> nn.Module:
        return ResNet(data.input_shape, data.num_outputs, width=WIDTH)

    def attacks(self, model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        bound = self.norm / PIXELS**0.5
        moved = torch.zeros_like(images)
        for _ in range(self.num_steps):
            gradient = input_gradient(model, images + moved, labels)
            moved = (moved + bound / 4 * gradient.sign()).clamp(-bound, bound)
        return {**super().attacks(model, images, labels), "_sign": images + moved}
