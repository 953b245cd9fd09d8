"""Mask: keep some entries and zero the rest."""

from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.plugins.reductions import Per, reduced_axes
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty

MIN_PROBABILITY = 1e-9  # the smallest probability at which a random mask is unbiased to 1e-5


@validated
class Mask(Stateless):
    """Keep some entries and zero the rest.

    Args:

    - `amount`: the fraction of entries that are kept, or with `by=threshold` the magnitude to
      exceed.
    - `rescale`: multiply the k kept of d entries by d / k (`largest`, `random_k`) or by 1 / amount
      (`random`), which makes the random choices unbiased.
    - `per`: the group for `largest` and `random_k`, `tensor`, `unit` (an index of axis 0), `entry`
      or an einops pattern such as `o i kh kw -> o i`; must be `tensor` with the other two.

    | `by` | entries that are kept |
    |---|---|
    | `largest` | the k of largest magnitude |
    | `threshold` | entries with abs(g) > amount |
    | `random` | each independently with probability `amount`, which must be at least 1e-9 |
    | `random_k` | k drawn uniformly |

    k = max(1, round(amount * d)), where d is the number of entries of the tensor or the group.

    Aji and Heafield, EMNLP 2017 (arXiv 1704.05021) for `largest` (without their residual) and
    `threshold`; Child-Tuning, Xu et al., EMNLP 2021 (arXiv 2109.05687) for `random` with `rescale`.

    Any shape; an empty tensor stays empty, zero stays zero. `threshold` keeps NaN and infinities.
    For `largest` NaN is the largest and infinity the second largest, so it keeps them if k is large
    enough. The random choices may drop them. `rescale` leaves them unchanged.

    >>> layer = nn.Linear(4, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.Mask(0.5))).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0, 1.0, 2.0])).backward()
    >>> layer.weight.grad  # the larger half
    tensor([[ 3., -4.,  0.,  0.]])
    """

    amount: Annotated[float, Field(gt=0)] = 0.1
    _: KW_ONLY
    by: Literal["largest", "threshold", "random", "random_k"] = "largest"
    per: Per = "tensor"
    rescale: bool = False

    def __post_init__(self) -> None:
        if self.by != "threshold" and self.amount > 1:
            raise Contradiction("amount", f"must be <= 1 with by={self.by}, found {self.amount}")
        if self.by == "random" and self.amount < MIN_PROBABILITY:
            raise Contradiction(
                "amount", f"must be >= {MIN_PROBABILITY:g} with by=random, found {self.amount:g}"
            )
        if self.by == "threshold" and self.rescale:
            raise Contradiction(
                "rescale", "must be false with by=threshold, which keeps no fixed fraction"
            )
        if self.by in ("threshold", "random") and self.per != "tensor":
            raise Contradiction("per", f"must be tensor with by={self.by}, found {self.per}")

    tags = frozenset({"odd", "sign_preserving", "differentiable"})

    def tags_if(self) -> dict[TransformProperty, bool]:
        largest, draws = self.by == "largest", self.by in ("random", "random_k")
        return {
            "norm_non_increasing": not self.rescale,
            "elementwise": not largest,
            # Not linear if it draws: two accumulated gradients have other draws than their sum.
            "homogeneous": largest or draws,
            "deterministic": not draws,
            "idempotent": not draws and not (largest and self.rescale),
            "unbiased": draws and self.rescale,
        }

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        match self.by:
            case "largest":
                mask, factor = largest(grad.abs(), self.amount, self.per)
            case "threshold":
                mask, factor = ~(grad.abs() <= self.amount), 1.0
            case "random":
                mask, factor = _random_mask(grad, self.amount, context), 1 / self.amount
            case "random_k":
                generator = context.generator(grad.device)
                draws = torch.rand(grad.shape, generator=generator, device=grad.device)
                mask, factor = largest(draws, self.amount, self.per)
        return torch.where(mask, grad * factor if self.rescale else grad, 0.0)


def _random_mask(grad: Tensor, amount: float, context: TransformContext) -> Tensor:
    """Return a mask that is True with probability `amount`, up to 2^-48, for each entry.

    `torch.rand` draws multiples of 2^-24, so a second draw decides for the multiple below `amount`.
    """
    generator = context.generator(grad.device)
    limit, remainder = divmod(amount * 2**24, 1)
    draws = torch.rand(grad.shape, generator=generator, device=grad.device)
    multiples = multiples_of(draws, draws.is_cuda)
    if not remainder:
        return multiples < limit
    draws = torch.rand(grad.shape, generator=generator, device=grad.device)
    return (multiples < limit) | ((multiples == limit) & (draws < remainder))


def multiples_of(draws: Tensor, is_cuda: bool) -> Tensor:
    """Return k with k <= 2^24 draw < k + 1, of uniform draws by `torch.rand`."""
    if is_cuda:  # it draws from (0, 1], and returns 0 for 1
        draws = torch.where(draws == 0, 1 - 2**-24, draws)
    return (draws * 2**24).floor()


def largest(sizes: Tensor, amount: float, per: str) -> tuple[Tensor, float]:
    """Return a mask of the k largest entries of each group, and d / k."""
    axes = reduced_axes(per, sizes.ndim)
    if sizes.numel() == 0 or not axes:
        return torch.ones_like(sizes, dtype=torch.bool), 1.0
    group_axes = [axis for axis in range(sizes.ndim) if axis not in axes]
    permuted = sizes.permute(*group_axes, *axes)
    # `flatten` has no rule for `is_grads_batched`.
    groups = permuted.reshape(*permuted.shape[: len(group_axes)], -1)
    size = groups.shape[-1]
    k = max(1, round(amount * size))
    largest = groups.topk(k, dim=-1, sorted=False).indices
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter(-1, largest, True)
    inverse = sorted(range(sizes.ndim), key=[*group_axes, *axes].__getitem__)
    return mask.reshape(permuted.shape).permute(*inverse), size / k
