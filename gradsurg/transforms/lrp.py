"""LRP: rules of layer-wise relevance propagation, at the inputs of modules."""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vjp

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import Need, Stateless, TransformContext, layer_of
from gradsurg.transforms.layer_calls import LayerCall

Change = Callable[[Tensor], Tensor]


@validated
class LRP(Stateless):
    """Replace the gradient of a module's input x by x's relevance under a rule, divided by x.

    The relevance of a tensor is its value times its gradient. So after the backward pass
    `x.grad * x` explains a scalar output, and the output of a module z = f(x) has the relevance R =
    z e, with e its gradient. ReLUs, max pooling and sums conserve relevance without a rule. In the
    rules, f(x; W) is f with the parameters W, x+ is max(x, 0), x- is min(x, 0), and W+ and W- are
    the same of W. A bias is part of W in a term with x+, and is left out of a term with x-.

    | `rule` | relevance of x | source |
    |---|---|---|
    | `epsilon` | x J^T R / z, J the Jacobian of f | Bach et al. 2015, eq. 58 |
    | `gamma` | the same with W + `gamma` W+ in f | Montavon et al. 2019, section 10.2.3 |
    | `zplus` | the same of z = f(x+; W+) + f(x-; W-) | Montavon et al. 2017, section 4.1 |
    | `identity` | R, at an elementwise f | Achtibat et al. 2024 (arXiv 2402.05602), eq. 9 |

    `gamma` at inputs of both signs: where z > 0 the denominator is f(x+; W + gamma W+) + f(x-; W +
    gamma W-), where z < 0 it is f(x+; W + gamma W-) + f(x-; W + gamma W+) (Andeol et al. 2021;
    zennit). `epsilon` is added to each denominator with its sign, and is positive at 0.

    `Inputs` of modules that take and return one tensor; `gamma` and `zplus` at linear and
    convolutional layers. The module's forward runs again in the backward pass, without its hooks,
    except with `epsilon` at PyTorch's own linear layers and convolutions. The rule ignores the
    gradient, except for its dtype. NaN and infinities of e, x and z spread as in the module; with
    `gamma` and `zplus` a NaN of x itself gets 0. An empty tensor stays empty.

    >>> model, x = nn.Sequential(nn.Linear(2, 1, bias=False)), torch.ones(2, requires_grad=True)
    >>> model.load_state_dict({"0.weight": torch.tensor([[4.0, -1.0]])})
    <All keys matched successfully>
    >>> with gs.Surgery(gs.Intervention(gs.LRP("zplus"), at=gs.Inputs("0"))).attach(model):
    ...     model(x).backward()
    >>> x.detach() * x.grad  # all of the output 3 is from the entry with the positive weight
    tensor([3.0000, 0.0000])
    """

    rule: Literal["epsilon", "gamma", "zplus", "identity"] = "epsilon"
    _: KW_ONLY
    epsilon: Annotated[float, Field(ge=0)] = 1e-6
    gamma: Annotated[float, Field(ge=0)] = 0.25

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"layer"})

    # Homogeneous because a loss scale multiplies the gradient of the output as well.
    tags = frozenset({"homogeneous", "idempotent", "deterministic"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        layer, x, output, entering = layer_of(self, context)
        if self.rule == "epsilon" and layer.is_affine:
            # R / z = e |z| / |z|, where epsilon needs no sign. The temporaries are reused.
            size = widened(output).abs()
            share = (widened(entering) * size).div_(size.add_(self.epsilon))
            return layer.pulled_back(share.to(output.dtype)).to(grad.dtype)
        relevance = widened(entering) * output
        match self.rule:
            case "epsilon":
                result = self._shared(layer, x, relevance)
            case "gamma":
                up = _signed(layer, self._raised(min=0), self._raised(max=0))
                down = _signed(layer, self._raised(max=0), self._raised(min=0))
                result = self._shared(up, x, relevance * (output > 0))
                result = result + self._shared(down, x, relevance * (output < 0))
            case "zplus":
                above = _signed(layer, lambda w: w.clamp(min=0), lambda w: w.clamp(max=0))
                result = self._shared(above, x, relevance)
            case "identity":
                result = relevance / self._stable(widened(x))
        return result.to(grad.dtype)

    def _shared(self, function: Change, x: Tensor, relevance: Tensor) -> Tensor:
        """Return J^T R / z for z = f(x)."""
        z, pull, *_ = vjp(function, x)
        return pull((relevance / self._stable(widened(z))).to(z.dtype))[0]

    def _stable(self, z: Tensor) -> Tensor:
        return z + torch.where(z < 0, -self.epsilon, self.epsilon)

    def _raised(self, **bounds: float) -> Change:
        return lambda weight: weight + self.gamma * weight.clamp(**bounds)


def _signed(layer: LayerCall, above: Change, below: Change) -> Change:
    """Return x -> f(x+; above(W)) + f(x-; below(W)), the second without bias."""

    def positive(_: str, param: Tensor) -> Tensor:
        return above(param)

    def negative(name: str, param: Tensor) -> Tensor:
        return torch.zeros_like(param) if name.endswith("bias") else below(param)

    return lambda x: layer(x.clamp(min=0), positive) + layer(x.clamp(max=0), negative)
