"""AGEM: the gradient of what is learned, without what conflicts with that of a memory."""

import torch
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.plugins.fields import validated


@validated
class AGEM(Weighting):
    """g, or if g · g_ref < 0, g - (g · g_ref) / |g_ref|² g_ref.

    Of two gradients the first is g, of what is learned now, and the second g_ref, of a memory of
    what was learned before: it says where g must not go, and is not followed itself. Section 4 of
    Chaudhry et al., ICLR 2019 (arXiv 1812.00420); GEM, which has a g_ref for each task before, is
    another method (`DualProj` solves its problem for the mean), so more than two are refused.

    A g_ref of zero forbids nothing, and one gradient alone is left alone. Opposite ones cancel. A
    NaN or infinity makes every weight NaN.
    """

    @property
    def num_tasks(self) -> int:
        return 2

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset(
            {
                "non_conflicting",
                "linear_under_scaling",
                "scale_invariant",
                "homogeneous",
                "deterministic",
            }
        )

    def weights(self, gramian: Tensor) -> Tensor:
        count = len(gramian)
        if count > 2:
            raise ValueError(
                "AGEM is for two tasks, what is learned and then the memory of what was: found "
                f"{count}"
            )
        if not gramian.isfinite().all():
            return torch.full((count,), torch.nan, dtype=torch.float64)
        weights = torch.tensor([1.0, 0.0][:count], dtype=torch.float64)
        inner, square = gramian[[0, -1], -1].tolist()  # on the CPU, as every Gramian is
        if inner < 0 < square:
            weights[1] = -inner / square
        return weights
