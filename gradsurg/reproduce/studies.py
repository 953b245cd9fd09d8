"""Plan the studies of a claim, check that they will measure its bands, and train them."""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

from gradsurg.effects.numbers import EFFECT_NAMES, UPDATE_NAMES, UPDATES_SAMPLED
from gradsurg.experiment.build import build
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import UNTIL_REACHED, UNTIL_STEP
from gradsurg.experiment.runs import Experiment
from gradsurg.experiment.sweep import jobs_of_study
from gradsurg.experiment.trial_step import METRIC_EXAMPLES, examined_names, metric_names
from gradsurg.plugins.messages import nearest
from gradsurg.report.arms import group
from gradsurg.report.load import TUNING, LoadedRun, read_runs
from gradsurg.report.study import Study
from gradsurg.reproduce.expected import Band, Drawing, Expected, WrongExperiment
from gradsurg.reproduce.judge import DIVERGED, EFFECT, is_selected, selectable_keys, terms
from gradsurg.reproduce.record import read_record
from gradsurg.sites.model_tree import tree
from gradsurg.tasks.base import Examined
from gradsurg.torch_internals import random_state

WRONG_INPUT = 2
ALWAYS = ("steps", "skipped_steps", "time/train_s", "time/step_ms", DIVERGED)
"""Numbers that every run has at its end."""


@dataclass(frozen=True)
class PlannedRun:
    """A run before it is trained.

    Args:
        known: The keys by which a band can choose it.
        ends: The names of the numbers at its end.
        rows: The names of the numbers of its steps, with the interval between two of them.
        transforms: The transforms with effects, measured at each of `sites`, `every` so many steps.
    """

    known: Mapping[str, object]
    steps: int
    ends: tuple[str, ...]
    rows: Mapping[str, int]
    transforms: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    every: int = 1


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
    """A study after training: the runs that its config describes, and those of a tuning."""

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


def run_study(name: str, overrides: Sequence[str], plan: StudyPlan) -> FinishedStudy:
    """Train the runs of a study that are not finished, in a process of their own.

    Other runs in its folder, as of other settings, are ignored. Raises WrongExperiment if the
    config is wrong, KeyboardInterrupt if the process was interrupted.
    """
    words = [f"experiment={name}", *overrides]
    code = subprocess.run([sys.executable, "-m", "gradsurg.run", *words], check=False).returncode
    if code == WRONG_INPUT:
        raise WrongExperiment(f"{name}: the runner refuses it")
    if code < 0 or code > WRONG_INPUT:
        raise KeyboardInterrupt
    if plan.trials:
        plan = plan_study(name, overrides)  # with the values that it has chosen
    runs = [run for run in read_runs(plan.folder, [*plan.runs]) if run.name in plan.runs]
    trials = read_runs(plan.folder / TUNING, plan.trials) if plan.trials else []
    return FinishedStudy(Study(plan.folder, group(runs)), trials)


def plan_study(name: str, overrides: Sequence[str]) -> StudyPlan:
    """Compose a study and build its runs without training; WrongExperiment if it is wrong."""
    runs: dict[str, PlannedRun] = {}
    folders: set[Path] = set()
    tuned: dict[str, int] = {}
    try:
        for _, config in jobs_of_study([f"experiment={name}", *overrides]):
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
            planned = plan_study(name, overrides).steps
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
        # The last training examples may have metrics that the first lack, as those of a memory.
        both = [torch.cat([o[:some], o[-some:]]) for o in (data.train_inputs, data.train_targets)]
        trained = metric_names(task, model, *both)
        numbers = examined_names(task, model, data) if isinstance(task, Examined) else []
        sites = _sites(experiment, model) if experiment.settings.effects_every else ()
    names = {"train": trained, "test": tested, "examined": numbers}
    return {name: _planned(run, names, sites) for name, run in runs.items()}


def _sites(experiment: Experiment, model: nn.Module) -> tuple[str, ...]:
    """Return the sites at which effects are measured, the same for every arm."""
    for item in experiment.pairs[0].runs[0].surgery.interventions:
        if item.aggregator is None:
            return tree(model, experiment.example_input, item.at).sites
    return ()


