"""Limits of a process: streams that are closed, full or of a small encoding; address space."""

import atexit
import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from math import inf
from typing import Any, TextIO

FAILED = 1
STDOUT, STDERR, NUM_STREAMS = 1, 2, 3

_failures: list[OSError] = []


def ignore_closed_pipes() -> None:
    """Replace stdout and stderr by streams that never raise.

    For the outermost function of a command. Output is dropped once the reader of a pipe has closed
    it, as `| head` does, or if the stream was closed from the start. A full disk is reported on
    stderr, and the command then ends with code 1. A character that the encoding lacks is printed as
    an escape.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < NUM_STREAMS:
        pass  # a closed stream: its number must not go to the next file that is opened
    os.close(number)
    atexit.register(_end)
    sys.stdout = _reopened(sys.stdout, STDOUT)
    sys.stderr = _reopened(sys.stderr, STDERR)


def _reopened(stream: TextIO | None, number: int) -> TextIO:
    encoding, line_buffering = "utf-8", False
    if stream is not None:
        stream.flush()
        number, encoding = stream.fileno(), stream.encoding
        # `python -u` writes through, which a buffer below would undo.
        line_buffering = any(
            getattr(stream, name, False) for name in ("line_buffering", "write_through")
        )
    return TextIOWrapper(
        BufferedWriter(_Pipe(number, "wb", closefd=False)),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=line_buffering,
    )


class _Pipe(FileIO):
    """A file that becomes the null device when its reader is gone or its disk is full."""

    def write(self, content: Any, /) -> int:  # Any: any buffer
        try:
            return super().write(content)
        except BrokenPipeError:
            self._discard()
        except OSError as error:
            self._discard()
            _failures.append(error)
            if self.fileno() != STDERR:
                print(f"output cannot be written: {error.strerror}", file=sys.stderr)
        return super().write(content)

    def _discard(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def _end() -> None:
    """Print the rest, and end with the exit code of a failure if some output was not written."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _failures:
        os._exit(FAILED)


def address_space() -> float:
    """Return the bytes of address space that `ulimit -v` allows; infinite without a limit."""
    if sys.platform == "win32":
        return inf
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return inf if limit == resource.RLIM_INFINITY else limit


def open_files() -> float:
    """Return the number of open files that `ulimit -n` allows; infinite without a limit."""
    if sys.platform == "win32":
        return inf
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return inf if limit == resource.RLIM_INFINITY else limit
