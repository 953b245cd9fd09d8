"""Orthogonalize: set the singular values of a gradient matrix to about 1."""

from dataclasses import KW_ONLY
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import norm, widened
from gradsurg.transforms.base import Stateless, TransformContext


@validated
class Orthogonalize(Stateless):
    """Replace the matrix G = U S V^T by about U V^T, with Newton-Schulz steps, times a scale.

    Args:

    - `scale`: for A rows and B columns, `none` is 1, `spectral` is sqrt(max(1, A / B)) and `rms` is
      0.2 sqrt(max(A, B)).
    - `coefficients`: the a, b and c of each step.

    X = G / max(|G|, eps) with the Frobenius norm |G|, then `steps` times X <- a X + b (X X^T) X + c
    (X X^T)^2 X. The default coefficients do not take singular values to 1. Values above 0.2 % of
    |G| become 0.68 to 1.20, values below can stay smaller. Random 20 x 30 matrices have none of
    these and get 0.68 to 1.13; random 20 x 20 matrices have some near 0 and get 0.02 to 1.20.

    Muon of Jordan et al. 2024 is this after `Momentum`: `transform=muon`. With `rms` the result has
    the root mean square of an update of Adam (Liu et al. 2025, arXiv 2502.16982).
    `torch.optim.Muon` has the same steps in bfloat16.

    A tensor of more than two axes is a matrix with the rows of axis 0; a tensor of fewer axes is
    not changed. Computed in float32 or wider. A zero gradient stays zero, an empty tensor empty. A
    NaN or an infinity makes every entry NaN.

    >>> layer, grad = nn.Linear(2, 2, bias=False), torch.tensor([[3.0, 0.0], [0.0, -0.5]])
    >>> with gs.Surgery(gs.Intervention(gs.Orthogonalize())).attach(layer):
    ...     layer.weight.backward(grad)
    >>> torch.linalg.svdvals(layer.weight.grad)  # 3 and 0.5 without the surgery
    tensor([1.0420, 0.7136])
    """

    steps: Annotated[int, Field(ge=1, le=100)] = 5
    _: KW_ONLY
    scale: Literal["none", "spectral", "rms"] = "spectral"
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: Annotated[float, Field(gt=0)] = 1e-7

    tags = frozenset({"odd", "deterministic", "differentiable"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        if grad.ndim < 2 or not grad.numel():
            return grad
        matrix = widened(grad).reshape(grad.shape[0], -1)
        rows, columns = matrix.shape
        x = matrix / norm(matrix, "tensor").clamp(min=self.eps)
        x = x.mT if rows > columns else x
        a, b, c = self.coefficients
        for _ in range(self.steps):
            gramian = x @ x.mT
            x = a * x + (b * gramian + c * gramian @ gramian) @ x
        x = x.mT if rows > columns else x
        return (self._scale(rows, columns) * x).reshape(grad.shape).to(grad.dtype)

    def _scale(self, rows: int, columns: int) -> float:
        match self.scale:
            case "none":
                return 1.0
            case "spectral":
                return max(1.0, rows / columns) ** 0.5
            case "rms":
                return 0.2 * max(rows, columns) ** 0.5
