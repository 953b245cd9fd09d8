"""GradientReversal: the gradient reversal layer of domain-adversarial training."""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty


@validated
class GradientReversal(Stateless):
    """Negate and scale the gradient: -strength * g.

    Use it at the input of the domain classifier, `Inputs("domain")`: at the features it would
    reverse the gradient of the label predictor too. The gradient reversal layer of Ganin and
    Lempitsky, ICML 2015 (arXiv 1409.7495), with strength as lambda. The paper's schedule of lambda
    is `Scheduled(GradientReversal(), start=0.5, stop=1.0, curve="saturating")`.

    Any shape. Zero stays zero, NaN stays NaN, an infinity changes its sign (it becomes NaN if the
    strength is 0), an empty tensor stays empty.

    >>> layer, x = nn.Linear(2, 1), torch.ones(2, requires_grad=True)
    >>> model = nn.ModuleDict({"domain": layer})
    >>> reversal = gs.Intervention(gs.GradientReversal(0.1), at=gs.Inputs("domain"))
    >>> with gs.Surgery(reversal).attach(model):
    ...     model["domain"](x).backward()
    >>> torch.allclose(x.grad, -0.1 * layer.weight)
    True
    """

    strength: Annotated[float, Field(ge=0)] = 1.0

    tags = frozenset(
        {"elementwise", "homogeneous", "linear", "odd", "deterministic", "differentiable"}
    )

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"norm_non_increasing": self.strength <= 1}

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad * -self.strength
