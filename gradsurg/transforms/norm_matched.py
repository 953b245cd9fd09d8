"""NormMatched: the direction of the gradient with the norm of another transform's result."""

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import direction, norm
from gradsurg.transforms.base import AnyTransform, TransformContext, Wrapper
from gradsurg.transforms.clip import Clip


@validated
class NormMatched(Wrapper):
    """Rescale each gradient to the 2-norm of a transform's result: g * |T(g)| / |g|.

    A control arm for the transform T (the field `of`): the direction of g with the norm of T(g)
    separates the effects of direction and norm.

    Any shape. The result is zero where |g| is zero, also if T(g) is not. A NaN in g or T(g) makes
    every entry NaN, and so does an infinity in T(g) if g has one too; otherwise an infinity in g
    becomes NaN and every other entry zero. An empty tensor stays empty. The state is that of T.
    """

    of: AnyTransform = Clip(0.01)

    tags = frozenset({"sign_preserving"})
    inherited = frozenset(
        {"homogeneous", "odd", "norm_non_increasing", "deterministic", "differentiable"}
    )

    def combine(self, grad: Tensor, result: Tensor, context: TransformContext) -> Tensor:
        return norm_matched(grad, result)


def norm_matched(grad: Tensor, target: Tensor) -> Tensor:
    """Return `grad` rescaled to the 2-norm of `target`; zero where `grad` is zero."""
    return (direction(grad, "tensor") * norm(target, "tensor")).to(grad.dtype)
