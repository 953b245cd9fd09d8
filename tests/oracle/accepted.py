"""The accepted differences from the reference, each with its reason."""

import re

ACCEPTED: dict[str, str] = {
    "SavedTensors node | two interventions | *: refused: RuntimeError, now acts": "they share "
    "the pair of hooks that a node can have",
    "SavedTensors node | changes | add, set, remove: refused: RuntimeError, now acts": "as above",
    "Inputs total | models | attention, *: warnings: was at *": "a tensor that is passed three "
    "times was told of as silent under one of its names",
    "runs loggers: W&B *report config versions: *": "they name a hash of the source",
    "runs *validation_examples: only in the working tree": "their number is noted, as of the tests",
    "runs *note_details: only in the working tree": "numbers of a note have a field of their own",
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
