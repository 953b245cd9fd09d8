"""GradDrop: keep the values of one sign in each entry, chosen at random by sign purity."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import AggregatorContext, AggregatorProperty, Entrywise
from gradsurg.plugins.fields import validated

ENTRIES = 1 << 20
"""Entries (rows x columns) of a block on the CPU, chosen for its cache; each block has a generator.
"""

DEVICE_ENTRIES = 1 << 23
"""The same on an accelerator, where a launch costs more than the cache saves."""

Share = Annotated[float, Field(ge=0, le=1)]


@validated
class GradDrop(Entrywise):
    """Keep the values of one sign in each entry, chosen at random by the share of that sign.

    `leak` is l, one number for all tasks or one for each: the share that passes whatever its sign.

    The result is sum_i (l_i + (1 - l_i) M_i) g_i, where the mask M_i keeps one of the two signs.
    With U uniform on [0, 1) and P = (1 + sum g_i / sum |g_i|) / 2, the positive values are kept if
    P > 1 - U, otherwise the negative ones.

    Chen et al., NeurIPS 2020 (arXiv 2010.06808), equation 1 and algorithm 1 with f(P) = P, applied
    to gradients of parameters.

    Where all tasks agree on the sign the entry is always their sum. P is not computed by a
    division, so tiny gradients keep their probabilities. Entries draw from generators of (seed,
    group, step, block), so splitting the columns changes nothing but the rounding of sums; another
    device draws different numbers. A zero contributes nothing, a NaN makes its column NaN, one task
    is unchanged. Subnormal entries may be dropped.
    """

    _: KW_ONLY
    leak: Share | Annotated[tuple[Share, ...], Field(min_length=1)] = 0.0

    @property
    def num_tasks(self) -> int | None:
        return len(self.leak) if isinstance(self.leak, tuple) else None

    tags = frozenset({"homogeneous"})

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        leaks = set(self.leak) if isinstance(self.leak, tuple) else {self.leak}
        return {
            "permutation_invariant": len(leaks) == 1,
            "strongly_stationary": leaks == {0.0} or leaks == {1.0},
            "linear_under_scaling": leaks == {1.0},
            "deterministic": leaks == {1.0},
        }

    def apply(self, rows: Tensor, context: AggregatorContext) -> Tensor:
        entries = ENTRIES if rows.device.type == "cpu" else DEVICE_ENTRIES
        width = max(1, entries // len(rows))
        stop = context.start + rows.shape[1]
        wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
        result = torch.empty_like(rows[0])
        leaks = self._leaks(rows, wide)
        # One buffer for all blocks: allocating one for each takes longer than the sums.
        buffer = rows.new_empty(len(rows), min(width, rows.shape[1]), dtype=wide)
        for block in range(context.start // width, -(-stop // width)):
            low, high = max(context.start, block * width), min(stop, (block + 1) * width)
            here = slice(low - context.start, high - context.start)
            chance = _uniform(width, high - block * width, context.generator(rows.device, block))
            chance = chance[low - block * width :].to(wide)
            part = rows[:, here].to(wide)
            _one_sign(part, chance, leaks, buffer[:, : high - low], result[here])
        return result

    def _leaks(self, rows: Tensor, wide: torch.dtype) -> Tensor | None:
        if not isinstance(self.leak, tuple):
            return rows.new_full((len(rows),), self.leak, dtype=wide) if self.leak else None
        if len(self.leak) != len(rows):
            raise ValueError(
                f"GradDrop.leak: must be one number or one for each task, found {len(self.leak)} "
                f"numbers for {len(rows)} tasks"
            )
        return rows.new_tensor(self.leak, dtype=wide)


def _uniform(width: int, count: int, generator: torch.Generator) -> Tensor:
    """Return the first `count` of `width` uniform numbers, multiples of 2**-24 in [0, 1)."""
    if generator.device.type != "cpu":
        return torch.rand(width, generator=generator, device=generator.device)[:count]
    # A CPU generator is sequential, so numbers after `count` need not be drawn. Two numbers from
    # each 64 bits take three quarters of the time.
    bits = torch.empty(-(-count // 2), dtype=torch.int64).random_(
        -(2**63), None, generator=generator
    )
    return (bits.view(torch.int32)[:count] >> 8).mul(2.0**-24).add_(0.5)


def _one_sign(
    rows: Tensor, chance: Tensor, leaks: Tensor | None, buffer: Tensor, result: Tensor
) -> None:
    """Write the sum of the kept sign of each column, plus the leaked part, to `result`."""
    positive = torch.clamp(rows, min=0, out=buffer)
    above = positive.sum(0)
    kept_above = above if leaks is None else (1 - leaks) @ positive
    negative = torch.clamp(rows, max=0, out=buffer)
    below = negative.sum(0)
    kept_below = below if leaks is None else (1 - leaks) @ negative
    # P > 1 - U without the division: U above + (1 - U) below > 0. It is never 0 where all values
    # are negative, as U < 1. Clamping an infinity of its sign to the two sums selects one of them,
    # ten times as fast as a random mask.
    side = torch.copysign(chance.new_tensor(torch.inf), torch.lerp(below, above, chance))
    kept = torch.clamp(side, kept_below, kept_above)
    result.copy_(kept if leaks is None else kept + leaks @ rows)
