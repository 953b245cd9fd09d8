"""Having the runner do a study, and finding again the runs that are its own."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradsurg.config import compose
from gradsurg.config.build import Experiment
from gradsurg.config.faults import ConfigError
from gradsurg.report.reading import Found, read_study
from gradsurg.reproduce.expected import WrongExperiment

WRONG_INPUT = 2


@dataclass(frozen=True)
class Study:
    """A study as it was run: its folder, and the runs that its config asks for."""

    folder: Path
    runs: list[Found]

    @property
    def minutes(self) -> float:
        """Of training, all runs together."""
        seconds = [float((run.summary or {}).get("time/train_s") or 0) for run in self.runs]
        return sum(seconds) / 60


def run_study(name: str, words: Sequence[str]) -> Study:
    """Train what of a study has not been trained, in a process of its own.

    What lies in the folder besides, as runs with other settings, is none of it. Raises
    WrongExperiment if the config is wrong, KeyboardInterrupt if it was interrupted.
    """
    overrides = [f"experiment={name}", *words]
    folder, names = _planned(overrides)
    code = subprocess.run(
        [sys.executable, "-m", "gradsurg.run", *overrides], check=False
    ).returncode
    if code == WRONG_INPUT:
        raise WrongExperiment(f"{name}: the runner refuses it")
    if code < 0 or code > WRONG_INPUT:
        raise KeyboardInterrupt
    runs = {run.name: run for run in read_study(folder, names)}
    return Study(folder, [runs[name] for name in names])


def _planned(overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder of a study and the names of its runs, as its config gives them."""
    paths: dict[Path, None] = {}

    def keep(words: list[str], experiment: Experiment) -> None:
        out = Path(experiment.settings.out)
        paths.update((run.directory(out), None) for pair in experiment.pairs for run in pair.runs)

    try:
        words, sweeping = compose.sweep(overrides, False, [])
        compose.check(words, sweeping, [], keep=keep)
    except ConfigError as error:
        raise WrongExperiment("\n".join(error.faults)) from error
    (folder,) = {path.parent for path in paths}
    return folder, [path.name for path in paths]
