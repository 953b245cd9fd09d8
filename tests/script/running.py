"""Run the command of scripts in a process of its own, and read what it wrote."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command, and the folder that it ran in."""

    code: int
    out: str
    err: str
    folder: Path

    def runs(self, study: str) -> dict[str, Path]:
        """The folders of the runs of a study by label and seed, such as `clip-seed0`."""
        paths = (self.folder / "runs" / study).glob("*-seed*")
        return {path.name.rpartition("-")[0]: path for path in paths}


def script(folder: Path, *words: str, **variables: str) -> Ended:
    """Run `python -m gradsurg.script` with these words in a folder."""
    return python(folder, "-m", "gradsurg.script", *words, **variables)


def python(folder: Path, *words: str, **variables: str) -> Ended:
    """Run Python with these words in a folder."""
    environment = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    return Ended(done.returncode, done.stdout, done.stderr, folder)
