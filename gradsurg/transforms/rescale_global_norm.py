"""RescaleGlobalNorm: rescale all gradients of a group to a fixed joint norm."""

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import joint_norm
from gradsurg.transforms.base import JointScaling, TransformProperty


@validated
class RescaleGlobalNorm(JointScaling):
    """Scale all gradients of a group by norm / (N + eps), N their joint 2-norm.

    Normalized gradient descent of Hazan et al., NeurIPS 2015 (arXiv 1507.02030), algorithm 1;
    optax's `normalize_by_update_norm` has eps 1e-6. `NormRescale` has a norm for each tensor.

    Any shapes and dtypes. If all are zero they stay zero; empty tensors stay empty. A NaN in one
    gradient makes all entries NaN; an infinity becomes NaN and all other entries zero. If N^2
    overflows in float32 every result is zero.
    """

    norm: Annotated[float, Field(gt=0)] = 1.0
    _: KW_ONLY
    eps: Annotated[float, Field(ge=0)] = 0.0

    tags = frozenset({"odd", "sign_preserving", "deterministic", "differentiable"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"idempotent": self.eps == 0}

    @property
    def acts_on_shards(self) -> bool:
        return True

    def joint_factor(self, grads: Sequence[Tensor]) -> Tensor:
        total = joint_norm(grads)
        return torch.where(total == 0, 1.0, self.norm / (total + self.eps))
