"""Printing into a pipe whose reader may close it, as `| head` does."""

import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any, TextIO


def ignore_closed_pipes() -> None:
    """Replace stdout and stderr: output is dropped once the reader has closed the pipe.

    For the outermost function of a command.
    """
    sys.stdout, sys.stderr = _reopened(sys.stdout), _reopened(sys.stderr)


def _reopened(stream: TextIO) -> TextIO:
    stream.flush()
    return TextIOWrapper(
        BufferedWriter(_Pipe(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )


class _Pipe(FileIO):
    """A file that becomes the null device when its reader is gone."""

    def write(self, content: Any, /) -> int:  # Any: any buffer
        try:
            return super().write(content)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(content)
