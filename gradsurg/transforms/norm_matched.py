"""NormMatched: the direction of the gradient with the norm of another transform's result."""

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import BeforeValidator
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import direction, norm
from gradsurg.transforms.base import (
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
    Wrapper,
    as_transform,
    init_all,
    update_all,
)
from gradsurg.transforms.clip import Clip


@validated
class NormMatched(Wrapper):
    """Rescale each gradient to the 2-norm of a transform's result: g * |T(g)| / |g|.

    A control arm for the transform T (the field `of`): the direction of g with the norm of T(g)
    separates the effects of direction and norm. Any shape. The result is zero where |g| is zero,
    also if T(g) is not. A NaN in g or T(g) makes every entry NaN; an infinity in g becomes NaN and
    every other entry zero. An empty tensor stays empty. The state is that of T.
    """

    of: Annotated[Transform, BeforeValidator(as_transform)] = Clip(0.01)

    @property
    def properties(self) -> frozenset[TransformProperty]:
        inherited: set[TransformProperty] = {
            "homogeneous",
            "odd",
            "norm_non_increasing",
            "deterministic",
        }
        return (self.of.properties & inherited).union({"sign_preserving"})

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return init_all(self.of, grads)

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        targets, state = update_all(self.of, grads, state, contexts)
        pairs = zip(grads, targets, strict=True)
        return (norm_matched(grad, target) for grad, target in pairs), state


def norm_matched(grad: Tensor, target: Tensor) -> Tensor:
    """Return `grad` rescaled to the 2-norm of `target`; zero where `grad` is zero."""
    return (direction(grad, "tensor") * norm(target, "tensor")).to(grad.dtype)
