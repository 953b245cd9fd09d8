"""Plan the studies of a claim, check that they will measure its bands, and train them."""

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import nn

from gradsurg.effects.numbers import EFFECT_NAMES
from gradsurg.experiment.build import build
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import TUNING, UNTIL_REACHED, UNTIL_STEP
from gradsurg.experiment.runs import Experiment
from gradsurg.experiment.sweep import jobs_of_study
from gradsurg.experiment.trial_step import METRIC_EXAMPLES, examined_names, metric_names
from gradsurg.plugins.messages import unknown
from gradsurg.report.arms import group
from gradsurg.report.load import LoadedRun, read_runs
from gradsurg.report.study import Study
from gradsurg.reproduce.expected import Band, Expected, WrongExperiment
from gradsurg.reproduce.judge import DIVERGED, EFFECT, is_selected, selectable_keys, terms
from gradsurg.reproduce.record import read_record
from gradsurg.sites.model_tree import tree
from gradsurg.tasks.base import Examined
from gradsurg.torch_internals import random_state

WRONG_INPUT = 2
MAX_CHOICES = 40
"""Names that an error lists; of more there are the nearest five."""
ALWAYS = ("steps", "skipped_steps", "time/train_s", "time/step_ms", DIVERGED)
"""Numbers that every run has at its end."""


@dataclass(frozen=True)
class PlannedRun:
    """A run before it is trained: the keys by which a band can choose it, its steps and numbers.

    `numbers` has for each name the steps between two of its rows, 0 if it is there at the end only.
    """

    known: Mapping[str, object]
    steps: int
    numbers: Mapping[str, int]


@dataclass(frozen=True)
class StudyPlan:
    """A study before it is trained: its folder, its runs by directory name, all their steps.

    A study that tunes has the names of its `trials`, and other runs after these: those with the
    values that it has chosen.
    """

    folder: Path
    runs: dict[str, PlannedRun]
    steps: int
    trials: tuple[str, ...] = ()


@dataclass(frozen=True)
class FinishedStudy:
    """A study after training: the runs that its config describes, and the tuning's runs."""

    study: Study
    trials: Sequence[LoadedRun] = ()

    @property
    def minutes(self) -> float:
        """The training time of all runs together, with the tuning."""
        return sum(self._numbers("time/train_s")) / 60

    @property
    def step_ms(self) -> float | None:
        """The median time of a step over all runs, in ms; None without steps."""
        times = self._numbers("time/step_ms")
        return median(times) if times else None

    def _numbers(self, key: str) -> list[float]:
        values = [(run.summary or {}).get(key) for run in (*self.study.all_runs, *self.trials)]
        return [float(value) for value in values if value]


def words_of(folder: Path, name: str, overrides: Sequence[str]) -> list[str]:
    """Return the runner's words for a study in the folder of a paper."""
    conf = folder / "conf"
    return [*([f"--config-dir={conf}"] if conf.is_dir() else []), f"experiment={name}", *overrides]


def run_study(words: Sequence[str], plan: StudyPlan) -> FinishedStudy:
    """Train the runs of a study that are not finished, and read them."""
    train(words)
    return read_study(words, plan)


def train(words: Sequence[str]) -> None:
    """Run the runner in a process with these words; finished runs are not repeated.

    Raises WrongExperiment if the config is wrong, KeyboardInterrupt if it was interrupted.
    """
    code = subprocess.run([sys.executable, "-m", "gradsurg.run", *words], check=False).returncode
    if code == WRONG_INPUT:
        raise WrongExperiment(f"{' '.join(words)}: the runner refuses it")
    if code < 0 or code > WRONG_INPUT:
        raise KeyboardInterrupt


def read_study(words: Sequence[str], plan: StudyPlan) -> FinishedStudy:
    """Read the runs of a trained study; runs of other settings in its folder are ignored."""
    if plan.trials:
        plan = plan_study(words)  # with the values that it has chosen
    runs = [run for run in read_runs(plan.folder, [*plan.runs]) if run.name in plan.runs]
    trials = read_runs(plan.folder / TUNING, plan.trials) if plan.trials else []
    return FinishedStudy(Study(plan.folder, group(runs)), trials)


def plan_study(words: Sequence[str]) -> StudyPlan:
    """Compose a study from the runner's words and build its runs; WrongExperiment if it is wrong.

    Nothing is trained.
    """
    runs: dict[str, PlannedRun] = {}
    folders: set[Path] = set()
    tuned: dict[str, int] = {}
    try:
        for _, config in jobs_of_study([*words]):
            experiment = build(config)
            folders.add(experiment.settings.study_folder)
            for run in experiment.tuning.runs if experiment.tuning else ():
                tuned[run.name] = run.schedule.steps
            runs |= plan_runs(experiment)
    except ConfigError as error:
        raise WrongExperiment("\n".join(error.faults)) from error
    (folder,) = folders
    steps = sum(run.steps for run in runs.values()) + sum(tuned.values())
    return StudyPlan(folder, runs, steps, (*tuned,))


def full_cost(root: Path, paper: str, expected: Expected, overrides: Sequence[str]) -> str:
    """Return the steps of the full form, and its hours at the quick form's time per step."""
    record = read_record(root / "experiments" / paper) or {}
    measured = record.get("step_ms", {})
    steps, hours, unknown = 0, 0.0, False
    for key, name in expected.studies("full").items():
        try:
            planned = plan_study(words_of(root / "experiments" / paper, name, overrides)).steps
        except WrongExperiment as error:
            return f"{paper}: {error}"
        steps += planned
        unknown = unknown or not measured.get(key)
        hours += planned * (measured.get(key) or 0) / 3_600_000
    if unknown:
        return f"{paper}: {steps:,} steps; the quick form has not been measured"
    return f"{paper}: {steps:,} steps, {hours:.3g} hours of one core at the quick form's pace"


