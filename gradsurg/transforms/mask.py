"""Mask: keep some entries and zero the rest."""

from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.plugins.reductions import Per, reduced_axes
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty

LEAST = 1e-9  # the least probability whose coins are unbiased to 1e-5


@validated
class Mask(Stateless):
    """Keep some entries and zero the rest.

    | `by` | entries that are kept |
    |---|---|
    | `largest` | the k of largest magnitude |
    | `threshold` | those with abs(g) > amount |
    | `random` | each with probability `amount`, at least 1e-9, independently |
    | `random_k` | k drawn uniformly |

    k = max(1, round(amount * d)), where d is the number of entries of the tensor, or of each group
    selected by `per`. `rescale` multiplies kept entries by d / k (`largest`, `random_k`) or by
    1 / amount (`random`), which makes the random choices unbiased.

    Any shape; an empty tensor stays empty, zero stays zero. `largest` orders NaN above infinity
    above all numbers and so keeps both if k suffices; `threshold` keeps both; the random choices
    may drop either. `rescale` leaves NaN and infinities unchanged. Aji and Heafield, EMNLP 2017
    (arXiv 1704.05021) for `largest` (without their residual) and `threshold`; Child-Tuning, Xu et
    al., EMNLP 2021 (arXiv 2109.05687) for `random` with `rescale`.
    """

    amount: Annotated[float, Field(gt=0)] = 0.1
    _: KW_ONLY
    by: Literal["largest", "threshold", "random", "random_k"] = "largest"
    per: Per = "tensor"
    rescale: bool = False

    def __post_init__(self) -> None:
        if self.by != "threshold" and self.amount > 1:
            raise Contradiction("amount", f"must be <= 1 with by={self.by}, found {self.amount}")
        if self.by == "random" and self.amount < LEAST:
            raise Contradiction(
                "amount", f"must be >= {LEAST:g} with by=random, found {self.amount:g}"
            )
        if self.by == "threshold" and self.rescale:
            raise Contradiction(
                "rescale", "must be false with by=threshold, which keeps no fixed fraction"
            )
        if self.by in ("threshold", "random") and self.per != "tensor":
            raise Contradiction("per", f"must be tensor with by={self.by}, found {self.per}")

    @property
    def properties(self) -> frozenset[TransformProperty]:
        properties: set[TransformProperty] = {"odd", "sign_preserving"}
        if not self.rescale:
            properties |= {"norm_non_increasing"}
        match self.by:
            case "largest":
                properties |= {"homogeneous", "deterministic"}
                properties |= set() if self.rescale else {"idempotent"}
            case "threshold":
                properties |= {"elementwise", "idempotent", "deterministic"}
            case "random" | "random_k":
                # Not linear: two accumulated gradients have other draws than their sum.
                properties |= {"elementwise", "homogeneous"}
                properties |= {"unbiased"} if self.rescale else set()
        return frozenset(properties)

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        match self.by:
            case "largest":
                kept, gain = _largest(grad.abs(), self.amount, self.per)
            case "threshold":
                kept, gain = ~(grad.abs() <= self.amount), 1.0
            case "random":
                kept, gain = _coins(grad, self.amount, context), 1 / self.amount
            case "random_k":
                generator = context.generator(grad.device)
                draws = torch.rand(grad.shape, generator=generator, device=grad.device)
                kept, gain = _largest(draws, self.amount, self.per)
        return torch.where(kept, grad * gain if self.rescale else grad, 0.0)


def _coins(grad: Tensor, amount: float, context: TransformContext) -> Tensor:
    """Return True for each entry with probability `amount`, up to 2^-48.

    A draw has 24 bits; if they leave it open a second draw decides.
    """
    generator = context.generator(grad.device)
    lowest, rest = divmod(amount * 2**24, 1)
    draws = torch.rand(grad.shape, generator=generator, device=grad.device)
    coins = (draws * 2**24).floor()
    if not rest:
        return coins < lowest
    draws = torch.rand(grad.shape, generator=generator, device=grad.device)
    return (coins < lowest) | ((coins == lowest) & (draws < rest))


def _largest(sizes: Tensor, amount: float, per: str) -> tuple[Tensor, float]:
    """Return a mask of the k largest entries of each group, and d / k."""
    axes = reduced_axes(per, sizes.ndim)
    if sizes.numel() == 0 or not axes:
        return torch.ones_like(sizes, dtype=torch.bool), 1.0
    apart = [axis for axis in range(sizes.ndim) if axis not in axes]
    moved = sizes.permute(*apart, *axes)
    # `flatten` has no rule for `is_grads_batched`.
    rows = moved.reshape(*moved.shape[: len(apart)], -1)
    size = rows.shape[-1]
    k = max(1, round(amount * size))
    top = rows.topk(k, dim=-1, sorted=False).indices
    kept = torch.zeros_like(rows, dtype=torch.bool).scatter(-1, top, True)
    back = sorted(range(sizes.ndim), key=[*apart, *axes].__getitem__)
    return kept.reshape(moved.shape).permute(*back), size / k
