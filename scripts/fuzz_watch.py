"""Call a command in this process, and note tracebacks, hangs, exit codes, and files written."""

import io
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 10
WAIT = 12  # times as long without the processor
CODES = (0, 1, 2)
CREATING = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}
REMOVING = {"os.remove": 0, "os.rmdir": 0, "os.truncate": 0, "os.chmod": 0, "shutil.rmtree": 0}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

Case = Callable[[str, Path], Iterable["Outcome"]]

_written: list[str] = []
_added = _listening = False


class _Hang(BaseException):
    """Raised by the alarm inside a command."""


@dataclass(frozen=True)
class Fault:
    """A way in which a command failed badly."""

    kind: str
    text: str


@dataclass
class Outcome:
    """The end of a command: its words, exit code, output, and faults."""

    words: Sequence[str]
    code: object = 0
    out: str = ""
    err: str = ""
    faults: list[Fault] = field(default_factory=list)


def in_fresh_folder(case: Case, seed: str) -> list[Outcome]:
    """Return the outcomes of one case, run in an empty folder that is removed afterwards."""
    folder, here = Path(tempfile.mkdtemp(prefix="fuzz-")).resolve(), Path.cwd()
    os.chdir(folder)
    try:
        return [*case(seed, folder)]
    finally:
        os.chdir(here)
        shutil.rmtree(folder, ignore_errors=True)


def watched(
    command: Callable[[], object],
    words: Sequence[str],
    allowed: Sequence[Path],
    seconds: float = SECONDS,
) -> Outcome:
    """Call `command` with the arguments `words`; it may write inside the folders `allowed` only."""
    outcome = Outcome(words)
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["command", *words]
    try:
        with redirect_stdout(out), redirect_stderr(err), _alarm(seconds), _noting_writes():
            command()
    except SystemExit as end:
        outcome.code = 0 if end.code is None else end.code
    except _Hang:
        outcome.code = "none"
        frames = traceback.extract_tb(sys.exc_info()[2])
        place = next((frame for frame in reversed(frames) if "gradsurg" in frame.filename), None)
        outcome.faults.append(Fault("hang", f"ran for {seconds:g} s, at {place}"))
    except BaseException:
        outcome.code = "none"
        outcome.faults.append(Fault("traceback", traceback.format_exc(limit=-3)))
    finally:
        sys.argv = argv
    outcome.out, outcome.err = out.getvalue(), err.getvalue()
    if outcome.code not in (*CODES, "none"):
        outcome.faults.append(Fault("exit code", f"ended with code {outcome.code!r}"))
    if "Traceback (most recent call last)" in outcome.out + outcome.err:
        outcome.faults.append(Fault("traceback", outcome.err[-1000:]))
    outside = [path for path in _written if not _inside(path, allowed)]
    if outside:
        outcome.faults.append(Fault("written outside", f"wrote {', '.join(outside[:5])}"))
    return outcome


def _inside(path: str, allowed: Sequence[Path]) -> bool:
    """Return whether a path is in an allowed folder, or above one, or holds compiled code."""
    return "__pycache__" in Path(path).parts or any(
        Path(path).is_relative_to(folder) or folder.is_relative_to(path) for folder in allowed
    )


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise _Hang

    # In processor time, which other processes do not change; a command that sleeps has longer.
    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, WAIT * seconds),
    }
    before = {number: signal.signal(number, ring) for number in timers}
    for timer, length in timers.values():
        signal.setitimer(timer, length)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


@contextmanager
def _noting_writes() -> Iterator[None]:
    """Collect in `_written` the paths of files and folders that Python code creates or changes."""
    global _added, _listening
    if not _added:
        sys.addaudithook(_note)  # which cannot be taken away
    _written.clear()
    _added, _listening, compiled = True, True, sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        _listening, sys.dont_write_bytecode = False, compiled


def _is_descriptor(argument: object) -> bool:
    return isinstance(argument, int) and argument >= 0


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if not _listening:
        return
    place = {**CREATING, **REMOVING}.get(event)
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        place = 0
    target = None if place is None else arguments[place]
    if not isinstance(target, str | bytes | os.PathLike):
        return
    name = str(os.fsdecode(target))
    if event != "open" and not os.path.isabs(name) and _is_descriptor(arguments[-1]):
        return  # relative to an open folder, which was noted by its path
    path = os.path.abspath(name)
    made_before = event == "os.mkdir" and os.path.isdir(path)
    if path != os.devnull and not made_before:
        _written.append(path)
