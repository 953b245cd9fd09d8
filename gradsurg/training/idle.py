"""Transforms that changed nothing in a whole run, and what would have."""

from collections.abc import Sequence
from math import isfinite
from statistics import median

from gradsurg.surgery.live import Live
from gradsurg.surgery.surgery import Surgery
from gradsurg.transforms.identity import Identity

LEVELS = (0.5, 0.9, 0.99, 1.0)  # the quantiles that are told of gradients that nothing changed
NEARLY = 0.9  # of the largest: rounded to two digits it is still below it


def changed_nothing(surgery: Surgery, live: Live, effects_every: int = 1) -> list[str]:
    """A note for each transform that changed no entry at the steps that were measured, one in
    `effects_every`, with bounds that would bite there.
    """
    idle = _identities(surgery)
    rows = live.effects.rows()
    where = f" at the steps measured, one in {effects_every}" if effects_every > 1 else ""
    notes = []
    for transform in dict.fromkeys(str(row["transform"]) for row in rows):
        own = [row for row in rows if row["transform"] == transform]
        if transform in idle or any(row["changed"] for row in own):
            continue
        quantiles = live.effects.quantiles(transform, LEVELS)
        norms = [row["norm_before"] for row in own]
        norms = [norm for norm in norms if isinstance(norm, float) and isfinite(norm)]
        if not quantiles or not norms:
            continue
        shown = ", ".join(f"{q:.0%} {v:.2g}" for q, v in zip(LEVELS, quantiles, strict=True))
        reach = f"norms from {min(norms):.2g} to {max(norms):.2g}"
        notes.append(
            f"{transform} changed nothing{where}. Quantiles of |g|: {shown}; {reach}. "
            + _would_bite(quantiles, norms)
        )
    return notes


def _identities(surgery: Surgery) -> set[str]:
    """The labels of what is meant to change nothing."""
    return {
        label
        for item, labels in zip(surgery.interventions, surgery.labels, strict=True)
        for label, link in zip(labels, item.links, strict=item.aggregator is None)
        if isinstance(link, Identity)
    }


def _would_bite(quantiles: Sequence[float], norms: Sequence[float]) -> str:
    """Bounds that are surely below some entry and some norm, also once they are rounded."""
    largest, norm = quantiles[-1], max(norms)
    if not largest or not norm:
        return "The gradients were zero."
    usual = next(value for value in quantiles[1:] if value)
    entry_bound = min(usual, NEARLY * largest)
    norm_bound = min(median(norms) or norm, NEARLY * norm)
    return f"A bound of {entry_bound:.2g} on entries, or of {norm_bound:.2g} on norms, would bite."
