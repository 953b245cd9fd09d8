"""The accepted differences from the reference, each with its reason."""

import re

_MEMORY = "a memory constrains and is not followed: its own head is combined like shared parameters"

_VALIDATION = "a call without gradients changes no state at Activations and EveryModule"

ACCEPTED: dict[str, str] = {
    "EveryModule * | evaluation between | Momentum: *": _VALIDATION,
    "Activations* | evaluation between | Momentum: *": _VALIDATION,
    "SharedParameters | plain | default AGEM: *": _MEMORY,
    "SharedParameters | plain | default GEM: *": _MEMORY,
    "* | overflow | Momentum: warnings: was None, now at *": (
        "a state that holds a NaN is told when the block ends"
    ),
    "runs *: composed config schedule name: only in the reference": "no schedule: {}",
    "runs *: composed config logger *": "the console has lines, and W&B no project by default",
    "runs loggers: W&B *": "digest of the surgery, best values, config and verdict of a report",
    "runs * idle: only in the working tree": (
        "a run in which no transform changed a gradient says so in its summary, and in the frame"
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
