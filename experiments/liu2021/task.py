"""CAGrad's toy problem: two conflicting losses of a point, of very different steepness."""

import torch
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.tasks.quadratics_toy import Place, Toy

FLOOR = 5e-6


@validated
class CAGradToy(Toy):
    """The two losses of a point (x1, x2) in figure 1 of Liu et al. 2021.

    f1 = ln max(|(-x1 - 7) / 2 + t(x2)|, 5e-6) + 6, f2 = ln max(|(-x1 + 3) / 2 - t(x2) + 2|, 5e-6)
    + 6, q1 = ((7 - x1)^2 + (x2 + 8)^2 / 10) / 10 - 20, q2 the same with -7 for 7, t = tanh and
    loss_i = f_i max(t(x2 / 2), 0) + q_i max(t(-x2 / 2), 0). At x2 = 0, a published start, both of
    these maxima pass the gradient on, like torch's clamp. The Pareto set goes from x1 = -7 to
    7 near x2 = -8.4, and the mean of the losses is least at (0, -8.3551). Published starts are
    (-8.5, 7.5), (0, 0), (9, 9), (-7.5, -0.5), (9, -1) and (-8.5, -5).
    """

    start: Place = (-8.5, 7.5)

    def values(self, points: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = points.unbind(dim=1)
        f1 = ((-x1 - 7) / 2 + torch.tanh(x2)).abs().clamp(min=FLOOR).log() + 6
        f2 = ((-x1 + 3) / 2 - torch.tanh(x2) + 2).abs().clamp(min=FLOOR).log() + 6
        q1 = ((7 - x1).square() + (x2 + 8).square() / 10) / 10 - 20
        q2 = ((x1 + 7).square() + (x2 + 8).square() / 10) / 10 - 20
        c1, c2 = torch.tanh(x2 / 2).clamp(min=0), torch.tanh(-x2 / 2).clamp(min=0)
        return f1 * c1 + q1 * c2, f2 * c1 + q2 * c2
