"""Reading of a study: its runs with state and reason, grouped into arms."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Literal

import polars as pl

from gradsurg.report.wording import Summary, listed
from gradsurg.training.frames import effect_table, read_conflicts
from gradsurg.training.run_directory import (
    CONFIG,
    CONFLICTS,
    EFFECTS,
    ERROR,
    FACTS,
    LOCK,
    METRICS,
    NOT_FINITE,
    SUMMARY,
    RunDirectory,
    RunState,
)
from gradsurg.training.run_reader import (
    BrokenFile,
    check_directory,
    last_row,
    printable,
    read_summary,
)

State = RunState | Literal["missing", "unreadable"]
STATES = (
    "finished",
    "running",
    "interrupted",
    "planned",
    "diverged",
    "failed",
    "missing",
    "unreadable",
)

TUNING = "tuning"
"""The folder of a study with its tuning runs and the choices of its arms."""
OWN_FILES = (FACTS, CONFIG, SUMMARY, METRICS, ERROR)


class NotAStudy(ValueError):
    """Raised for a folder that contains no run."""


@dataclass(frozen=True)
class LoadedRun:
    """A run as read from its directory; missing and unreadable fields are empty.

    `steps` are planned, `done` are logged. `control` is the name of another run's directory.
    """

    path: Path
    state: State
    reason: str = ""
    arm: str = "treated"
    label: str = ""
    seed: int = -1
    steps: int = 0
    done: int = 0
    config: dict[str, Any] | None = None  # Any: what YAML can hold
    summary: Summary | None = None
    control: str | None = None
    controls: Mapping[str, str] = field(default_factory=dict)  # by their kind, `control` among them
    metric: str = ""  # of the verdict, if one was given
    command: tuple[str, ...] = ()  # the words of the command line that planned it
    made_with: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return printable(self.path.name)

    @property
    def is_readable(self) -> bool:
        return self.state not in ("missing", "unreadable")

    @property
    def has_aggregator(self) -> bool:
        return bool((self.config or {}).get("aggregator"))

    @cached_property
    def key(self) -> str:
        """The key of the run's arm: its config without the seed."""
        if not self.config:
            return f"{self.label or self.name} without a config"
        return canonical({key: item for key, item in self.config.items() if key != "seed"})


def read_study(folder: Path, only: Collection[str] | None = None) -> list[LoadedRun]:
    """Return all runs of a study; a named control without a directory has state `missing`.

    `only` are the names of the runs to read; their controls are read too. Raises NotAStudy, in one
    sentence, if there are none, or one of `only` is not there.
    """
    if not folder.is_dir():
        raise NotAStudy(f"there is no folder {folder}")
    paths = _run_directories(folder)
    if only is not None:
        lacking = sorted(set(only) - {path.name for path in paths})
        if lacking:
            raise NotAStudy(f"{folder} has no run {listed(lacking)}")
        wanted = [_read(path) for path in paths if path.name in only]
        controls = {run.control for run in wanted} - set(only)
        runs = wanted + [_read(path) for path in paths if path.name in controls]
    else:
        runs = [_read(path) for path in paths]
    if not runs:
        studies = [path.name for path in sorted(folder.iterdir()) if _run_directories(path)]
        hint = f"; studies in it: {listed(studies)}" if studies else ""
        raise NotAStudy(f"{folder} has no runs in it{hint}")
    known = {run.name for run in runs}
    for run in list(runs):
        if run.control and run.control not in known:
            known.add(run.control)
            reason = f"{run.name} names it as its control, but it is not there"
            path = folder / run.control
            runs.append(LoadedRun(path, "missing", reason, "control", "none", run.seed, run.steps))
    return runs


def canonical(config: object) -> str:
    """The same text for the same config, whatever the order of its keys."""
    return json.dumps(config, sort_keys=True, default=str)


