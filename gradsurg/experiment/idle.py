"""Notes on transforms that changed no gradient, with bounds that would have changed some."""

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median

from gradsurg.core.live import Live
from gradsurg.core.surgery import Surgery
from gradsurg.transforms.identity import Identity

QUANTILES = (0.5, 0.9, 0.99, 1.0)  # of |g|, in the note on a transform that changed nothing
MAX_BOUND = 0.9  # of the largest entry or norm: still below it when rounded to two digits


def idle_notes(surgery: Surgery, live: Live, effects_every: int) -> tuple[dict[str, str], bool]:
    """Return notes with their details, and whether no transform changed an entry.

    A transform that changed no entry at the measured steps has a note, with quantiles of |g| and
    bounds that would have changed some. One that may skip steps has a note with their number.
    """
    where = f" at the steps measured, one in {effects_every}" if effects_every > 1 else ""
    skipped, notes = live.skipped_steps, dict[str, str]()
    for label, number in skipped.items():
        steps = "steps" if number else "no step"
        details = f"{number} of {live.step} in the first of these" if number else ""
        notes[f"{label} skipped {steps} of the optimizer"] = details
    identities = {  # which should change nothing
        label
        for item, labels in zip(surgery.interventions, surgery.labels, strict=True)
        for label, link in zip(labels, item.links, strict=item.aggregator is None)
        if isinstance(link, Identity)
    }
    effects: dict[str, list[Mapping[str, object]]] = {}
    for row in live.effects.rows():
        effects.setdefault(str(row["transform"]), []).append(row)
    acting = [rows for transform, rows in effects.items() if transform not in identities]
    changed = [row["changed"] for rows in acting for row in rows if row["changed"] is not None]
    combines = any(item.aggregator is not None for item in surgery.interventions)
    idle = bool(changed) and not (any(changed) or any(skipped.values()) or combines)
    for transform, rows in effects.items():
        if transform in (*identities, *skipped) or any(row["changed"] for row in rows):
            continue
        quantiles = live.effects.quantiles(transform, QUANTILES)
        norms = [row["norm_before"] for row in rows]
        norms = [norm for norm in norms if isinstance(norm, float) and isfinite(norm)]
        if quantiles and norms:
            each = zip(QUANTILES, quantiles, strict=True)
            shown = ", ".join(f"{share:.0%} {value:.2g}" for share, value in each)
            reach = f"norms from {min(norms):.2g} to {max(norms):.2g}"
            details = f"Quantiles of |g|: {shown}; {reach}. {suggested_bounds(quantiles, norms)}"
            notes[f"{transform} changed nothing{where}"] = details
    return notes, idle


def note_fields(notes: Mapping[str, str]) -> dict[str, object]:
    """Return the fields of a summary for notes with their details.

    Details have numbers of the run, so that notes of several runs can be equal without them.
    """
    details = {note: text for note, text in notes.items() if text}
    return {"notes": [*notes], **({"note_details": details} if details else {})}


def suggested_bounds(quantiles: Sequence[float], norms: Sequence[float]) -> str:
    """Return a sentence with bounds below some entry and some norm, also after rounding.

    `quantiles` of |g| are those at `QUANTILES`.
    """
    largest, norm = quantiles[-1], max(norms)
    if not largest or not norm:
        return "The gradients were zero."
    usual = next(value for value in quantiles[1:] if value)
    entry_bound = min(usual, MAX_BOUND * largest)
    norm_bound = min(median(norms) or norm, MAX_BOUND * norm)
    bounds = f"{entry_bound:.2g} on entries, or of {norm_bound:.2g} on norms"
    return f"A bound of {bounds}, would change some."
