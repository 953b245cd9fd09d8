"""The accepted differences from the reference, each with its reason."""

import re

ACCEPTED: dict[str, str] = {
    "runs *test_examples: only in the working tree": (
        "the verdict names the population, so a run's summary has its number of test examples"
    ),
    "runs *: composed config splits: only in the working tree": (
        "splits= trains the seeds of one study on several splits; 1, the default, is as before"
    ),
    "runs *: composed config margin: only in the working tree": (
        "margin= asks for equivalence; null, the default, leaves the files of a run as before"
    ),
    "runs report of * outcome.md*": (
        "the interval inverts the sign-flip test, below six seeds it is the range; median and "
        "paired t interval are details; hints are gone"
    ),
    "runs loggers: W&B */report *study.*": ("the table of the study has the columns of that frame"),
    "runs report of * comparison.parquet*": ("the comparison is a frame, and written as one"),
    "runs *: composed config log: only in the working tree": (
        "a new key of the command line: which sites' effects the loggers get"
    ),
    "EveryModule * | changes | copies: hooks left: *": (
        "a copy keeps two hooks without effect on the model where two global ones had gone"
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
