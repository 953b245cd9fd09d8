"""What the runs of a study will have measured, by name: known before any of them is trained."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from gradsurg.config.build import Experiment
from gradsurg.config.rehearsal import FEW, examined, metrics_of
from gradsurg.effects.numbers import EFFECT_NAMES, UPDATE_NAMES, UPDATES_SAMPLED
from gradsurg.plugins.fields import nearest
from gradsurg.reproduce.expected import Band, Drawing, Expected
from gradsurg.reproduce.judging import EFFECT, is_meant, known_of, names_in
from gradsurg.sites import tree
from gradsurg.tasks.base import Examined
from gradsurg.torch_internals import random_state
from gradsurg.training.run import Run
from gradsurg.training.run_directory import UNTIL_REACHED, UNTIL_STEP

ALWAYS = ("steps", "skipped_steps", "time/train_s", "time/step_ms")


@dataclass(frozen=True)
class Foreseen:
    """A run that is to be: what a band can choose it by, and what it will have measured.

    `ends` are the names of the numbers of its end, `rows` those of its steps, each with every how
    many; of each of the `transforms` at each of the `sites` there are effects, `every` so often.
    """

    known: Mapping[str, object]
    steps: int
    ends: tuple[str, ...]
    rows: Mapping[str, int]
    transforms: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    every: int = 1


@dataclass(frozen=True)
class Measured:
    """The names of a task's metrics on training and on test examples and of what is examined, and
    the sites where effects are measured.
    """

    trained: list[str]
    tested: list[str]
    examined: list[str]
    sites: tuple[str, ...]


Studies = Mapping[str, Mapping[str, Foreseen]]


def foresee(experiment: Experiment) -> dict[str, Foreseen]:
    """The runs of an experiment, by the names of their directories; nothing is trained."""
    runs = {run.name: run for pair in experiment.pairs for run in pair.runs}
    task, data = next(iter(runs.values())).task, experiment.data
    with random_state.kept():
        model = experiment.make_model()
        tested = metrics_of(task, model, data.test_inputs[:FEW], data.test_targets[:FEW])
        # What the first training examples lack the last may have, as those of a memory.
        both = [torch.cat([o[:FEW], o[-FEW:]]) for o in (data.train_inputs, data.train_targets)]
        trained = metrics_of(task, model, *both)
        found = examined(task, model, data) if isinstance(task, Examined) else []
        sites = _sites(experiment, model) if experiment.settings.effects_every else ()
    measured = Measured(trained, tested, found, sites)
    return {name: _foreseen(run, measured) for name, run in runs.items()}


def faults_of(expected: Expected, studies: Studies) -> list[str]:
    """What a band or the figure is about and no run will have, a line for each."""
    said = []
    for band in expected.bands:
        study = band.study or expected.quick[0]
        runs = list(studies[study].values())
        said += [f"{band.name}: {study} {fault}" for fault in _of_band(band, runs)]
    if isinstance(expected.figure, Drawing):
        runs = [run for key in expected.figure.studies or studies for run in studies[key].values()]
        fault = _of_figure(expected.figure, runs)
        said += [f"figure: {fault}"] if fault else []
    return said


def _sites(experiment: Experiment, model: nn.Module) -> tuple[str, ...]:
    """Where effects are measured, of every arm alike."""
    for item in experiment.pairs[0].runs[0].surgery.interventions:
        if item.aggregator is None:
            return tree(model, experiment.example_input, item.at).sites
    return ()


def _foreseen(run: Run, measured: Measured) -> Foreseen:
    schedule = run.schedule
    tested = [f"test/{name}" for name in measured.tested]
    following = [f"test/{name}" for name in run.task.trajectory_metric_names if schedule.eval_every]
    updates = (
        (UPDATES_SAMPLED, *UPDATE_NAMES) if schedule.update_effect_every and not run.shadow else ()
    )
    until = (UNTIL_REACHED, UNTIL_STEP) if schedule.until is not None else ()
    trained = [f"train/{name}" for name in measured.trained]
    found = [f"examined/{name}" for name in measured.examined]
    ends = (*trained, *tested, *following, *found, *until, *updates, *ALWAYS)
    rows: dict[str, int] = dict.fromkeys(("train/loss", *updates), schedule.log_every)
    if schedule.eval_every:
        rows |= dict.fromkeys(tested, schedule.eval_every)
    known = known_of(run.identity, run.label, run.seed)
    of_each = zip(run.surgery.interventions, run.surgery.labels, strict=True)
    transforms = tuple(name for item, names in of_each if not item.aggregator for name in names)
    every = schedule.log_every
    return Foreseen(known, schedule.steps, ends, rows, transforms, measured.sites, every)


def _of_band(band: Band, runs: list[Foreseen]) -> Iterator[str]:
    for which in (band.runs, *([band.minus] if band.minus else [])):
        meant = [run for run in runs if is_meant(run.known, which)]
        if meant:
            faults = (_of_metric(band, run) for run in meant)
            yield from dict.fromkeys(fault for fault in faults if fault)
        else:
            asked = ", ".join(f"{key}: {value}" for key, value in which.items())
            yield f"has no run of {asked}{_near(which, runs)}"


def _near(which: Mapping[str, object], runs: list[Foreseen]) -> str:
    """What there is in the place of the first key, or of its value, that no run has."""
    for key, value in which.items():
        values = [run.known[key] for run in runs if key in run.known]
        if not values:
            known = (key for run in runs for key in run.known)
            return f": their config has no '{key}'. {_nearest(key, known)}"
        if value not in values:
            return f". {_nearest(value, values)}"
    return ""


def _of_metric(band: Band, run: Foreseen) -> str:
    """What the run will not have of what a band measures; empty if it will have all."""
    if band.metric.startswith(EFFECT):
        return _of_effect(band, run)
    for name in names_in(band.metric):
        if band.at == "end" and name not in run.ends:
            return f"will have no {name}. {_nearest(name, run.ends)}"
        if band.at != "end" and name not in run.rows:
            return f"will have no {name} but at the end. {_nearest(name, run.rows)}"
        if fault := _of_step(band, run, run.rows.get(name, 1)):
            return fault
    return ""


def _of_effect(band: Band, run: Foreseen) -> str:
    _, transform, rest = f"{band.metric}//".split("/", 2)
    site, _, number = rest.removesuffix("//").rpartition("/")
    parts = ("transform", transform, run.transforms), ("site", site, run.sites)
    for what, name, choices in (*parts, ("number", number, EFFECT_NAMES)):
        if name not in choices:
            return f"will have no {band.metric}: no {what} '{name}'. {_nearest(name, choices)}"
    return _of_step(band, run, run.every)


def _of_step(band: Band, run: Foreseen, every: int) -> str:
    step = band.at_step
    if step is None or step == run.steps or (step < run.steps and step % every == 0):
        return ""
    return f"will have {band.metric} at every {every} steps up to {run.steps}, not at {step}"


def _of_figure(figure: Drawing, runs: list[Foreseen]) -> str:
    """What the figure is to show and no run will have."""
    match figure.kind:
        case "curves":
            names = [name for run in runs for name in run.rows]
        case "outcomes":
            names = [name for run in runs for name in run.ends]
        case "alignment":
            names = [name for run in runs for name in run.transforms]
        case "maps":
            names = [name.partition("/")[0] for run in runs for name in run.ends]
    if figure.metric in names:
        return ""
    return f"there will be no {figure.metric} to draw. {_nearest(figure.metric, names)}"


def _nearest(name: object, choices: Iterable[object]) -> str:
    return nearest(str(name), list(dict.fromkeys(map(str, choices))))
