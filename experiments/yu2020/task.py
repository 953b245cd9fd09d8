"""PCGrad's toy problem: two losses of a point that share a deep, curved valley."""

import torch
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.tasks.quadratics_toy import Place, Toy

FLOOR = 5e-6


@validated
class PCGradToy(Toy):
    """The two losses of a point (x1, x2) in figure 1 of Yu et al. 2020.

    loss_1 = 20 ln max(|x1 / 2 + tanh(x2)|, 5e-6), loss_2 = 25 ln max(|x1 / 2 - tanh(x2) + 2|,
    5e-6). Both are least, -244.1 and -305.2, at x1 = -2 for every x2 above 6.5: this is the Pareto
    set, up to the width of the floor. Gradient descent on the sum stays in the valley, and with
    PCGrad it leaves it. With Adam and a learning rate of 0.001 this takes some 200,000 steps
    (500,000 were published), with 0.01 20,000.
    """

    start: Place = (0.5, -3.0)

    def values(self, points: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = points.unbind(dim=1)
        first = (x1 / 2 + torch.tanh(x2)).abs().clamp(min=FLOOR).log()
        second = (x1 / 2 - torch.tanh(x2) + 2).abs().clamp(min=FLOOR).log()
        return 20 * first, 25 * second
