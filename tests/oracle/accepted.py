"""The accepted differences from the reference, each with its reason."""

import re

_ROUNDING = (
    "issue 35: `norm` no longer divides by the largest entry first where no power can overflow: "
    "the last bit of a norm differs, and is nearer to that in float64 more often than it was"
)

ACCEPTED: dict[str, str] = {
    "runs *test_examples: only in the working tree": (
        "the verdict names the population, so a run's summary has its number of test examples"
    ),
    "runs *: composed config *: only in the *": (
        "new keys whose defaults are as before: splits, margin, log; `ranks` and `runner` are gone"
    ),
    "runs report of * outcome.md*": (
        "the interval inverts the sign-flip test, below six seeds it is the range; median and "
        "paired t interval are details; hints are gone"
    ),
    "runs loggers: W&B */report *study.*": ("the table of the study has the columns of that frame"),
    "runs report of * comparison.parquet*": ("the comparison is a frame, and written as one"),
    "*: *differs by up to *e-*": _ROUNDING,  # below 1e-4
    "*: rows: *": _ROUNDING,  # numbers of effects; Captured counts gradients of zeros too
    "* Orthogonalize: weights: *": "the same, of a gradient whose rank is not full",
    "*: warnings: was at , now None": (
        "a plain callable is told of where it matters, and not where it is made"
    ),
    "*: warnings: was *, now at *": (
        "issue 35: what does not act, and what acts twice in a backward pass, is told in the first "
        "steps, and not at the end or never"
    ),
    "* | changes | late parts: *": (
        "issue 35: parameters that are thawed or added to an optimizer later join at stage `step`"
    ),
    "*: refused: *": (
        "issue 35: `Group` and `reduced` are `backward_end`, which acts under DDP and with "
        "PerSample, and skips no step; nothing is changed from inside a backward pass"
    ),
    "* | changes | *: hooks left: *": (
        "fewer hooks of the process, and none that a copy or a second block leaves behind"
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
