"""SkipUpdate: skip the step of the optimizer for a non-finite or too large gradient."""

from collections.abc import Iterable, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import joint_norm, peak
from gradsurg.transforms.base import (
    SKIPPED,
    GroupTransform,
    Members,
    TransformContext,
    TransformState,
)


@validated
class SkipUpdate(GroupTransform):
    """Skip the step of the optimizer if an entry is NaN or infinite, or if the norm > max_norm.

    The norm is the joint 2-norm N of all gradients of the group; without `max_norm` only non-finite
    entries count. In a skipped step the optimizer finds no gradient. So the weights, its momentum
    and its step counts stay, without weight decay; a zero gradient would change them. The gradients
    themselves are unchanged, and are in `.grad` again after the step.

    No parameter of the optimizer is updated, not even parameters that the site does not select. The
    surgery and a learning-rate scheduler count the step. Later links of a chain do not act in it,
    nor later interventions at stage `step`; earlier ones have acted. One value is copied to the
    host in each step. LBFGS, which steps without gradients, is refused.

    A `GradScaler` lowers its scale and skips the step of an optimizer with non-finite gradients.
    The transform is not called for that step, and is called for steps of other optimizers.

    Like optax's `apply_if_finite` and `skip_large_updates`; `max_grad_norm` with
    `skip_update_on_spike` in ZClip (arXiv 2504.02507).

    Any shapes and dtypes; zero gradients and empty tensors do not skip. N² that overflows in
    float32 is infinite, and larger than `max_norm`. State: the number of skipped steps.
    """

    max_norm: Annotated[float, Field(gt=0)] | None = None

    needed = frozenset({"skip"})

    tags = frozenset(
        {
            "idempotent",
            "odd",
            "sign_preserving",
            "norm_non_increasing",
            "deterministic",
            "differentiable",
        }
    )

    @property
    def members(self) -> Members:
        return "any"

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return {SKIPPED: torch.zeros((), dtype=torch.int64, device=grads[0].device)}

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        count = state[SKIPPED]
        # The largest magnitude is NaN or infinite if an entry is.
        peaks = [peak(grad.detach()).view(()).to(count.device) for grad in grads if grad.numel()]
        skips = ~torch.stack([size.isfinite() for size in peaks]).all() if peaks else count < 0
        if self.max_norm is not None:
            skips |= (joint_norm(grads) > self.max_norm).to(count.device)
        return grads, {SKIPPED: count + skips}
