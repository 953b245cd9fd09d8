"""What the files of each run hold."""

from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl

from gradsurg.report.grouping import Arm


def run_frames(
    arms: Sequence[Arm], read: Callable[[list[str | Path]], pl.DataFrame]
) -> tuple[dict[str, pl.DataFrame], list[str]]:
    """The rows of every run that has some, by the names of their directories, and what could not
    be read.
    """
    frames, faults = {}, []
    for run in (run for arm in arms for run in arm.runs if run.state != "missing"):
        try:
            frame = read([run.path])
        except ValueError as error:
            faults.append(f"{run.name}: {' '.join(str(error).split())}")
            continue
        if len(frame):
            frames[run.name] = frame
    return frames, faults
