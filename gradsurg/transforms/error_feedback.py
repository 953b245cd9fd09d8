"""ErrorFeedback: add next time what a transform left out this time."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import BeforeValidator
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.per import widened
from gradsurg.transforms.base import (
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
    Wrapper,
    as_transform,
    init_all,
    substate,
    update_all,
)
from gradsurg.transforms.sign import Sign


@validated
class ErrorFeedback(Wrapper):
    """T(g + e), where e, zero at first, is then g + e - T(g + e): nothing is lost, only late.

    T is `of`, and e is kept for each site, in float32 or wider. Algorithms 1 and 2 of Karimireddy
    et al., ICML 2019 (arXiv 1901.09847), where e is what is missing from the update: with a
    constant learning rate that is the same, with a changing one e is of the gradient here and is
    taken at the rate of the step at which it is made good.

    Any shape; an empty tensor stays empty. A zero gradient gives T(e). A NaN or an infinity stays
    in e for good: put `Sanitize` before it.
    """

    of: Annotated[Transform, BeforeValidator(as_transform)] = Sign("mean")

    @property
    def properties(self) -> frozenset[TransformProperty]:
        kept: set[TransformProperty] = {"elementwise", "deterministic"}
        return self.of.properties & kept

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        wide = [widened(grad) for grad in grads]
        errors = {f"error.{index}": torch.zeros_like(grad) for index, grad in enumerate(wide)}
        return errors | {f"of.{key}": value for key, value in init_all(self.of, wide).items()}

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        errors = substate(state, "error.")
        owed = [widened(grad) + errors[str(index)] for index, grad in enumerate(grads)]
        results, inner = update_all(self.of, owed, substate(state, "of."), contexts)
        paid = [result.to(grad.dtype) for result, grad in zip(results, grads, strict=True)]
        left = zip(owed, paid, strict=True)
        new = {f"error.{index}": all_ - part for index, (all_, part) in enumerate(left)}
        return paid, new | {f"of.{key}": value for key, value in inner.items()}
