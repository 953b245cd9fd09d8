"""The accepted differences from the reference, each with its reason."""

import re

ACCEPTED: dict[str, str] = {
    "runs loggers: W&B *report config versions: *": "they name a hash of the source",
    "*: rows: * norm_max is new": "the largest norm of a site, a new number of its effects",
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
