"""NOfM: keep the n largest of every m consecutive entries."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.transforms.base import Stateless, TransformContext


@validated
class NOfM(Stateless):
    """Keep the n entries of largest magnitude of every m consecutive ones; zero the rest.

    Groups lie along `axis`; the last group of an axis may be shorter and keeps at most n as well.
    2:4 sparsity of Mishra et al. 2021 (arXiv 2104.08378), here of gradients.

    Any shape with that axis; a tensor without axes is not changed. Zero stays zero, an empty tensor
    empty. The first of several equal magnitudes are kept. NaN is larger than infinity, and infinity
    larger than all numbers.
    """

    n: Annotated[int, Field(ge=1)] = 2
    m: Annotated[int, Field(ge=1)] = 4
    _: KW_ONLY
    axis: int = -1

    def __post_init__(self) -> None:
        if self.n > self.m:
            raise Contradiction("n", f"must be <= m, found n={self.n}, m={self.m}")

    tags = frozenset(
        {
            "homogeneous",
            "idempotent",
            "odd",
            "sign_preserving",
            "norm_non_increasing",
            "deterministic",
            "differentiable",
        }
    )

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        if not grad.ndim or not grad.numel() or self.n == self.m:
            return grad
        axis = self.axis if -grad.ndim <= self.axis < grad.ndim else -1
        sizes = grad.abs().movedim(axis, -1)
        length = sizes.shape[-1]
        padded = pad(sizes, (0, -length % self.m), value=-1.0)
        groups = padded.reshape(*padded.shape[:-1], -1, self.m)
        order = groups.argsort(dim=-1, descending=True, stable=True)[..., : self.n]
        kept = torch.zeros_like(groups, dtype=torch.bool).scatter(-1, order, True)
        mask = kept.reshape(padded.shape)[..., :length].movedim(-1, axis)
        return torch.where(mask, grad, 0.0)
