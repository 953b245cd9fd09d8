"""Replace files atomically, append lines to files, lock folders, encode JSON."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path

from filelock import FileLock, Timeout

_log = logging.getLogger("gradsurg")
_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to an OSError: that of a full disk has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_file(path: Path, content: bytes | memoryview, previous: Path | None = None) -> None:
    """Replace a file atomically; the old one is renamed to `previous`, if that is given."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        try:
            with draft.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if previous is not None and path.is_file():
                os.replace(path, previous)
            os.replace(draft, path)
            _sync_folder(path.parent)
        finally:
            draft.unlink(missing_ok=True)


def append_bytes(path: Path, lines: bytes) -> None:
    """Append lines to a file, which is created if it does not exist."""
    with naming(path):
        if not os.path.exists(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(lines)


def sync(path: Path) -> int:
    """Flush a file to the disk and return its size in bytes; 0 if it does not exist."""
    if not path.is_file():
        return 0
    with naming(path), path.open("rb+") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def shorten(path: Path, size: int) -> None:
    """Cut a file to its first `size` bytes."""
    with naming(path):
        os.truncate(path, size)


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock in a block; yield whether it was obtained, always True with `wait`."""
    lock = FileLock(path)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            if wait:
                _log.warning("waiting for another process that has locked %s", path.parent)
                lock.acquire()
    try:
        yield lock.is_locked
    finally:
        if lock.is_locked:
            _release(lock, path)


def is_locked(path: Path) -> bool:
    """Whether a process has the lock; without the permission to look, False."""
    if not path.is_file() or path.is_symlink() or path.parent.is_symlink():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    except OSError:
        return False
    _release(lock, path)
    return False


def _release(lock: FileLock, path: Path) -> None:
    """Release a lock and remove its file first: a waiting process notices and makes a new one."""
    with suppress(OSError):  # Windows removes no open file; there `release` does it
        path.unlink(missing_ok=True)
    lock.release()


def json_line(row: Mapping[str, object], not_finite: str) -> bytes:
    """Return a row as one line of JSON; NaN and infinite numbers are listed at key `not_finite`."""
    try:
        return _encoder.encode(row).encode() + b"\n"
    except ValueError:
        pass  # JSON has no NaN and no infinity
    listed = {**row, not_finite: " ".join(_not_finite(row))}
    return _encoder.encode(finite(listed)).encode() + b"\n"


def finite(value: object) -> object:
    """Return a JSON value with null in place of each number that is not finite."""
    match value:
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {key: finite(item) for key, item in value.items()}
        case Sequence() if not isinstance(value, str):
            return [finite(item) for item in value]
        case _:
            return value


def _sync_folder(folder: Path) -> None:
    """Flush a folder's list of files to the disk, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def _not_finite(value: object, path: str = "") -> Iterator[str]:
    """Yield each number that is not finite with its path, as `norms.1=nan`."""
    match value:
        case float():
            if not isfinite(value):
                yield f"{path}={value}"
        case Mapping():
            for key, item in value.items():
                yield from _not_finite(item, f"{path}.{key}" if path else str(key))
        case Sequence() if not isinstance(value, str):
            for index, item in enumerate(value):
                yield from _not_finite(item, f"{path}.{index}")
        case _:
            pass
