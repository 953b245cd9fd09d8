"""The difference that a command can find, told before training from the spread of earlier runs."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from os import DirEntry, scandir
from pathlib import Path
from statistics import variance
from typing import Any

from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import CONFIG, SUMMARY, config_text
from gradsurg.experiment.run_reader import BrokenFile, known, read_bytes
from gradsurg.experiment.runs import Experiment
from gradsurg.experiment.settings import Settings
from gradsurg.experiment.tuning import HEADLINE
from gradsurg.stats import detectable_effect, sd_interval, seeds_needed

MAX_READ = 200  # control runs of which files are read
MIN_FREEDOM = 5  # degrees of freedom of a spread that is told without its interval
PLAIN = "none-seed"  # with which the folder of a plain control begins
SEED = re.compile(r"^seed: \d+\n", re.MULTILINE)


@dataclass(frozen=True)
class Spread:
    """The standard deviation over seeds, pooled over configs, of `runs` (a text)."""

    sd: float
    freedom: int
    runs: str

    @classmethod
    def of(cls, groups: Iterable[Mapping[str, float]], note: str) -> "Spread | None":
        """Pool groups of values, by the names of their runs; None if no group has two."""
        several = [[*values.values()] for values in groups if len(values) > 1]
        if not several:
            return None
        count = sum(map(len, several))
        freedom = count - len(several)
        squares = sum((len(values) - 1) * variance(values) for values in several)
        return cls(sqrt(squares / freedom), freedom, f"{count} control runs{note}")


def power_lines(experiments: Sequence[Experiment]) -> list[str]:
    """Return a warning if the seeds or splits are too few for significance with so many arms, and
    the difference that the seeds can detect, a line for each task and model.

    None if nothing is compared or known. The spread of splits is not known from control runs.
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
    arms = len({arm_text(run.identity, "model", "task") for run in treated})
    of_one_setting = arms == len({arm_text(run.identity) for run in treated})
    if of_one_setting and n < (least := seeds_needed(arms)):
        rule = f"an arm that differs alone needs {unit}={least} to be significant (q <= 0.05)"
        lines.append(f"{arms} arms with {n} {unit}: {rule}")
    if unit == "splits":
        return lines
    settings: dict[str, tuple[Run, Experiment]] = {}
    for run, each in pairs:
        setting = json.dumps([run.identity["task"], run.identity["model"]], default=repr)
        settings.setdefault(setting, (run, each))
    for run, each in settings.values():
        if found := _detectable(run, each, n):
            lines.append(f"{_names(run)}: {found}" if len(settings) > 1 else found)
    return lines


def arm_text(identity: Mapping[str, Any], *groups: str) -> str:  # Any: any JSON value
    """Return a text that is equal for the runs of one arm: no seed, split or config of `groups`."""
    same = {**identity, "task": {**identity["task"], "split_seed": None}}
    return json.dumps(same | dict.fromkeys(("seed", *groups)), sort_keys=True, default=repr)


def _detectable(run: Run, experiment: Experiment, seeds: int) -> str:
    """Return the difference that so many seeds can find in the task and with the model of a run."""
    metric, spread = _spread(run, experiment)
    if spread is None or not spread.sd:
        return ""
    share = metric.rpartition("/")[2].startswith("accuracy")
    # The arms of a seed share weights and batches: if their outcomes are alike, less is found.
    effect, low, high = (
        _size(detectable_effect(seeds, sqrt(2) * sd) or 0.0, share)
        for sd in (spread.sd, *sd_interval(spread.sd, spread.freedom))
    )
    unit = " pp" if share else ""
    found = f"{seeds} seeds can find a difference of {effect}{unit} in {metric.replace('/', ' ')}"
    if spread.freedom >= MIN_FREEDOM:
        return f"{found} (80 % power, from the spread of {spread.runs})"
    few = f"{low} to {high}{unit}, as the spread is known only from {spread.runs}"
    return f"{found} (80 % power; {few})"


def _size(effect: float, is_share: bool) -> str:
    """Return two digits of a difference; of shares it is at most 100 percentage points."""
    number = min(100 * effect, 100) if is_share else effect
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}"


def _spread(run: Run, experiment: Experiment) -> tuple[str, Spread | None]:
    """Return the metric of the verdict, and its spread in finished plain controls.

    They have the task and the model of `run`. Runs of the same config are taken if they are enough,
    else also those with as many steps, else all: the first choice with enough, else with two. Two
    studies may have the same run, which counts once.
    """
    plain = next((pair.controls.get("plain") for pair in experiment.pairs), None)
    own = SEED.sub("", config_text(plain.identity)) if plain is not None else ""
    # The parts of `config.yaml` are compared as text: parsing YAML takes milliseconds a file.
    task, model, steps = (
        config_text({key: run.identity[key]}) for key in ("task", "model", "steps")
    )
    metric, groups = experiment.settings.metric or "", dict[str, dict[str, float]]()
    for config, folder in _controls(experiment.settings):
        if not (_has(config, task) and _has(config, model)):
            continue
        summary = known(folder / SUMMARY)
        metric = metric or next((f"test/{x}" for x in HEADLINE if f"test/{x}" in summary), "")
        value = summary.get(metric)
        if summary.get("state") == "finished" and isinstance(value, int | float):
            groups.setdefault(config, {})[folder.name] = float(value)
    choices = (
        ([groups.get(own, {})], ""),
        ([values for config, values in groups.items() if _has(config, steps)], ""),
        (groups.values(), f", not all with {run.schedule.steps} steps"),
    )
    spreads = [spread for choice in choices if (spread := Spread.of(*choice)) is not None]
    enough = (spread for spread in spreads if spread.freedom >= MIN_FREEDOM)
    return metric, next(enough, spreads[0] if spreads else None)


def _has(config: str, part: str) -> bool:
    """Whether a part of a `config.yaml` is in another one, whole."""
    _, found, after = f"\n{config}".partition(f"\n{part}")
    return bool(found) and not after.startswith(" ")


def _names(run: Run) -> str:
    """Return the names of task and model."""
    fields: Any = [run.identity[group] for group in ("task", "model")]  # Any: as in YAML
    return ", ".join(str(each.get("name") or each["_target_"]) for each in fields)


def _controls(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Yield config, without its seed, and folder of finished plain controls of all studies.

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
            yield SEED.sub("", config.decode(errors="replace")), folder


def _folders(path: str | Path) -> list[DirEntry[str]]:
    """Return the folders in a folder; none if it cannot be read."""
    try:
        with scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except OSError:
        return []
