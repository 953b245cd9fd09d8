"""ScaleBySign: scale positive and negative entries by different factors."""

from dataclasses import KW_ONLY
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import Per, reduced_axes
from gradsurg.transforms.base import Need, Stateless, TransformContext, TransformProperty, value_of


@validated
class ScaleBySign(Stateless):
    """Multiply by `positive` where the sign is positive and by `negative` where it is negative.

    Args:

    - `of`: the sign of the gradient (`grad`), or of the `value` whose gradient it is.
    - `per`: with `entry` each entry has its own sign. Otherwise each group has one: `tensor`,
      `unit` (an index of axis 0) or an einops pattern such as `o i kh kw -> o i`.

    A group is positive if all its entries are >= 0 and one is > 0. It is negative if all are <= 0
    and one is < 0. Other groups are not changed.

    With (1, 0) at ReLU nodes it is guided backpropagation (Springenberg et al., 2015, arXiv
    1412.6806): the rule of `Deconvolve` together with the ReLU's own mask. The `scale_by_sign` of
    optax is `Sign` here.

    Any shape. Where the sign is zero or NaN the gradient is not changed, so that with `of=grad` NaN
    stays NaN. A factor of 0 also removes infinities, and with `of=value` NaN. An empty tensor stays
    empty.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.ScaleBySign(negative=0.1))).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad  # 3, -4 without the surgery
    tensor([[ 3.0000, -0.4000]])
    """

    positive: float = 1.0
    negative: float = 0.0
    _: KW_ONLY
    of: Literal["grad", "value"] = "grad"
    per: Per = "entry"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"value"} if self.of == "value" else ())

    tags = frozenset({"homogeneous", "deterministic", "differentiable"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        gains, of_other = (self.positive, self.negative), self.of != "grad"
        is_even = self.positive == self.negative
        return {
            "elementwise": of_other or self.per == "entry",
            "odd": of_other or is_even,
            "linear": of_other or (is_even and (self.per == "entry" or self.positive == 1)),
            "sign_preserving": min(gains) >= 0,
            "norm_non_increasing": max(map(abs, gains)) <= 1,
            "idempotent": set(gains) <= {0.0, 1.0},
        }

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        match self.of:
            case "grad":
                signs = grad
            case "value":
                signs = value_of(self, context)
        # The same values as below in a twentieth of the time of `torch.where`. Not with a graph:
        # the derivatives differ at zero or at NaN.
        if self.of == "grad" and self.per == "entry" and not grad.requires_grad:
            match self.positive, self.negative:
                case 1, 0:
                    return grad.clamp(min=0)
                case 0, 1:
                    return grad.clamp(max=0)
                case 1, slope if 0 < slope <= 1:
                    return leaky_relu(grad, slope)
        result = grad
        for factor, positive in ((self.negative, False), (self.positive, True)):
            if factor != 1:
                scaled = grad * factor if factor else 0.0  # an infinity times 0 would be NaN
                result = torch.where(_has_sign(signs, self.per, positive), scaled, result)
        return result


def _has_sign(signs: Tensor, per: Per, positive: bool) -> Tensor:
    """Return which entries, or groups of entries, have the sign."""
    has = signs > 0 if positive else signs < 0
    axes = reduced_axes(per, signs.ndim)
    if not axes:
        return has
    agrees = signs >= 0 if positive else signs <= 0  # not where it is NaN
    return agrees.all(dim=axes, keepdim=True) & has.any(dim=axes, keepdim=True)
