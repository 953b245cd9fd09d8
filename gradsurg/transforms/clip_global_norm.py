"""ClipGlobalNorm: bound the joint norm of all gradients of a group."""

from collections.abc import Callable, Sequence
from functools import reduce
from math import inf
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import NormOrder, over_shards
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import (
    ExampleWeighting,
    GroupTransform,
    TransformContext,
    TransformProperty,
    TransformState,
)


@validated
class ClipGlobalNorm(GroupTransform, ExampleWeighting):
    """Scale all gradients of a group by min(1, max_norm / (N + eps)), N their joint p-norm.

    Any shapes and dtypes. Zero gradients stay zero, empty tensors stay empty. A NaN or an infinity
    in one gradient makes N non-finite and every result NaN or zero, as in
    `torch.nn.utils.clip_grad_norm_`; put `Sanitize` before it to avoid that. If N^p overflows in
    float32 every result is zero. Pascanu, Mikolov, Bengio, ICML 2013 (arXiv 1211.5063),
    algorithm 1; eps is placed as in PyTorch (optax has none).
    """

    max_norm: Annotated[float, Field(gt=0)] = 1.0
    p: NormOrder = 2.0
    eps: Annotated[float, Field(ge=0)] = 1e-6

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"odd", "sign_preserving", "norm_non_increasing", "deterministic"})

    @property
    def acts_on_shards(self) -> bool:
        return self.p < inf  # an empty part has no largest entry

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return {}

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        if self.p < inf and _alike(grads) and grads[0].dtype in (torch.float32, torch.float64):
            factor = self._factor(autograd.foreach_norm(list(grads), self.p))
            return list(autograd.foreach_mul(list(grads), factor)), state
        norms = _norms([grad for grad in grads if grad.numel() or self.p < inf], self.p)
        if not norms:
            return list(grads), state
        return _scale(grads, self._factor(norms)), state

    @property
    def example_bound(self) -> float | None:
        return self.max_norm if self.p == 2 else None

    def example_weights(
        self, norms: Callable[[], Tensor], context: TransformContext
    ) -> Tensor | None:
        return self._scale(norms()) if self.p == 2 else None

    def _factor(self, norms: Sequence[Tensor]) -> Tensor:
        whole = over_shards(torch.stack(list(norms)), self.p)
        return self._scale(torch.linalg.vector_norm(whole, self.p))

    def _scale(self, norm: Tensor) -> Tensor:
        return (self.max_norm / (norm + self.eps)).clamp(max=1.0)


def _alike(grads: Sequence[Tensor]) -> bool:
    """Return whether fused operations apply: one dtype, one device, no vmap."""
    kinds = {(grad.dtype, grad.device) for grad in grads}
    return len(kinds) == 1 and not autograd.in_functorch()


def _norms(grads: Sequence[Tensor], p: float) -> list[Tensor]:
    """Return the norm of each gradient on the first one's device, in their widest dtype."""
    dtype = reduce(torch.promote_types, (grad.dtype for grad in grads), torch.float32)
    if autograd.in_functorch():  # `torch.vmap` has no rule for the `_foreach` functions
        return [torch.linalg.vector_norm(grad, p, dtype=dtype) for grad in grads]
    norms = torch.ops.aten._foreach_norm.Scalar(list(grads), p, dtype) if grads else []
    return [norm.to(norms[0].device) for norm in norms]


def _scale(grads: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    same = all(grad.device == factor.device for grad in grads)
    if same and not autograd.in_functorch():
        scaled = torch.ops.aten._foreach_mul.Tensor(list(grads), factor)
    else:
        scaled = [grad * factor.to(grad.device) for grad in grads]
    # A gradient without axes takes on the factor's dtype.
    return [result.to(grad.dtype) for result, grad in zip(scaled, grads, strict=True)]
