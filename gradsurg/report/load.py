"""The runs of a study as read from their directories, grouped into arms."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from gradsurg.experiment.run_directory import (
    CONFIG,
    ERROR,
    FACTS,
    METRICS,
    NOT_FINITE,
    SUMMARY,
    RunDirectory,
    RunState,
)
from gradsurg.experiment.run_reader import BrokenFile, read, read_bytes, read_rows
from gradsurg.plugins.messages import printable, unknown

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

OWN_FILES = (FACTS, SUMMARY, METRICS, ERROR)


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
    summary: dict[str, Any] | None = None  # Any: what JSON can hold
    control: str | None = None
    controls: Mapping[str, str] = field(default_factory=dict)  # by their kind, `control` among them
    measured: Mapping[str, Any] = field(default_factory=dict)  # such as the metric of the verdict
    command: tuple[str, ...] = ()  # the words of the command line that planned it
    search: Mapping[str, Any] = field(default_factory=dict)  # of a trial of a search: its metric
    looked: int = 0  # finished runs of its arm when it was planned
    idle: bool = False  # no transform changed an entry at the steps that were measured
    margin_after: bool = False  # the margin was given when the run had finished
    made_with: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def name(self) -> str:
        return printable(self.path.name)

    @property
    def is_readable(self) -> bool:
        return self.state not in ("missing", "unreadable")

    @property
    def metric(self) -> str:
        """The metric of the verdict, if one was given."""
        return self.measured.get("metric") or ""

    @property
    def lr(self) -> float | None:
        """The learning rate of the optimizer; None if its config has none."""
        optimizer = (self.config or {}).get("optimizer")
        lr = optimizer.get("lr") if isinstance(optimizer, Mapping) else None
        return float(lr) if isinstance(lr, int | float) else None

    @property
    def optimizer(self) -> str:
        """The name of the optimizer; empty if it is not known."""
        optimizer = (self.config or {}).get("optimizer")
        return str(optimizer.get("name") or "") if isinstance(optimizer, Mapping) else ""

    @property
    def is_at_updates(self) -> bool:
        """Whether its surgery acts behind the optimizer."""
        site = (self.config or {}).get("site")
        return isinstance(site, Mapping) and site.get("name") == "updates"

    @property
    def notes(self) -> dict[str, str]:
        """Each note by itself, and with its details if it has any."""
        summary = self.summary or {}
        details = summary.get("note_details") or {}
        notes = summary.get("notes") or []
        return {note: f"{note}. {details[note]}" if note in details else note for note in notes}

    @property
    def test_examples(self) -> int | None:
        """The number of test examples; None if it is not known."""
        number = self.number("test_examples")
        return None if number is None else int(number)

    def number(self, key: str) -> float | None:
        """Return a number of the summary; None if it is missing."""
        number = (self.summary or {}).get(key)
        return float(number) if isinstance(number, int | float) else None


def read_runs(folder: Path, only: Collection[str] | None = None) -> list[LoadedRun]:
    """Return all runs of a study; a named control without a directory has state `missing`.

    `only` are the names of the runs to read; their controls are read too. Raises NotAStudy, in one
    sentence, if there are none, or one of `only` is not there.
    """
    if not folder.is_dir():
        fault, there = f"there is no folder '{folder}'", _studies_near(folder)
        raise NotAStudy(unknown(fault, str(folder), there) if there else fault)
    paths = _run_directories(folder)
    configs: dict[bytes, dict[str, Any]] = {}
    if only is not None:
        lacking = sorted(set(only) - {path.name for path in paths})
        if lacking:
            raise NotAStudy(f"{folder} has no run {', '.join(lacking[:6])}")
        wanted = [_read(path, configs) for path in paths if path.name in only]
        named = (name for run in wanted for name in (run.control, *run.controls.values()))
        controls = set(named) - set(only)
        runs = wanted + [_read(path, configs) for path in paths if path.name in controls]
    else:
        runs = [_read(path, configs) for path in paths]
    if not runs:
        studies = [path.name for path in _studies_in(folder)]
        hint = f"; studies in it: {', '.join(studies[:6])}" if studies else ""
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


def _studies_near(folder: Path) -> list[str]:
    """Return the studies in `runs`, and beside a missing folder in another `runs`."""
    places = {place for place in (folder.parent, Path("runs")) if place.name == "runs"}
    return sorted(str(path) for place in places for path in _studies_in(place))


def _studies_in(folder: Path) -> list[Path]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if _run_directories(path)]


def _run_directories(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    inside = (path for path in sorted(folder.iterdir()) if path.is_dir())
    return [path for path in inside if any((path / name).is_file() for name in OWN_FILES)]


def _read(path: Path, configs: dict[bytes, dict[str, Any]]) -> LoadedRun:
    """Return the run in a directory; with a broken file it is unreadable, and has the fault.

    `configs` are those read so far, by their text without the seed.
    """
    label, seed = _from_name(printable(path.name))
    directory = RunDirectory(path)
    facts: dict[str, Any] = {}  # Any: what JSON can hold
    summary: dict[str, Any] = {}
    config: dict[str, Any] | None = None
    state: State = "unreadable"
    reason, last = "", {}
    try:
        directory.check_links()
        config = _config(path / CONFIG, configs)
        facts = read(path / FACTS) or {}
        summary = read(path / SUMMARY) or {}
        state = summary.get("state", "finished") if summary else directory.state
        last = {} if summary and state == "finished" else (read_rows(path / METRICS) or [{}])[-1]
    except (BrokenFile, OSError) as error:
        state, reason = "unreadable", printable(str(error))[:300]
    known = summary | facts
    steps = (config or {}).get("steps")
    run = LoadedRun(
        path=path,
        state=state,
        reason=reason,
        arm=str(known.get("arm") or ("control" if label == "none" else "treated")),
        label=str(known.get("label") or label),
        seed=seed if known.get("seed") is None else known["seed"],
        steps=steps if isinstance(steps, int) else known.get("steps") or 0,
        done=summary.get("steps") or last.get("step") or 0,
        config=config,
        summary=summary or None,
        control=facts.get("control"),
        controls=facts.get("controls") or {},
        measured=facts.get("measured") or {},
        command=tuple(map(str, facts.get("command") or ())),
        search=facts.get("search") or {},
        looked=facts.get("looked") or 0,
        idle=summary.get("idle") is True,
        margin_after=bool(facts.get("margin_after")),
        made_with=facts.get("made_with") or {},
    )
    return run if reason else replace(run, reason=_reason(run, directory, last))


SEED = re.compile(rb"^seed: (\d+)$", re.MULTILINE)


def _config(file: Path, known: dict[bytes, dict[str, Any]]) -> dict[str, Any] | None:  # Any: YAML
    """Return a run's config; runs of one arm differ in the seed, and are parsed once."""
    text = read_bytes(file)
    seed = SEED.search(text) if text is not None else None
    if text is None or seed is None:
        return read(file)
    key = SEED.sub(b"", text)
    if key not in known:
        config = read(file)
        if config is None:
            return None
        known[key] = config
    return {**known[key], "seed": int(seed[1])}


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
