"""The difference that a command can find, estimated before training from earlier runs' spread."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from os import DirEntry, scandir
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import yaml

from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import CONFIG, SUMMARY, UNTIL, config_text
from gradsurg.experiment.run_reader import BrokenFile, known, read_bytes
from gradsurg.experiment.runs import Experiment
from gradsurg.experiment.settings import Settings
from gradsurg.experiment.tuning import HEADLINE
from gradsurg.stats import (
    MAX_P,
    detectable_effect,
    equivalence_power,
    parse_margin,
    sd_interval,
    seeds_needed,
)

MAX_READ = 200  # control runs of which files are read
MIN_FREEDOM = 5  # degrees of freedom from which a spread is printed without its interval
PLAIN = "none-seed"  # beginning of the name of a plain control's folder
SEED = re.compile(r"^seed: (\d+)\n", re.MULTILINE)
TRAINING = ("schedule", "batch_size", "accumulate", "precision", "compile", "device")
SHOWN = {
    "optimizer": "{}",
    "lr": "lr {}",
    "steps": "{} steps",
    "validation": "validation {}",
}
"""Settings whose values a line states if they differ; of others it states the name only."""
Values = dict[str, Any]  # Any: YAML's values


@dataclass(frozen=True)
class Controls:
    """Finished plain controls of one training: its settings, and the outcomes by seed."""

    training: Values
    outcomes: dict[str, float]


@dataclass(frozen=True)
class Spread:
    """The standard deviation over seeds, pooled over trainings, and the mean of all outcomes.

    `runs` describes the runs in words.
    """

    sd: float
    freedom: int
    mean: float
    runs: str

    @classmethod
    def of(cls, groups: Sequence[Controls], wanted: Values) -> "Spread | None":
        """Pool groups of two or more runs, or return None; `runs` names differences to `wanted`."""
        if not groups:
            return None
        several = [[*each.outcomes.values()] for each in groups]
        count = sum(map(len, several))
        freedom = count - len(several)
        squares = sum((len(values) - 1) * variance(values) for values in several)
        mean = fmean(value for values in several for value in values)
        runs = f"{count} control runs{_elsewhere([each.training for each in groups], wanted)}"
        return cls(sqrt(squares / freedom), freedom, mean, runs)


def power_lines(experiments: Sequence[Experiment]) -> list[str]:
    """Return a warning if the seeds or splits are too few for significance with so many arms, and
    the difference that the seeds can detect, a line for each task and model.

    Empty if nothing is compared or known. There is no such difference for splits, whose spread
    control runs do not show, or with `until`, because such a study compares numbers of steps.
    """
    pairs = [
        (pair.treated, each)
        for each in experiments
        for pair in each.pairs
        if pair.treated and pair.treated.controls
    ]
    treated = [run for run, _ in pairs]
    seeds = {run.seed for run in treated}
    splits = {getattr(run.task, "split_seed", None) for run in treated}
    n, unit = (len(splits), "splits") if len(splits) > 1 else (len(seeds), "seeds")
    if n < 2:
        return []
    if n < (least := seeds_needed(1)):
        rule = "no difference can be significant (p <= 0.05)"
        return [f"{n} {unit}: {rule}; that needs at least {unit}={least}"]
    lines = []
    arms = len({arm_text(run.identity) for run in treated})
    if n < (least := seeds_needed(arms)):
        rule = f"an arm that differs alone needs {unit}={least} to be significant (q <= 0.05)"
        lines.append(f"{arms} arms with {n} {unit}: {rule}")
    if unit == "splits":
        return lines
    settings: dict[str, tuple[Run, Experiment]] = {}
    for run, each in pairs:
        setting = json.dumps([run.identity["task"], run.identity["model"]], default=repr)
        if each.settings.until is None:
            settings.setdefault(setting, (run, each))
    for run, each in settings.values():
        metric, spread = _spread(run, each)
        if spread is not None and spread.sd:
            found = _told(metric, spread, n, arms, each.settings.margin)
            lines.append(f"{_names(run)}: {found}" if len(settings) > 1 else found)
    return lines


def arm_text(identity: Mapping[str, Any]) -> str:  # Any: any JSON value
    """Return a text that is equal for the runs of one arm: without seed and split."""
    same = {**identity, "task": {**identity["task"], "split_seed": None}}
    return json.dumps(same | {"seed": None}, sort_keys=True, default=repr)


def _told(metric: str, spread: Spread, seeds: int, arms: int, margin: str | None) -> str:
    """Return a line with the difference that `seeds` can find, or, with a margin, with the share of
    studies in which equal arms are found equivalent.

    The arms of a seed share weights and batches: if their outcomes are alike, more is found.
    """
    name, is_share = metric.replace("/", " "), metric.rpartition("/")[2].startswith("accuracy")
    sds = [sqrt(2) * sd for sd in (spread.sd, *sd_interval(spread.sd, spread.freedom))]
    if margin is None:
        text, ends = _detectable(sds, seeds, arms, is_share)
        text, notes = f"{seeds} seeds can find a difference in {name} of {text}", ["80 % power"]
    else:
        size = parse_margin(margin).of(spread.mean)
        chances = [equivalence_power(seeds, sd, size) or 0.0 for sd in sds]
        share, most, least = (f"{100 * chance:.0f}" for chance in chances)
        limit, ends, notes = _size(size, is_share), f"{least} to {most} %", []
        text = f"if the arms are equal, {seeds} seeds show {name} within {limit} of the control"
        text += f" in {share} % of studies"
    if spread.freedom >= MIN_FREEDOM:
        return f"{text} ({', '.join([*notes, f'from the spread of {spread.runs}'])})"
    few = f"{ends}, as the spread is known only from {spread.runs}"
    return f"{text} ({'; '.join([*notes, few])})"


def _detectable(sds: Sequence[float], seeds: int, arms: int, is_share: bool) -> tuple[str, str]:
    """Return the difference that can be found, for one arm alone and for one of several arms.

    `sds[0]` is the standard deviation of the differences, the two others are its interval, which
    gives a range. The part for several arms is left out if so many seeds cannot find any.
    """
    found, ranges = [], []
    for number in dict.fromkeys((1, arms)):
        effects = [detectable_effect(seeds, sd, level=MAX_P / number) for sd in sds]
        of = "" if arms == 1 else " for one arm alone" if number == 1 else f" for one of {arms}"
        sizes = [_size(effect, is_share) for effect in effects if effect is not None]
        if sizes:
            effect, low, high = sizes
            found.append(f"{effect}{of}")
            ranges.append(f"{low.removesuffix(' pp')} to {high}{of}")
    return ", ".join(found), ", ".join(ranges)


def _size(effect: float, is_share: bool) -> str:
    """Return two digits of a difference; of shares it is at most 100 percentage points."""
    number = min(100 * effect, 100) if is_share else effect
    return (
        f"{number:.2g}{' pp' * is_share}" if number < 99.5 else f"{number:,.0f}{' pp' * is_share}"
    )


def _spread(run: Run, experiment: Experiment) -> tuple[str, Spread | None]:
    """Return the metric of the verdict, and its spread in finished plain controls.

    They have the task and the model of `run`. Three choices are tried in order: runs of the same
    training, runs with its optimizer and number of steps, all runs with its optimizer. The first
    choice with enough runs is taken, otherwise the first with two runs, otherwise runs of other
    optimizers. A seed counts once, even if several studies or measured sites have it.
    """
    # The parts of `config.yaml` are compared as text: parsing YAML takes milliseconds a file.
    task, model = (config_text({key: run.identity[key]}) for key in ("task", "model"))
    metric, by_text = experiment.settings.metric or "", dict[str, Values]()
    groups: dict[str, Controls] = {}
    for config, folder in _controls(experiment.settings):
        seed = SEED.search(config)
        if seed is None or not (_has(config, task) and _has(config, model)):
            continue
        summary = known(folder / SUMMARY)
        metric = metric or next((f"test/{x}" for x in HEADLINE if f"test/{x}" in summary), "")
        value = summary.get(metric)
        if _is_whole(summary) and isinstance(value, int | float):
            text = SEED.sub("", config)
            if text not in by_text:
                by_text[text] = _training(yaml.safe_load(text))
            training = by_text[text]
            group = groups.setdefault(json.dumps(training), Controls(training, {}))
            group.outcomes.setdefault(seed[1], float(value))
    wanted = _training(run.identity)
    several = [each for each in groups.values() if len(each.outcomes) > 1]
    alike = _with_same(several, wanted, "optimizer")
    choices = (
        _with_same(several, wanted, *wanted),
        _with_same(alike, wanted, "steps"),
        alike or several,
    )
    spreads = [spread for each in choices if (spread := Spread.of(each, wanted)) is not None]
    enough = (spread for spread in spreads if spread.freedom >= MIN_FREEDOM)
    return metric, next(enough, spreads[0] if spreads else None)


def _is_whole(summary: Mapping[str, Any]) -> bool:  # Any: any JSON value
    """Whether a run had no `until` that could end it early, and learned something."""
    is_finished = summary.get("state") == "finished"
    return is_finished and UNTIL not in summary and not summary.get("learned_nothing")


def _training(identity: Mapping[str, Any]) -> Values:  # Any: YAML's values
    """Return a flat mapping of the training settings that change the spread."""
    config: Values = json.loads(json.dumps({**identity}, default=repr))  # without tuples
    fields = {**config["optimizer"]}
    names = [fields.pop(key, None) for key in ("name", "_target_")]
    return {
        "optimizer": next(filter(None, names), ""),
        "lr": fields.pop("lr", None),
        "steps": config.get("steps"),
        "validation": config.get("validation") or 0,
        **{key: config.get(key) for key in TRAINING},
        **fields,
    }


def _with_same(groups: Sequence[Controls], wanted: Values, *keys: str) -> list[Controls]:
    return [
        each for each in groups if all(each.training.get(key) == wanted.get(key) for key in keys)
    ]


def _elsewhere(trainings: Sequence[Values], wanted: Values) -> str:
    """Return in which settings trainings differ from `wanted`, as " at lr 0.1, 60 steps"."""
    different = [key for key in wanted if any(each.get(key) != wanted[key] for each in trainings)]
    by_key = {key: [each[key] for each in trainings if each[key] is not None] for key in SHOWN}
    told = {key: SHOWN[key].format(_span(by_key[key])) for key in different if by_key.get(key)}
    optimizer = told.pop("optimizer", "")
    others = [key for key in different if key not in SHOWN] if not optimizer else []
    named = [*[optimizer] * bool(optimizer), *[f"another {key}" for key in others]]
    text = f" with {', '.join(named)}" if named else ""
    return f"{text} at {', '.join(told.values())}" if told else text


def _span(values: Sequence[Any]) -> str:  # Any: YAML's values
    """Return a value, or the least and the largest of several numbers, or several names."""
    each = sorted({*values})
    if len(each) > 1 and not isinstance(each[0], str):
        return f"{each[0]:g} to {each[-1]:g}"
    return " or ".join(value if isinstance(value, str) else f"{value:g}" for value in each)


def _has(config: str, part: str) -> bool:
    """Whether a part of a `config.yaml` is in another one, whole."""
    _, found, after = f"\n{config}".partition(f"\n{part}")
    return bool(found) and not after.startswith(" ")


def _names(run: Run) -> str:
    """Return the names of task and model."""
    fields: Any = [run.identity[group] for group in ("task", "model")]  # Any: as in YAML
    return ", ".join(str(each.get("name") or each["_target_"]) for each in fields)


def _controls(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Yield config and folder of finished plain controls of all studies.

    Those of the command's study come first, then the newest; after `MAX_READ` there are no more.
    """
    found: list[tuple[bool, float, str]] = []
    for study in _folders(settings.out_folder):
        is_own = study.name == settings.study
        found += [
            (is_own, folder.stat().st_mtime, folder.path)
            for folder in _folders(study.path)
            if folder.name.startswith(PLAIN)
        ]
    for folder in (Path(path) for _, _, path in sorted(found, reverse=True)[:MAX_READ]):
        try:
            config = read_bytes(folder / CONFIG) if (folder / SUMMARY).is_file() else None
        except (BrokenFile, OSError):
            continue
        if config is not None:
            yield config.decode(errors="replace"), folder


def _folders(path: str | Path) -> list[DirEntry[str]]:
    """Return the folders in a folder; none if it cannot be read."""
    try:
        with scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except OSError:
        return []