def _run_directories(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    inside = (path for path in sorted(folder.iterdir()) if path.is_dir())
    return [path for path in inside if any((path / name).is_file() for name in OWN_FILES)]


def fault_of(path: Path) -> str:
    """Return the fault of the first broken file in a run's directory; empty if there is none."""
    run = _read(path)
    if not run.is_readable:
        return run.reason
    try:
        for examined in (False, True):
            effect_table([path], examined)
        read_conflicts([path])
    except BrokenFile as error:
        return str(error)
    return ""


def _read(path: Path) -> LoadedRun:
    """Return the run in a directory; with a broken file it is unreadable, and has the fault."""
    label, seed = _from_name(printable(path.name))
    directory = RunDirectory(path)
    try:
        check_directory(path)
        facts, config = directory.read_facts() or {}, directory.read_config()
        last = last_row(path / METRICS)
        summary: Summary = read_summary(path / SUMMARY) or {}
        state = directory.state
    except (BrokenFile, OSError) as error:
        return LoadedRun(path, "unreadable", printable(str(error))[:300], label=label, seed=seed)
    known: Summary = summary | facts
    steps = (config or {}).get("steps")
    run = LoadedRun(
        path=path,
        state=state,
        arm=str(known.get("arm") or ("control" if label == "none" else "treated")),
        label=str(known.get("label") or label),
        seed=seed if known.get("seed") is None else known["seed"],
        steps=steps if isinstance(steps, int) else known.get("steps") or 0,
        done=summary.get("steps") or last.get("step") or 0,
        config=config,
        summary=summary or None,
        control=facts.get("control"),
        controls=facts.get("controls") or {},
        metric=(facts.get("measured") or {}).get("metric") or "",
        command=tuple(map(str, facts.get("command") or ())),
        made_with=facts.get("made_with") or {},
    )
    return replace(run, reason=_reason(run, directory, last))


def _reason(run: LoadedRun, place: RunDirectory, last: dict[str, Any]) -> str:
    match run.state:
        case "diverged" if run.summary and run.summary.get("diverged_step") is not None:
            step = run.summary["diverged_step"]
            return f"the loss was not finite at step {step} of {run.steps}"
        case "diverged":
            what = str(last.get(NOT_FINITE) or "an outcome is not finite").replace("=", " was ")
            return f"{what} at step {run.done} of {run.steps}"
        case "failed":
            reason = place.reason or "its error.log is empty"
            return f"{reason} (logged up to step {run.done} of {run.steps})"
        case "running" | "interrupted":
            return f"step {run.done} of {run.steps}"
        case "planned":
            return "not started"
        case _:
            return ""


def _from_name(name: str) -> tuple[str, int]:
    """Label and seed of `<label>-seed<k>-<hash8>`, as far as a name is one."""
    label, _, rest = name.rpartition("-seed")
    seed = rest.partition("-")[0]
    return (label, int(seed)) if seed.isdecimal() else (name, -1)


Stamp = dict[str, object]


def stamp(folder: Path) -> Stamp:
    """Size and time of every file that a report is made from: another stamp, another report."""
    facts_of_files: Stamp = {}
    for file in (folder / TUNING).glob("*.json"):
        facts_of_files[file.name] = file.stat().st_size, file.stat().st_mtime_ns
    for path in _run_directories(folder):
        for name in (*OWN_FILES, EFFECTS, CONFLICTS, LOCK):
            try:
                facts = (path / name).stat()
            except FileNotFoundError:
                continue
            facts_of_files[f"{path.name}/{name}"] = facts.st_size, facts.st_mtime_ns
        if (path / LOCK).is_file():  # its process can die without touching a file
            facts_of_files[path.name] = _read(path).state
    return facts_of_files


ABOUT_SURGERY = ("transform", "site", "when", "order", "control", "aggregator", "sources")
UNSAID = ("seed", "gradsurg", "order", "sources")
"""Keys that no name tells: they repeat others, or would not be understood."""
NAMES = ("name", "_target_")
"""Keys of a plug-in and of a dotted path, whose values are shown alone."""


@dataclass(frozen=True)
class Arm:
    """The runs that differ in nothing but their seed, in its order."""

    name: str
    runs: tuple[LoadedRun, ...]
    config: Mapping[str, object]

    @property
    def is_control(self) -> bool:
        return self.runs[0].arm == "control"

    @property
    def whole(self) -> list[LoadedRun]:
        """The finished runs, the only runs that are averaged."""
        return [run for run in self.runs if run.state == "finished" and run.summary]


def group(runs: Sequence[LoadedRun]) -> list[Arm]:
    """The arms of a study, treated arms first, each with a distinct name."""
    groups: dict[str, list[LoadedRun]] = {}
    for run in runs:
        groups.setdefault(run.key, []).append(run)
    # Arms that differ in a user's code alone are numbered: in the order of time.
    in_time = sorted(groups.values(), key=lambda group: min(map(_planned_at, group)))
    members = [tuple(sorted(group, key=lambda run: (run.seed, run.name))) for group in in_time]
    configs = [flat(group[0].config or {}) for group in members]
    names = _names([_called(group[0]) for group in members], configs)
    arms = [Arm(*parts) for parts in zip(names, members, configs, strict=True)]
    return sorted(arms, key=_order)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:  # Any: YAML's values
    """A nested config as dotted keys."""
    items: dict[str, object] = {}
    for key, item in config.items():
        if isinstance(item, Mapping):
            items |= flat(item, f"{prefix}{key}.")
        else:
            items[f"{prefix}{key}"] = item
    return items


def _called(run: LoadedRun) -> str:
    if run.state == "missing":
        return "control (not there)"
    if run.arm == "control":
        return "control" if run.label == "none" else run.label
    return run.label


def _names(labels: list[str], configs: list[dict[str, object]]) -> list[str]:
    """Return each label with the values that distinguish its arm: `clip 0.03, Adam`."""
    shared = _telling(configs, about_surgery=False)
    names = []
    for label, config in zip(labels, configs, strict=True):
        same = [other for name, other in zip(labels, configs, strict=True) if name == label]
        keys = _telling(same, about_surgery=True)
        if len(keys) == 1 and _is_dose(keys[0], label, config):
            first, keys = f"{label} {value_text(config[keys[0]])}", []
        else:
            first = label
        keys = [*keys, *shared]
        told = [_key_text(key, keys, config) for key in keys if config.get(key) is not None]
        names.append(", ".join([first, *told]))
    # what still has no name of its own gets a number
    repeats: dict[str, int] = {}
    for place, name in enumerate(names):
        repeats[name] = repeats.get(name, 0) + 1
        if repeats[name] > 1:
            names[place] = f"{name} #{repeats[name]}"
    return names


def _is_dose(key: str, label: str, config: Mapping[str, object]) -> bool:
    """Whether the key is a number of the transform or aggregator that the label names."""
    group, *middle = key.split(".")[:-1]
    number = isinstance(config.get(key), int | float) and not isinstance(config.get(key), bool)
    return number and (group == "aggregator" or [group, *middle] == ["transform", label])


def _planned_at(run: LoadedRun) -> float:
    try:
        return (run.path / CONFIG).stat().st_mtime
    except OSError:  # the run is missing
        return inf


def _telling(configs: list[dict[str, object]], about_surgery: bool) -> list[str]:
    """The keys whose values differ; a nested key that some configs lack counts only if the others
    differ, and none whose value follows from the name beside it, as Adam's own learning rate."""
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = []
    for key in keys:
        top, _, rest = key.partition(".")
        if top in UNSAID or (top in ABOUT_SURGERY) != about_surgery:
            continue
        having = [config for config in configs if key in config]
        values = {repr(config[key]) for config in having}
        missing = len(having) < len([config for config in configs if config])
        beside = f"{key.rpartition('.')[0]}.name"
        pairs = {(repr(config.get(beside)), repr(config[key])) for config in having}
        named = key != beside and rest and len(pairs) == len({name for name, _ in pairs})
        unlike = rest in NAMES and any(
            key not in config and f"{top}.{other}" in config
            for config in configs
            for other in NAMES
        )
        if (len(values) > 1 and not named) or (missing and not rest) or unlike:
            differing.append(key)
    return sorted(differing, key=lambda key: not _is_name(key))


def _is_name(key: str) -> bool:
    return key.rpartition(".")[2] in NAMES


def _key_text(key: str, keys: Sequence[str], config: Mapping[str, object]) -> str:
    """`mlp` for a name, else the last part of the key and the value: `value=0.01`."""
    if _is_name(key):
        return value_text(config[key])
    last = key.rpartition(".")[2]
    ambiguous = sum(other.rpartition(".")[2] == last for other in keys) > 1
    return f"{'.'.join(key.split('.')[-2:]) if ambiguous else last}={value_text(config[key])}"


def value_text(value: object) -> str:
    """A value of a config as a user writes it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _order(arm: Arm) -> tuple[object, ...]:
    numbers = [item for item in arm.config.values() if isinstance(item, int | float)]
    return arm.is_control, arm.runs[0].label, len(numbers), numbers, arm.name


def run_frames(
    arms: Sequence[Arm], read: Callable[[list[str | Path]], pl.DataFrame]
) -> tuple[dict[str, pl.DataFrame], list[str]]:
    """Return the rows of every run that has some, by directory name, and read errors."""
    frames, faults = {}, []
    for run in (run for arm in arms for run in arm.runs if run.is_readable):
        try:
            frame = read([run.path])
        except BrokenFile as error:
            faults.append(f"{run.name}: {error}")
            continue
        if len(frame):
            frames[run.name] = frame
    return frames, faults