def _planned(run: Run, names: Mapping[str, Sequence[str]], sites: tuple[str, ...]) -> PlannedRun:
    """Return a run with the numbers of its parts; `names` has those of a part, as `test`."""
    schedule, parts = run.schedule, dict(names)
    if schedule.validation:
        parts["validation"] = names["test"]
    if schedule.eval_every:
        parts["test"] = [*names["test"], *run.task.trajectory_metric_names]
    updates = (
        (UPDATES_SAMPLED, *UPDATE_NAMES) if schedule.update_effect_every and not run.shadow else ()
    )
    until = (UNTIL_REACHED, UNTIL_STEP) if schedule.until is not None else ()
    numbers = [f"{part}/{name}" for part in parts for name in parts[part]]
    ends = (*numbers, *until, *updates, *ALWAYS)
    rows: dict[str, int] = dict.fromkeys(("train/loss", *updates), schedule.log_every)
    if schedule.eval_every:
        watched = "validation" if schedule.validation else "test"
        rows |= {f"{watched}/{name}": schedule.eval_every for name in names["test"]}
    known = selectable_keys(run.identity, run.label, run.seed)
    labels = zip(run.surgery.interventions, run.surgery.labels, strict=True)
    transforms = tuple(name for item, group in labels if not item.aggregator for name in group)
    every = schedule.log_every
    return PlannedRun(known, schedule.steps, ends, rows, transforms, sites, every)


Plans = Mapping[str, Mapping[str, PlannedRun]]


def missing_measurements(expected: Expected, plans: Plans) -> list[str]:
    """Return a line for each number that a band or the figure needs and no run will have."""
    lines = []
    for band in expected.bands:
        study = band.study or expected.quick[0]
        runs = list(plans[study].values())
        lines += [f"{band.name}: {study} {fault}" for fault in _band_faults(band, runs)]
    if isinstance(expected.figure, Drawing):
        runs = [run for key in expected.figure.studies or plans for run in plans[key].values()]
        fault = _figure_fault(expected.figure, runs)
        lines += [f"figure: {fault}"] if fault else []
    return lines


def _band_faults(band: Band, runs: list[PlannedRun]) -> Iterator[str]:
    for which in (band.runs, *([band.minus] if band.minus else [])):
        chosen = [run for run in runs if is_selected(run.known, which)]
        if chosen:
            faults = (_metric_fault(band, run) for run in chosen)
            yield from dict.fromkeys(fault for fault in faults if fault)
        else:
            keys = ", ".join(f"{key}: {value}" for key, value in which.items())
            yield f"has no run of {keys}{_suggestion(which, runs)}"


def _suggestion(which: Mapping[str, object], runs: list[PlannedRun]) -> str:
    """Return the choices for the first key, or value of a key, that no run has."""
    for key, value in which.items():
        values = [run.known[key] for run in runs if key in run.known]
        if not values:
            known = (key for run in runs for key in run.known)
            return f": their config has no '{key}'. {_nearest(key, known)}"
        if value not in values:
            return f". {_nearest(value, values)}"
    return ""


def _metric_fault(band: Band, run: PlannedRun) -> str:
    """Name the first number of a band that the run will not have; empty if it has all."""
    if band.metric.startswith(EFFECT):
        return _effect_fault(band, run)
    for name in terms(band.metric):
        if band.at == "end" and name not in run.ends:
            return f"will have no {name}. {_nearest(name, run.ends)}"
        if band.at != "end" and name not in run.rows:
            return f"will have no {name} but at the end. {_nearest(name, run.rows)}"
        if fault := _step_fault(band, run, run.rows.get(name, 1)):
            return fault
    return ""


def _effect_fault(band: Band, run: PlannedRun) -> str:
    _, transform, rest = f"{band.metric}//".split("/", 2)
    site, _, number = rest.removesuffix("//").rpartition("/")
    parts = ("transform", transform, run.transforms), ("site", site, run.sites)
    for part, name, choices in (*parts, ("number", number, EFFECT_NAMES)):
        if name not in choices:
            return f"will have no {band.metric}: no {part} '{name}'. {_nearest(name, choices)}"
    return _step_fault(band, run, run.every)


def _step_fault(band: Band, run: PlannedRun, every: int) -> str:
    step = band.at_step
    if step is None or step == run.steps or (step < run.steps and step % every == 0):
        return ""
    return f"will have {band.metric} at every {every} steps up to {run.steps}, not at {step}"


def _figure_fault(figure: Drawing, runs: list[PlannedRun]) -> str:
    match figure.kind:
        case "curves":
            names = [name for run in runs for name in run.rows]
        case "outcomes" | "front":
            names = [name for run in runs for name in run.ends]
        case "alignment":
            names = [name for run in runs for name in run.transforms]
        case "maps":
            names = [name.partition("/")[0] for run in runs for name in run.ends]
    for term in terms(figure.metric) if figure.kind == "front" else [figure.metric]:
        if term not in names:
            return f"there will be no {term} to draw. {_nearest(term, names)}"
    return ""


def _nearest(name: object, choices: Iterable[object]) -> str:
    return nearest(str(name), list(dict.fromkeys(map(str, choices))))
