"""Krum: select the gradients closest to the others, for tasks that may be faulty."""

from dataclasses import KW_ONLY
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import Weighting
from gradsurg.plugins.fields import validated


@validated
class Krum(Weighting):
    """Average the `num_selected` gradients that are closest to their T - num_byzantine - 2 nearest
    neighbours.

    `num_byzantine` is the number of tasks that may be faulty.

    Closeness is the sum of squared distances; the first of equal rows is selected.

    Section 4 of Blanchard et al., NeurIPS 2017, for `num_selected` = 1; a larger number is its
    Multi-Krum.

    Zero, identical and opposite gradients are treated like any others. Raises ValueError for fewer
    than num_byzantine + 3 tasks, so for one or two. A NaN or infinity makes every weight NaN.

    >>> rows = torch.tensor([[1.0, 1.0], [1.0, 1.1], [1.0, 0.9], [9.0, -9.0]])
    >>> gs.Krum(1)(rows)
    tensor([1., 1.])
    """

    num_byzantine: Annotated[int, Field(ge=0)] = 0
    _: KW_ONLY
    num_selected: Annotated[int, Field(ge=1)] = 1

    tags = frozenset({"homogeneous", "deterministic"})

    @property
    def least_tasks(self) -> int:
        return max(self.num_byzantine + 3, self.num_selected)

    @np.errstate(all="ignore")
    def weights(self, gramian: Tensor) -> Tensor:
        count = len(gramian)
        if count < self.least_tasks:
            raise ValueError(f"{self!r} needs {self.least_tasks} tasks or more, found {count}")
        matrix = gramian.numpy()
        if not np.isfinite(matrix).all():
            return torch.full((count,), torch.nan, dtype=torch.float64)
        squares = matrix.diagonal()
        # Exactly symmetric, so that rounding does not decide ties, and zero on the diagonal.
        distances = np.maximum(squares + squares[:, None] - (matrix + matrix.T), 0.0)
        nearest = np.sort(distances, axis=1)[:, 1 : count - self.num_byzantine - 1]
        chosen = np.argsort(nearest.sum(1), kind="stable")[: self.num_selected]
        weights = np.zeros(count)
        weights[chosen] = 1 / self.num_selected
        return torch.from_numpy(weights)
