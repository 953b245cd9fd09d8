"""Files that a kill at any moment, or a full disk, leaves whole.

A failing write is an OSError that names the file. The folder is made by the first write.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def replace(path: Path, content: bytes | memoryview) -> None:
    """Put a file in the place of the old one as a whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def remove_drafts(folder: Path, names: Iterable[str]) -> None:
    """Remove what a process that was killed had begun to put in the place of these files."""
    for name in names:
        for draft in folder.glob(f".{name}.*.tmp"):
            draft.unlink(missing_ok=True)


def append(path: Path, lines: bytes) -> None:
    """Add lines to a file: all of them or nothing."""
    with naming(path):
        descriptor = _opened(path)
        try:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, lines)
            except OSError:
                # half a line would spoil the lines after it
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)


def sync(path: Path) -> int:
    """Bring a file to the disk; its size in bytes."""
    if not path.is_file():
        return 0
    with naming(path), path.open("ab") as file:
        os.fsync(file.fileno())
        return file.tell()


def cut(path: Path, size: int) -> None:
    """Take off what a file has beyond so many bytes. Raises ValueError if it has fewer."""
    found = path.stat().st_size if path.is_file() else 0
    if found < size:
        raise ValueError(
            f"{path} has {found} bytes but had {size} at the checkpoint; "
            "force=true starts the run anew"
        )
    if found > size:
        with naming(path):
            os.truncate(path, size)


def whole_lines(file: Path) -> bytes:
    """What a file holds up to its last line that is whole; nothing if it is not there."""
    content = file.read_bytes() if file.is_file() else b""
    return content[: content.rfind(b"\n") + 1]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError the file that it is about: a full disk's has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
