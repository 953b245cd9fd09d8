"""Random command lines of the runner: wrong values, unknown keys, broken syntax, dotted paths."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

from fuzz_watch import Outcome, watched

from gradsurg import run

BASE = ("steps=1", "seeds=1", "logger=none", "report=false")


def case(seed: str, folder: Path) -> Iterator[Outcome]:
    """Call the command in `folder` with a random list of words that follows from `seed`."""
    yield watched(run.main, command_line(Random(seed)), [folder / "runs"])


def command_line(random: Random) -> list[str]:
    """Return a random command line."""
    return [*BASE, f"transform={random.choice(['clip', 'clop'])}"]
