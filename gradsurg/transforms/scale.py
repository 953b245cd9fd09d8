"""Scale: multiply the gradient by a number."""

from collections.abc import Sequence

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Scaling, Stateless, TransformContext, TransformProperty


@validated
class Scale(Stateless, Scaling):
    """Multiply every entry by a number: factor * g.

    MuZero halves the gradient at the input of its dynamics function (Schrittwieser et al., Nature
    2020); fairseq has it as GradMultiply.

    Any shape. Zero stays zero, NaN stays NaN, an infinity stays infinite (it becomes NaN if the
    factor is 0, and 0 by `Zero`), an empty tensor stays empty.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.Scale(0.5))).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad  # 3, -4 without the surgery
    tensor([[ 1.5000, -2.0000]])
    """

    factor: float = 0.1

    tags = frozenset(
        {"elementwise", "homogeneous", "linear", "odd", "deterministic", "differentiable"}
    )

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {
            "sign_preserving": self.factor >= 0,
            "norm_non_increasing": abs(self.factor) <= 1,
            "idempotent": self.factor in (0.0, 1.0),
            "unbiased": self.factor == 1,
        }

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad * self.factor

    def factors(
        self, grads: Sequence[Tensor], contexts: Sequence[TransformContext]
    ) -> Sequence[float]:
        return [self.factor] * len(grads)
