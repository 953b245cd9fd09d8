"""Output whose reader may leave, as `| head` does."""

import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, TextIO


def outlive_readers() -> None:
    """From now on what is printed after the reader has gone is dropped, and the work goes on.

    It is for the outermost function of a command: it puts new streams in the place of the standard
    ones.
    """
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    stream.flush()
    return TextIOWrapper(
        BufferedWriter(_Pipe(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )


class _Pipe(FileIO):
    """A file that becomes the null device when nobody reads it any more."""

    def write(self, content: Any, /) -> int:  # Any: whatever has bytes
        try:
            return super().write(content)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(content)
