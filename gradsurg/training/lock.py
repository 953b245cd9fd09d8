"""A lock on a folder among processes; it dies with its process."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradsurg.training.durable import naming

_log = logging.getLogger("gradsurg")


@contextmanager
def held(path: Path, wait: bool) -> Iterator[bool]:
    """Have the lock at `path` in a block; True if one has it.

    If another process has it, wait until that is done, or go without.
    """
    while True:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a")
            got = _locked(file.fileno(), path, wait)
        if not got:
            file.close()
            yield False
            return
        if _is_still(path, file.fileno()):
            break
        file.close()  # who had it has taken the file away
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        file.close()


def is_held(path: Path) -> bool:
    """Whether a process has the lock at `path`."""
    if not path.is_file():
        return False
    try:
        with path.open() as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # gone in between
        return False
    return False


def _locked(descriptor: int, path: Path, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            return False
        _log.warning("waiting for another process that is at %s", path.parent)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
