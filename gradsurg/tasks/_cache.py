"""The user's cache folder, where `python -m gradsurg.tasks.fetch` puts data sets."""

import os
from pathlib import Path


def home() -> Path:
    """GRADSURG_DATA, or gradsurg/ in XDG_CACHE_HOME, or in ~/.cache.

    It is looked up at each call, and the only thing that gradsurg asks the environment for: where
    the data lie is a matter of the machine, not of an experiment.
    """
    if own := os.environ.get("GRADSURG_DATA"):
        return Path(own).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG specification has a relative path ignored
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "gradsurg"


def place(name: str) -> Path:
    """The folder of one data set."""
    return home() / name


def command(name: str) -> str:
    """How to get it, for a sentence."""
    return f"'python -m gradsurg.tasks.fetch {name}'"
