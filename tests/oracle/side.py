"""Run command lines and library calls in each of the two trees, a forked process each.

`python -m tests.oracle.side TREE FOLDER` runs the jobs in FOLDER/jobs.json with TREE's gradsurg.
Libraries that take seconds to import are imported once, gradsurg's own modules by each job anew.
"""

import json
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.oracle.accepted import unaccepted
from tests.oracle.reference import WORKING_TREE, assert_imported_from, start

SIDES = ("reference", "working tree")
SLOW_IMPORTS = ["torch", "torch._dynamo", "hydra", "omegaconf", "pydantic", "sklearn.datasets"]
SLOW_IMPORTS += ["scipy.stats", "einops", "altair", "jinja2"]
"""Imported before the fork. Not polars: it starts threads, which a fork does not have."""
LONGEST = 120
"""Characters of a value in the line of a difference."""
JOBS, ENDS = "jobs.json", "ends.json"


@dataclass(frozen=True)
class Job:
    """`python -m MODULE WORDS` in a folder below that of its side, or a Python expression."""

    folder: str
    words: Sequence[str] = ()
    module: str = "gradsurg.run"
    call: str = ""


@dataclass(frozen=True)
class End:
    """Exit code (negative: the signal) and output; `out` of a call is its exception's type."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines on stderr that are no warnings."""
        return [line for line in self.err.splitlines() if not line.startswith("warning: ")]


def run_both(reference: Path, jobs: Sequence[Job], folder: Path) -> dict[str, list[End]]:
    """Run the jobs in both trees, side by side; return their ends by the side's name.

    A job works in `folder`/SIDE/`job.folder`, which may contain files already.
    """
    processes = {}
    for side, tree in zip(SIDES, (reference, WORKING_TREE), strict=True):
        own = folder / side
        own.mkdir(parents=True, exist_ok=True)
        (own / JOBS).write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
        processes[side] = start("side", tree, str(own))
    for side, process in processes.items():
        if code := process.wait():
            raise RuntimeError(f"{side}: the process of its jobs ended with code {code}")
    ends = {side: json.loads((folder / side / ENDS).read_text("utf-8")) for side in SIDES}
    return {side: [End(**end) for end in ends[side]] for side in SIDES}


def differences(
    where: str, found: object, expected: object, tolerance: float = 0.0
) -> Iterator[str]:
    """Yield a line for each difference of nested values; numbers may differ by the tolerance."""
    match found, expected:
        case Mapping(), Mapping():
            for key in dict.fromkeys((*expected, *found)):
                if key not in found or key not in expected:
                    only = "reference" if key in expected else "working tree"
                    yield f"{where} {key}: only in the {only}"
                else:
                    yield from differences(f"{where} {key}", found[key], expected[key], tolerance)
        case list() | tuple(), list() | tuple():
            if len(found) != len(expected):
                yield f"{where}: {len(found)} entries, reference {len(expected)}"
            for number, pair in enumerate(zip(found, expected, strict=False)):
                yield from differences(f"{where} [{number}]", *pair, tolerance)
        case _ if not _is_same(found, expected, tolerance):
            yield f"{where}: {_short(found)}, reference {_short(expected)}"


def report(part: str, found: Sequence[str], shown: int = 40) -> int:
    """Print the unaccepted differences of a part and return their number."""
    lines = unaccepted([f"{part} {line}" for line in found])
    for line in lines[:shown]:
        print(line)
    if len(lines) > shown:
        print(f"{part}: {len(lines) - shown} more differences")
    return len(lines)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} .."


def _is_same(found: Any, expected: Any, tolerance: float) -> bool:  # Any: what JSON can hold
    if type(found) in (int, float) and type(expected) in (int, float):
        if found != found or expected != expected:
            return found != found and expected != expected
        return abs(found - expected) <= tolerance * max(1.0, abs(expected))
    return type(found) is type(expected) and found == expected


def _environment(folder: Path) -> None:
    """Hide accounts, data sets and settings of the user from the jobs."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "HYDRA_"))]:
        del os.environ[name]
    places = ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "GRADSURG_DATA")
    os.environ |= {name: str(folder / "home") for name in places}
    os.environ |= {"NETRC": str(folder / "netrc"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}


def _end(job: Job, folder: Path) -> End | None:
    """Run one job in a fork and return its end; None in the fork, which goes on with `_act`."""
    place = folder / job.folder
    place.mkdir(parents=True, exist_ok=True)
    outputs = [folder / name for name in ("stdout", "stderr")]
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        for number, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(place)
        return None
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = [path.read_text("utf-8", errors="replace") for path in outputs]
    return End(status, *texts)


def _act(job: Job) -> None:
    """Do the job as a process of its own would; its exceptions end this process."""
    sys.path.insert(0, str(Path.cwd()))
    if job.call:
        _call(job.call)
        return
    sys.argv[1:] = job.words
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)


def _call(expression: str) -> None:
    """Evaluate a library call; print the type of its exception, and the message on stderr."""
    import torch

    import gradsurg

    names = {"gs": gradsurg, "torch": torch, "nn": torch.nn}
    try:
        eval(expression, names)
    except Exception as error:  # whatever the call raises is compared
        print(type(error).__name__)
        print(error.args[0] if isinstance(error, LookupError) else error, file=sys.stderr)
        sys.exit(1)


def main(tree: Path, folder: Path) -> None:
    """Run the jobs of a side one after another."""
    assert_imported_from(tree)
    _environment(folder)
    for name in SLOW_IMPORTS:
        import_module(name)
    jobs = [Job(**job) for job in json.loads((folder / JOBS).read_text("utf-8"))]
    ends = []
    for job in jobs:
        end = _end(job, folder)
        if end is None:
            _act(job)
            return
        ends.append(asdict(end))
    (folder / ENDS).write_text(json.dumps(ends), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
