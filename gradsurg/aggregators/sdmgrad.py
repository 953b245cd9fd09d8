"""SDMGrad: weights that follow the minimum-norm combination by projected gradient steps."""

from dataclasses import KW_ONLY
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators._preference import Preference, Preferring
from gradsurg.aggregators.base import (
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    GramianAggregator,
    state_of,
)
from gradsurg.aggregators.solvers import project_on_simplex
from gradsurg.plugins.fields import validated


@validated
class SDMGrad(Preferring, GramianAggregator):
    """d = Jᵀ (w + lambda w~) / (1 + lambda), with w on the simplex, learned over the steps.

    `preference` is w~ (1 / T each by default) and `pull` is lambda. With `normalize`, A is G
    divided by the square of the mean norm of the gradients; without it A is G.

    Each call makes `num_steps` of w <- Π(w - lr v), v <- momentum v + A (w + lambda w~) + rho w.
    They start from the w of the call before (1 / T each at first) and from v = 0. Π is the
    Euclidean projection on the simplex. The steps, of size `lr`, converge if no eigenvalue of A
    exceeds 2 (1 + momentum) / lr. The default lr is far above that bound: w then jumps between
    corners of the simplex, and rounding, and with it the order of the tasks, decides between them.
    `lr=0.3` converges for up to ten normalized gradients.

    Algorithm 1 of Xiao, Ban and Ji, NeurIPS 2023 (arXiv 2305.18409), with the defaults of LibMTL.
    `aggregator=modo` is MoDo (Chen et al., NeurIPS 2023, arXiv 2305.20057): one step of size `lr`
    (gamma in that paper) without momentum, normalization and pull, with the ridge `rho`. Both
    papers take A = J_1 J_2ᵀ of two independent batches, which is unbiased. Here A comes from one
    batch, so noise between batches adds to its diagonal.

    Zero gradients attract weight. Identical tasks give that gradient and one task is unchanged
    without a `preference`; opposite ones cancel only after enough steps. A NaN or infinity makes
    every weight NaN and keeps the state.
    """

    pull: Annotated[float, Field(ge=0)] = 0.3
    _: KW_ONLY
    preference: Preference = None
    lr: Annotated[float, Field(gt=0)] = 10.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    num_steps: Annotated[int, Field(ge=1)] = 20
    rho: Annotated[float, Field(ge=0)] = 0.0
    normalize: bool = True

    tags = frozenset({"deterministic"})

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        is_pulled = bool(self.pull) and min(self.preference or (1.0,)) > 0
        return {"homogeneous": self.normalize, "strongly_stationary": is_pulled}

    def init(self, num_tasks: int) -> AggregatorState:
        return {"weights": torch.full((num_tasks,), 1 / num_tasks, dtype=torch.float64)}

    @np.errstate(all="ignore")
    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        w = state_of(self, state, "weights", len(gramian)).numpy()
        pulled = self.pull * self.shares(len(w))
        matrix = gramian.numpy()
        if not np.isfinite(matrix).all():
            return torch.full((len(w),), torch.nan, dtype=torch.float64), state
        scale = float(np.sqrt(matrix.diagonal()).mean()) if self.normalize else 1.0
        if scale > 0:
            matrix = matrix / scale / scale
        fixed, matrix = matrix @ pulled, matrix + self.rho * np.eye(len(w))
        v = np.zeros_like(w)
        for _ in range(self.num_steps):
            v = self.momentum * v + matrix @ w + fixed
            w = project_on_simplex(w - self.lr * v)
        weights = (w + pulled) / (1 + self.pull)
        return torch.from_numpy(weights), {"weights": torch.from_numpy(w)}
