"""Damaged run folders, given to the report and to the command."""

from collections.abc import Iterator
from pathlib import Path

from fuzz_watch import Outcome


def case(seed: str, folder: Path) -> Iterator[Outcome]:
    """Damage the files of a finished study in `folder`, and yield the outcomes of commands on it.

    Every random choice follows from `seed`.
    """
    yield from ()
