"""Streams of a command whose reader may go away."""

import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any


class _Pipe(FileIO):
    """A file that drops what is written to it once its reader is gone or its disk is full."""

    is_full = False

    def write(self, content: Any, /) -> int:  # Any: any buffer
        try:
            return super().write(content)
        except BrokenPipeError:
            pass
        except OSError as error:
            if not self.is_full and self.name == 1:  # 1 is stdout; printed once
                self.is_full = True
                print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
        return len(content)


def ignore_closed_pipes() -> None:
    """Let a command go on after `| head`, a full disk or a closed stream, without further output.

    For the outermost function of a command. A character that the encoding lacks is printed escaped.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the command began
            setattr(sys, name, TextIOWrapper(BufferedWriter(FileIO(os.devnull, "w")), "utf-8"))
        else:
            raw = BufferedWriter(_Pipe(stream.fileno(), "wb", closefd=False))
            unbuffered = stream.line_buffering or stream.write_through  # of `python -u`
            text = TextIOWrapper(raw, stream.encoding, "backslashreplace", None, unbuffered)
            setattr(sys, name, text)
