"""ClipGlobalNorm: bound the norm of all gradients of a group together."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.fields import validated
from gradsurg.transforms.base import Context, GroupTransform, Law, State
from gradsurg.per import Order, widened


@validated
class ClipGlobalNorm(GroupTransform):
    """Scale all gradients of a group by min(1, max_norm / (N + eps)), N their common p-norm.

    Any shapes. At N = 0 nothing changes. A NaN or an infinity in one gradient makes N non-finite
    and with it every result NaN or zero, as `torch.nn.utils.clip_grad_norm_` does; put `Sanitize`
    before it to change that. Empty tensors count nothing. Pascanu, Mikolov, Bengio, "On the
    difficulty of training recurrent neural networks", ICML 2013 (arXiv 1211.5063), algorithm 1;
    eps is placed as in PyTorch (optax has none).
    """

    max_norm: Annotated[float, Field(gt=0)] = 1.0
    p: Order = 2.0
    eps: Annotated[float, Field(ge=0)] = 1e-6

    @property
    def laws(self) -> frozenset[Law]:
        return frozenset({"odd", "sign_preserving", "norm_non_increasing", "deterministic"})

    def init_group(self, grads: Sequence[Tensor]) -> State:
        return {}

    def update_group(
        self, grads: Sequence[Tensor], state: State, contexts: Sequence[Context]
    ) -> tuple[list[Tensor], State]:
        if not grads:
            return [], state
        norms = torch._foreach_norm([widened(grad) for grad in grads], self.p)
        total = torch.linalg.vector_norm(_stack(norms), self.p)
        factor = (self.max_norm / (total + self.eps)).clamp(max=1.0)
        return _scale(grads, factor), state


def _stack(norms: Sequence[Tensor]) -> Tensor:
    first = norms[0]
    return torch.stack([norm.to(first.device, first.dtype) for norm in norms])


def _scale(grads: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    device = factor.device
    if all(grad.device == device for grad in grads):
        return list(torch._foreach_mul(list(grads), factor))
    return [grad * factor.to(grad.device) for grad in grads]
