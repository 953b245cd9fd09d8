"""One aggregator in place: what it makes of the rows of each of its groups."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from operator import add

from torch import Tensor

from gradsurg.aggregators.base import (
    Aggregator,
    AggregatorContext,
    AggregatorState,
    Entrywise,
    GramianAggregator,
    LossWeighting,
    NormMatchedSum,
    checked_update,
    norm_matched_sums,
)
from gradsurg.aggregators.rows import at_least_float32, combine, combine_safely, gramian_of


@dataclass(frozen=True)
class Merged:
    """One gradient for each block of a group; the weights and G, where they were found."""

    grads: list[Tensor]
    state: AggregatorState
    weights: Tensor | None = None
    gramian: Tensor | None = None


def merge(
    aggregator: Aggregator,
    blocks: Sequence[Tensor],
    state: AggregatorState,
    context: AggregatorContext,
    scale: float = 1.0,
) -> Merged:
    """What an aggregator makes of the rows (T, p) of each block, which are one matrix together.

    They are times the loss `scale`, and so is what comes out.
    """
    match aggregator:
        case GramianAggregator():
            gramian = gramian_of(blocks) / scale**2
            weights, state = checked_update(aggregator, gramian, state, context)
            return Merged(combine_safely(blocks, weights, gramian), state, weights, gramian)
        case LossWeighting():
            weights, state = aggregator.weigh(len(blocks[0]), state, context)
            return Merged([combine(rows, weights) for rows in blocks], state, weights)
        case Entrywise():
            starts = [0, *accumulate(rows.shape[1] for rows in blocks)]
            grads = [
                aggregator.apply(rows, replace(context, start=start))
                for rows, start in zip(blocks, starts, strict=False)
            ]
            return Merged(grads, state)
        case NormMatchedSum():
            made = merge(aggregator.of, blocks, state, context, scale)
            return Merged(norm_matched_sums(blocks, made.grads), made.state)
        case _:
            if len(blocks) > 1:
                kinds = ", ".join(f"{rows.dtype} on {rows.device}" for rows in blocks)
                raise TypeError(
                    f"{type(aggregator).__name__} takes parameters of one dtype and device, "
                    f"found {kinds}"
                )
            grad, state = aggregator.merge(blocks[0], state, context)
            return Merged([grad], state)


def products(blocks: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """g_i . d (T,) in float64, for a gradient d of each block."""
    pairs = zip(map(at_least_float32, blocks), grads, strict=True)
    return reduce(add, [(rows @ grad.to(rows.dtype)).double().cpu() for rows, grad in pairs])
