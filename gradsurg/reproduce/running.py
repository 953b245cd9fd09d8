"""Having the runner do a study, and finding again the runs that are its own."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gradsurg.config import compose
from gradsurg.config.build import Experiment
from gradsurg.config.faults import ConfigError
from gradsurg.report.load import Found, read_study
from gradsurg.reproduce.expected import WrongExperiment
from gradsurg.reproduce.foreseen import Foreseen, foresee

WRONG_INPUT = 2


@dataclass(frozen=True)
class Study:
    """A study as it was run: its folder, and the runs that its config asks for."""

    folder: Path
    runs: list[Found]

    @property
    def minutes(self) -> float:
        """Of training, all runs together."""
        return sum(self._numbers("time/train_s")) / 60

    @property
    def step_ms(self) -> float | None:
        """Of a step, the median over all runs; None if none was made."""
        return median(self._numbers("time/step_ms")) if self._numbers("time/step_ms") else None

    def _numbers(self, key: str) -> list[float]:
        found = [(run.summary or {}).get(key) for run in self.runs]
        return [float(value) for value in found if value]


@dataclass(frozen=True)
class Planned:
    """What a study asks for: its folder, its runs by the names of their directories, the steps of
    all together.
    """

    folder: Path
    runs: dict[str, Foreseen]
    steps: int


def run_study(name: str, words: Sequence[str], planned: Planned) -> Study:
    """Train what of a study has not been trained, in a process of its own.

    What lies in the folder besides, as runs with other settings, is none of it. Raises
    WrongExperiment if the config is wrong, KeyboardInterrupt if it was interrupted.
    """
    overrides = [f"experiment={name}", *words]
    code = subprocess.run(
        [sys.executable, "-m", "gradsurg.run", *overrides], check=False
    ).returncode
    if code == WRONG_INPUT:
        raise WrongExperiment(f"{name}: the runner refuses it")
    if code < 0 or code > WRONG_INPUT:
        raise KeyboardInterrupt
    runs = {run.name: run for run in read_study(planned.folder, [*planned.runs])}
    return Study(planned.folder, [runs[name] for name in planned.runs])


def plan_study(name: str, words: Sequence[str]) -> Planned:
    """What a study would train, as its config gives it; raises WrongExperiment if that is wrong."""
    runs: dict[str, Foreseen] = {}
    folders: set[Path] = set()

    def keep(words: list[str], experiment: Experiment) -> None:
        settings = experiment.settings
        folders.add(Path(settings.out) / settings.study)
        runs.update(foresee(experiment))

    try:
        composed, sweeping = compose.sweep([f"experiment={name}", *words], False, [])
        compose.check(composed, sweeping, [], keep=keep)
    except ConfigError as error:
        raise WrongExperiment("\n".join(error.faults)) from error
    (folder,) = folders
    return Planned(folder, runs, sum(run.steps for run in runs.values()))
