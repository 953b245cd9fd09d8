"""The accepted differences from the reference, each with its reason."""

import re

ROUNDING = "closed forms for two tasks and Gramians in float64: other rounding"

EXTREMES = "the largest norm, its step and the first NaN or infinity are new numbers of effects"

ACCEPTED: dict[str, str] = {
    "runs loggers: W&B *report config versions: *": "they name a hash of the source",
    "*norm_max is new": EXTREMES,
    "runs *norm_max*: only in the working tree": EXTREMES,
    "runs *nonfinite_*: only in the working tree": EXTREMES,
    "runs loggers: W&B * effects.*": "the table has columns for these numbers",
    "runs loggers: W&B * metrics*": "it has a metric for the largest norm of each site",
    "SharedParameters |*differs by up to *e-08": ROUNDING,
    "SharedParameters |*differs by up to *e-09": ROUNDING,
    "SharedParameters |*differs by up to *e-10": ROUNDING,
    "SharedParameters |*: rows: conflicts */cosine/*": ROUNDING,
    "SharedParameters |*: rows: conflicts */decrease/*": ROUNDING,
    "runs feature: *others sdmgrad *": f"its iteration amplifies the rounding: {ROUNDING}",
    "*: warnings: was at lin_a.weight, now at lin_*": (
        "a warning of accumulation names the place whose second gradient comes first"
    ),
    "* | a transform raises: weights: *": (
        "weights and updates are written place by place, as gradients are: where a user's "
        "transform raises, those before it are written"
    ),
}
"""Reasons by pattern: the line of a difference as printed, with `*` for the parts that vary.

At most 15 in all, and none in weights without an issue that says so.
"""


def unaccepted(differences: list[str]) -> list[str]:
    """Return the differences that no pattern of ACCEPTED matches."""
    patterns = [".*".join(map(re.escape, line.split("*"))) for line in ACCEPTED]
    return [
        line for line in differences if not any(re.fullmatch(pattern, line) for pattern in patterns)
    ]
