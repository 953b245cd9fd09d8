"""A data set comes into its folder as a whole, also if a fetch is killed."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def drafting(home: Path) -> Iterator[Path]:
    """A new folder in `home`, for one fetch at a time; what a killed one left is removed."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft = home / ".draft"
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir()
        try:
            yield draft
        finally:
            shutil.rmtree(draft)


def put(whole: Path, place: Path) -> None:
    """Move a folder to its place; where one is already, its files take the place of those there."""
    for path in whole.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if not place.exists():
        whole.rename(place)
        return
    for path in whole.iterdir():
        path.replace(place / path.name)
