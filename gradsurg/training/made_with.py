"""What a run is computed by besides its config: versions, and gradsurg's own source."""

import hashlib
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy
import torch

from gradsurg import __version__

PACKAGE = Path(__file__).parents[1]
RESUMED = "went on from a checkpoint that was made with "


def versions() -> dict[str, str]:
    """The versions that a run's identity has.

    Of torch major and minor: another minor release has other kernels and defaults, so its numbers
    are not those of before. A patch release or another build (`+cpu`, `+cu126`) mends faults, and a
    study that began before one should not begin anew; nor for an edit in gradsurg's own source,
    which mostly is of a report or a message. `made_with` has all of that, and says what differs
    where bits could: in a run that went on from a checkpoint.
    """
    return {
        "gradsurg": __version__,
        "torch": ".".join(torch.__version__.split(".")[:2]),
    }


@cache
def made_with() -> dict[str, str]:
    """All that a bit can depend on, in full; gradsurg's source as eight hex digits."""
    files = sorted(PACKAGE.rglob("*.py"))
    source = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    return {
        "gradsurg": f"{__version__} (source {source})",
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def made_otherwise(before: Mapping[str, str]) -> str:
    """What to say of a run that goes on from a checkpoint; nothing if all is as it was."""
    now = made_with()
    others = [name for name in now if before.get(name) != now[name]]
    if not others:
        return ""
    was, is_now = (
        ", ".join(f"{name} {found.get(name, 'unknown')}" for name in others)
        for found in (before, now)
    )
    return f"{RESUMED}{was}, with {is_now}: it need not end bit for bit as a run in one go"
