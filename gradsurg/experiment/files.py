"""Replace files atomically, append lines to files, lock folders, write NaN as JSON."""

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

DRAFT = re.compile(r"\..+\.\d+\.tmp")  # the name of the draft of a file, see `replace_file`
DRAFT_FOLDER = ".draft-"  # the beginning of the name of a folder of drafts

_log = logging.getLogger("gradsurg")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file name to an OSError; the error of a full disk has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_file(path: Path, content: bytes | memoryview, previous: Path | None = None) -> None:
    """Replace a file atomically; the old one is renamed to `previous`, if that is given."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if previous is not None and path.is_file():
                os.replace(path, previous)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    with suppress(OSError):  # Windows opens no folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # else the new name may be lost
        finally:
            os.close(folder)


def append_bytes(path: Path, lines: bytes) -> None:
    """Append lines to a file, which is created if it does not exist."""
    with _naming(path):
        if not os.path.exists(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(lines)


def sync(path: Path) -> int:
    """Flush a file to the disk and return its size in bytes; 0 if it does not exist."""
    if not path.is_file():
        return 0
    with _naming(path), path.open("rb+") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def drafts(folder: Path) -> list[Path]:
    """Return the unfinished files and folders in a folder; in use by the process with its lock."""
    files = [path for path in folder.glob(".*.tmp") if DRAFT.fullmatch(path.name)]
    return [*files, *folder.glob(f"{DRAFT_FOLDER}*")]


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock of a folder in a block; yield whether it was obtained.

    With `wait` it always is. Drafts in the folder, left over from killed processes, are removed.
    """
    from filelock import FileLock, Timeout  # only the runner locks

    lock = FileLock(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if wait:
            _log.warning("waiting for another process that has locked %s", path.parent)
            lock.acquire()
    try:
        for draft in drafts(path.parent) if lock.is_locked else ():
            if draft.is_dir() and not draft.is_symlink():
                rmtree(draft, ignore_errors=True)
            else:
                draft.unlink(missing_ok=True)
        yield lock.is_locked
    finally:
        if lock.is_locked:
            with suppress(OSError):  # Windows removes no open file
                path.unlink(missing_ok=True)  # first: after the release it may be another's
            lock.release()


def finite(value: object) -> Any:  # Any: any JSON value
    """Return a JSON value with null for each NaN and infinite number."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)