def plan_runs(experiment: Experiment) -> dict[str, PlannedRun]:
    """Return the runs of an experiment by the names of their directories; nothing is trained."""
    pairs = experiment.compared or experiment.pairs  # before a tuning has ended: the config's own
    runs = {run.name: run for pair in pairs for run in pair.runs}
    task, data = experiment.task, experiment.load_data()
    with random_state.preserved():
        model = experiment.make_model(data)
        some = METRIC_EXAMPLES
        tested = metric_names(task, model, data.test_inputs[:some], data.test_targets[:some])
        # The last training examples may have metrics that the first lack, for example of a memory.
        both = [torch.cat([o[:some], o[-some:]]) for o in (data.train_inputs, data.train_targets)]
        trained = metric_names(task, model, *both)
        numbers = examined_names(task, model, data) if isinstance(task, Examined) else []
        sites = _sites(experiment, model) if experiment.settings.effects_every else ()
    names = {"train": trained, "test": tested, "examined": numbers}
    return {
        name: PlannedRun(
            selectable_keys(run.identity, run.label, run.seed),
            run.schedule.steps,
            _outcomes(run, names) | _effects(run, sites),
        )
        for name, run in runs.items()
    }


def _sites(experiment: Experiment, model: nn.Module) -> tuple[str, ...]:
    """Return the sites at which effects are measured, the same for every arm."""
    for item in experiment.pairs[0].runs[0].surgery.interventions:
        if item.aggregator is None:
            return tree(model, experiment.example_input, item.at).sites
    return ()


def _outcomes(run: Run, names: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the outcomes of a run and the steps between rows; `names` has each part's."""
    schedule, parts = run.schedule, dict(names)
    if schedule.validation:
        parts["validation"] = names["test"]
    if schedule.eval_every:
        parts["test"] = [*names["test"], *run.task.trajectory_metric_names]
    until = (UNTIL_REACHED, UNTIL_STEP) if schedule.until is not None else ()
    numbers = [f"{part}/{name}" for part in parts for name in parts[part]]
    every = dict.fromkeys((*numbers, *until, *ALWAYS), 0)
    every["train/loss"] = schedule.log_every
    if schedule.eval_every:
        watched = "validation" if schedule.validation else "test"
        every |= {f"{watched}/{name}": schedule.eval_every for name in names["test"]}
    return every


def _effects(run: Run, sites: tuple[str, ...]) -> dict[str, int]:
    """Return the effects of the transforms of a run, at each site, and the steps between rows."""
    labels = zip(run.surgery.interventions, run.surgery.labels, strict=True)
    transforms = [name for item, group in labels if not item.aggregator for name in group]
    names = product(transforms, sites, EFFECT_NAMES)
    return {f"{EFFECT}{'/'.join(name)}": run.schedule.log_every for name in names}


def missing_measurements(
    expected: Expected, plans: Mapping[str, Mapping[str, PlannedRun]]
) -> list[str]:
    """Return a line for each number that a band or the figure needs and no run will have."""
    lines = []
    for band in expected.bands:
        study = band.study or expected.quick[0]
        parts = [(study, band.runs)]
        parts += [(band.minus_study or study, band.minus)] if band.is_difference else []
        for name, which in parts:
            runs = list(plans[name].values())
            chosen = [run for run in runs if is_selected(run.known, which)]
            faults = [_fault(band, run) for run in chosen] or [_no_run(which, runs)]
            lines += [f"{band.name}: {name}: {fault}" for fault in dict.fromkeys(faults) if fault]
    figure = expected.figure
    if figure is not None and figure.kind != "own":
        runs = [run for key in figure.studies or plans for run in plans[key].values()]
        at_end = figure.kind == "outcomes"
        names = [name for run in runs for name, every in run.numbers.items() if every or at_end]
        if figure.metric not in names:
            fault = f"there will be no {figure.metric} to draw"
            lines.append(f"figure: {_unknown(fault, figure.metric, names)}")
    return lines


def _no_run(which: Mapping[str, object], runs: Sequence[PlannedRun]) -> str:
    """Name the choices for the first key, or value of a key, that no run has."""
    text = f"no run has {', '.join(f'{key}: {value}' for key, value in which.items())}"
    for key, value in which.items():
        values = [run.known[key] for run in runs if key in run.known]
        if not values:
            known = (key for run in runs for key in run.known)
            return _unknown(f"the runs have no key '{key}'", key, known)
        if value not in values:
            return _unknown(text, value, values)
    return text


def _fault(band: Band, run: PlannedRun) -> str:
    """Name the first number of a band that the run will not have; empty if it has all."""
    is_effect, step = band.metric.startswith(EFFECT), band.at_step
    for name in [band.metric] if is_effect else terms(band.metric):
        known = {
            key: every for key, every in run.numbers.items() if key.startswith(EFFECT) == is_effect
        }
        every = known.get(name)
        if every is None:
            return _unknown(f"there will be no {name}", name, known)
        if not every and band.at != "end":
            fault = f"there will be no {name} except at the end"
            return _unknown(fault, name, filter(known.get, known))
        if step not in (None, run.steps, *range(0, run.steps, every or 1)):
            return f"there will be {name} at every {every} steps up to {run.steps}, not at {step}"
    return ""


def _unknown(fault: str, name: object, choices: Iterable[object]) -> str:
    known = list(dict.fromkeys(map(str, choices)))
    few = known if len(known) <= MAX_CHOICES else get_close_matches(str(name), known, 5, 0.0)
    return unknown(fault, str(name), few)
