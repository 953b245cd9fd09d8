"""The user's cache folder for data sets, filled by `python -m gradsurg.tasks.fetch`."""

import os
from pathlib import Path


def home() -> Path:
    """Return GRADSURG_DATA, or gradsurg/ in XDG_CACHE_HOME, or in ~/.cache.

    Read at each call. GRADSURG_DATA is the only setting of gradsurg in the environment: the place
    of data is a property of the machine, not of an experiment.
    """
    if folder := os.environ.get("GRADSURG_DATA"):
        return Path(folder).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a relative path.
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "gradsurg"


def place(name: str) -> Path:
    """Return the folder of one data set."""
    return home() / name


def command(name: str) -> str:
    """Return the quoted command that fetches a data set, for error messages."""
    return f"'python -m gradsurg.tasks.fetch {name}'"
