"""ClipGlobalNorm: bound the joint norm of all gradients of a group."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import NormOrder, joint_norm
from gradsurg.transforms.base import ExampleWeighting, JointScaling, TransformContext


@validated
class ClipGlobalNorm(JointScaling, ExampleWeighting):
    """Scale all gradients of a group by min(1, max_norm / (N + eps)), N their joint p-norm.

    Pascanu, Mikolov, Bengio, ICML 2013 (arXiv 1211.5063), algorithm 1; eps is placed as in PyTorch
    (optax has none). `ClipNorm` clips each gradient by its own norm.

    Any shapes and dtypes. Zero gradients stay zero, empty tensors stay empty. A NaN or an infinity
    in one gradient makes N non-finite and every result NaN or zero, like
    `torch.nn.utils.clip_grad_norm_`. Put `Sanitize` before it to avoid that. If N^p overflows in
    float32 every result is zero.

    >>> layer = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> with gs.Surgery(gs.Intervention(gs.ClipGlobalNorm(1.0))).attach(layer, optimizer):
    ...     layer(torch.tensor([2.0, -2.0])).backward()
    ...     optimizer.step()  # the surgery acts before the step
    >>> layer.weight.grad, layer.bias.grad  # 2, -2 and 1 have the norm 3
    (tensor([[ 0.6667, -0.6667]]), tensor([0.3333]))
    """

    max_norm: Annotated[float, Field(gt=0)] = 1.0
    p: NormOrder = 2.0
    eps: Annotated[float, Field(ge=0)] = 1e-6

    tags = frozenset(
        {"odd", "sign_preserving", "norm_non_increasing", "deterministic", "differentiable"}
    )

    @property
    def acts_on_shards(self) -> bool:
        return self.p < inf  # an empty part has no largest entry

    def joint_factor(self, grads: Sequence[Tensor]) -> Tensor:
        entries = [grad for grad in grads if grad.numel() or self.p < inf]
        return self._scale(joint_norm(entries, self.p)) if entries else torch.ones(())

    @property
    def example_bound(self) -> float | None:
        return self.max_norm if self.p == 2 else None

    def example_weights(
        self, norms: Callable[[], Tensor], context: TransformContext
    ) -> Tensor | None:
        return self._scale(norms()) if self.p == 2 else None

    def _scale(self, norm: Tensor) -> Tensor:
        return (self.max_norm / (norm + self.eps)).clamp(max=1.0)
