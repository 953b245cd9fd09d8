"""NormMatched: the direction of the gradient with the norm another transform would give it."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.per import direction, norm
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
    """Keep the direction of g and take the norm of T(g), tensor by tensor: g * |T(g)| / |g|.

    The control that says whether a transform T (`of`) helps by its direction or by its norm alone.
    Any shape. Zero where |g| is zero, also where T makes something of it; a NaN in g or T(g)
    makes all NaN, an infinity in g makes all zero and itself NaN; an empty tensor stays empty. The
    state is that of T.
    """

    of: Annotated[Transform, BeforeValidator(as_transform)] = Clip(0.01)

    @property
    def properties(self) -> frozenset[TransformProperty]:
        kept: set[TransformProperty] = {
            "homogeneous",
            "odd",
            "norm_non_increasing",
            "deterministic",
        }
        own: set[TransformProperty] = {"sign_preserving"}
        return self.of.properties & kept | own

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return init_all(self.of, grads)

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        targets, state = update_all(self.of, grads, state, contexts)
        pairs = zip(grads, targets, strict=True)
        return [_matched(grad, target) for grad, target in pairs], state


def _matched(grad: Tensor, target: Tensor) -> Tensor:
    return (direction(grad, "tensor") * norm(target, "tensor")).to(grad.dtype)
