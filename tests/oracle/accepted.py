"""The accepted differences from the reference, each with its reason."""

import re

_COLUMNS = "columns for rate, steps, tuning, lengths and data in the place of `population`"

ACCEPTED: dict[str, str] = {
    "runs *chance_loss: only in the working tree": "the loss of the best constant guess is noted",
    "runs report of * comparison.parquet *: only in the working tree": _COLUMNS,
    "runs report of * comparison.parquet population: only in the reference": _COLUMNS,
    "runs report of * runs.parquet *: only in the working tree": _COLUMNS,
    "runs report of * outcome.md *: * entries, reference *": _COLUMNS,
    "runs loggers: W&B runs/*/report *": "the verdict names rate and steps; more columns",
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
