"""AGEM: project the current gradient to remove its conflict with the gradient of a memory."""

import torch
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty, Weighting
from gradsurg.plugins.fields import validated


@validated
class AGEM(Weighting):
    """g, or if g · g_ref < 0, g - (g · g_ref) / |g_ref|² g_ref.

    The first task is g, the current data; the second is g_ref, a memory of earlier data, which only
    constrains g and is not followed itself. Section 4 of Chaudhry et al., ICLR 2019 (arXiv
    1812.00420). More than two tasks are refused: `GEM` has one g_ref for each earlier task.

    A g_ref of zero imposes no constraint. Opposite gradients give zero, one task is unchanged. A
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
                f"AGEM needs two tasks, the current data and then the memory, found {count}"
            )
        if not gramian.isfinite().all():
            return torch.full((count,), torch.nan, dtype=torch.float64)
        weights = torch.tensor([1.0, 0.0][:count], dtype=torch.float64)
        inner, square = gramian[[0, -1], -1].tolist()  # on the CPU, as every Gramian is
        if inner < 0 < square:
            weights[1] = -inner / square
        return weights
