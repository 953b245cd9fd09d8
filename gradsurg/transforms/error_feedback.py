"""ErrorFeedback: add the error of a transform to the next gradient."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import (
    AnyTransform,
    TransformContext,
    TransformState,
    Wrapper,
    init_all,
    substate,
    update_all,
)
from gradsurg.transforms.sign import Sign


@validated
class ErrorFeedback(Wrapper):
    """Apply a transform T with error feedback: T(g + e), with the error e <- g + e - T(g + e).

    T is the field `of`. Algorithms 1 and 2 of Karimireddy et al., ICML 2019 (arXiv 1901.09847), who
    accumulate the error of the update: the same at a constant learning rate. At a varying rate the
    error of a gradient is applied here at the rate of the later step.

    e is the state of a site, initially zero, in float32 or wider. Any shape; an empty tensor stays
    empty. The result of a zero gradient is T(e). After a NaN or an infinity e stays NaN or
    infinite: put `Sanitize` before it.
    """

    of: AnyTransform = Sign("mean")

    inherited = frozenset({"elementwise", "deterministic", "differentiable"})

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        wide = [widened(grad) for grad in grads]
        errors = {f"error.{index}": torch.zeros_like(grad) for index, grad in enumerate(wide)}
        return errors | {f"of.{key}": value for key, value in init_all(self.of, wide).items()}

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        errors = substate(state, "error.")
        corrected = [widened(grad) + errors[str(index)] for index, grad in enumerate(grads)]
        wide, inner = update_all(self.of, corrected, substate(state, "of."), contexts)
        results = [result.to(grad.dtype) for result, grad in zip(wide, grads, strict=True)]
        pairs = enumerate(zip(corrected, results, strict=True))
        after = {f"error.{index}": target - result for index, (target, result) in pairs}
        return results, after | {f"of.{key}": value for key, value in inner.items()}
