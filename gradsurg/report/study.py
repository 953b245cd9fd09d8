"""The report of a study: everything computed once, for page, figures, tables and terminal."""

import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

import polars as pl

from gradsurg.report.answer import cautions, effort, paragraph, states, trends, uncompared
from gradsurg.report.compare import (
    ABOUT_Q,
    Cost,
    Doses,
    Outcome,
    UpdateEffect,
    about_tests,
    compare,
    costs,
    doses,
    metrics_of,
    shares,
    update_effects,
)
from gradsurg.report.conflicts import ConflictSeries, about_lengths, conflict_series, load_conflicts
from gradsurg.report.load import NAMES, Arm, LoadedRun, group, read_study, value_text
from gradsurg.report.pareto import Front, fronts
from gradsurg.report.series import (
    Curve,
    EffectMap,
    Landscape,
    Norms,
    curves,
    effect_maps,
    landscapes,
    load_effects,
    load_metrics,
    norms,
)
from gradsurg.report.tuning import ArmTuning, read_tunings, unequal
from gradsurg.report.wording import count


@dataclass(frozen=True)
class StudyReport:
    """The runs of a study, its arms, and all results computed from them."""

    folder: Path
    runs: list[LoadedRun]
    arms: list[Arm]
    metrics: dict[str, str]
    alone: list[Arm]
    outcomes: list[Outcome]
    shares: list[Outcome]
    costs: list[Cost]
    updates: list[UpdateEffect]
    curves: list[Curve]
    maps: list[EffectMap]
    norms: list[Norms]
    doses: list[Doses]
    fronts: list[Front]
    landscapes: list[Landscape]
    conflicts: list[ConflictSeries]
    effects: pl.DataFrame
    conflict_rows: pl.DataFrame
    answer: str
    cautions: list[str]
    effort: list[str]
    tunings: list[ArmTuning]
    experiment: list[tuple[str, str]]

    @property
    def about_tests(self) -> str:
        """Explain p, q and the reading of outcomes; empty if no outcome has a p."""
        seeds = {o.difference.n for o in [*self.outcomes, *self.shares] if o.difference}
        sentences = [about_tests(seeds)] if max(seeds, default=0) > 1 else []
        if any(o.q_value is not None for o in [*self.outcomes, *self.shares]):
            sentences.append(f"{ABOUT_Q}.")
        return " ".join(sentences)

    @property
    def states(self) -> dict[str, int]:
        return states(self.runs)


def study_report(
    folder: Path, only: Collection[str] | None = None, logs: bool = True
) -> StudyReport:
    """Read a study and compute its report; raise NotAStudy if `folder` has no runs.

    `only` are names of run directories: the report is of these runs and their controls. Without
    `logs`, the files logged during training are not read: there are no curves, maps or norms.
    """
    runs = read_study(folder, only)
    arms = group(runs)
    logged = arms if logs else []
    metrics, faults = load_metrics(logged)
    effects = load_effects(logged)
    conflicts, torn = load_conflicts(logged)
    in_conflict = conflict_series(arms, conflicts)
    compared = compare(arms)
    grounds, broken = landscapes(logged, metrics)
    swept = _compared(doses(arms), compared)
    tunings, unread = read_tunings(folder, arms)
    faults = [*faults, *broken, *effects.faults, *torn, *unread]
    faults = [f"Left out, because it cannot be read: {text}" for text in faults]
    return StudyReport(
        folder=folder,
        runs=runs,
        arms=arms,
        metrics=metrics_of(arms),
        alone=uncompared(arms, compared),
        outcomes=compared,
        shares=shares(arms),
        costs=costs(arms),
        updates=update_effects(arms),
        curves=curves(arms, metrics),
        maps=effect_maps(arms, effects),
        norms=norms(arms, effects),
        doses=swept,
        fronts=fronts(arms),
        landscapes=grounds,
        conflicts=in_conflict,
        effects=effects.rows,
        conflict_rows=conflicts,
        answer=" ".join([paragraph(compared, arms), *trends(swept, compared)]),
        cautions=[
            *cautions(runs, compared, arms),
            *about_lengths(in_conflict),
            *unequal(tunings),
            *faults,
        ],
        effort=effort(runs),
        tunings=tunings,
        experiment=experiment(runs),
    )


GROUPS = ("task", "model", "optimizer", "schedule", "transform", "aggregator", "site", "when")
PLAIN_VALUES = (None, "*", "", {}, [])
USUAL = {"schedule": "constant", "site": "parameters", "when": "steps: start 0; every 1"}
"""Texts of groups that a reader takes for granted."""


def experiment(runs: Sequence[LoadedRun]) -> list[tuple[str, str]]:
    """Return what was trained, name by name: each plug-in with its numbers, the command, versions.

    Where runs differ, all values.
    """
    treated = [run for run in runs if run.arm != "control" and run.config]
    configs = [run.config or {} for run in treated or runs if run.config]
    if not configs:
        return []
    facts = []
    for key in GROUPS:
        items = [config[key] for config in configs if config.get(key)]
        if key == "transform":
            by_item = (item.values() if isinstance(item, dict) else [item] for item in items)
            items = [fields for values in by_item for fields in values]
        by_name: dict[str, list[dict[str, Any]]] = {}
        for item in items:
            name = item.get("name") or item.get("_target_", "") if isinstance(item, dict) else item
            by_name.setdefault(str(name), []).append(item if isinstance(item, dict) else {})
        texts = [_with_fields(name, fields) for name, fields in by_name.items()]
        text = ", or ".join(filter(None, texts))
        if text and text != USUAL.get(key):
            facts.append((key, text))
    length = [f"{_values(configs, 'steps')} steps", f"batches of {_values(configs, 'batch_size')}"]
    length += [
        f"{key} {_values(configs, key)}"
        for key, usual in (("accumulate", "1"), ("precision", "float32"))
        if _values(configs, key) not in (usual, "")
    ]
    seeds = sorted({run.seed for run in runs if run.seed >= 0})
    if len(seeds) > 2 and seeds == [*range(seeds[0], seeds[-1] + 1)]:
        length.append(f"seeds {seeds[0]} to {seeds[-1]}")
    else:
        length.append(f"seeds {', '.join(map(str, seeds))}")
    facts.append(("training", ", ".join(length)))
    facts += [("command", line) for line in commands(treated or runs) or [NO_COMMAND]]
    made = [run.made_with for run in runs if run.made_with]
    parts = [
        f"{key} {' and '.join(dict.fromkeys(str(one[key]) for one in made if key in one))}"
        for key in dict.fromkeys(key for one in made for key in one)
    ]
    hardware = [(run.summary or {}).get("hardware") for run in runs]
    places = dict.fromkeys(str(place) for place in hardware if place)
    versions = [("versions", ", ".join(parts))] if parts else []
    runner = [("runner", text)] if (text := _runners(runs)) else []
    return [*facts, *versions, *(("hardware", place) for place in places), *runner]


def _runners(runs: Sequence[LoadedRun]) -> str:
    """Return how many runs were trained in stacks, and by how much these differ; '' if none was."""
    ended = [run.summary for run in runs if run.summary]
    stacked = [runner for summary in ended if isinstance(runner := summary.get("runner"), dict)]
    if not stacked:
        return ""
    steps = Counter(str(runner.get("first_step")) for runner in stacked)
    parts = [
        f"{count(number, 'run')} stacked; first step, beside a sequential one: {text}"
        for text, number in steps.most_common()
    ]
    if alone := len(ended) - len(stacked):
        parts.append(f"{count(alone, 'run')} one by one")
    return "; ".join(parts)


def _with_fields(name: str, items: Sequence[dict[str, Any]]) -> str:
    """`clip: value 0.01, 0.1` for the settings of one plug-in."""
    keys = dict.fromkeys(key for item in items for key in item if key not in NAMES)
    fields = [f"{key} {text}" for key in keys if (text := _values(items, key))]
    return f"{name}: {'; '.join(fields)}" if fields else name


def _values(configs: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [config.get(key) for config in configs]
    texts = dict.fromkeys(value_text(one) for one in values if one not in PLAIN_VALUES)
    return ", ".join(sorted(texts, key=_numeric))


def _numeric(text: str) -> tuple[float, str]:
    """The place of a value among others: numbers by their size."""
    try:
        return float(text), ""
    except ValueError:
        return inf, text


def commands(runs: Sequence[LoadedRun]) -> list[str]:
    """Return the commands that repeat these runs; one of a sweep, if its jobs are all there."""
    given = (tuple(word for word in run.command if word != "force=true") for run in runs)
    jobs = list(dict.fromkeys(words for words in given if words))
    if len(jobs) < 2:
        return [_command(job) for job in jobs]
    keys = [[word.partition("=")[0] for word in job] for job in jobs]
    values = [list(dict.fromkeys(words)) for words in zip(*jobs, strict=False)]
    if all(one == keys[0] for one in keys) and prod(map(len, values)) == len(jobs):
        joined = [
            f"{key}={','.join(sorted((word.partition('=')[2] for word in words), key=_numeric))}"
            for key, words in zip(keys[0], values, strict=True)
        ]
        return [_command(["-m", *joined])]
    more = f"and {len(jobs) - MAX_COMMANDS} more, of the other arms"
    return [*map(_command, jobs[:MAX_COMMANDS]), *[more] * (len(jobs) > MAX_COMMANDS)]


MAX_COMMANDS = 4
NO_COMMAND = (
    "not recorded by the version that trained these runs; each run's config.yaml is complete"
)


def _command(words: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "gradsurg.run", *words])


def _compared(doses_of_arms: list[Doses], compared: list[Outcome]) -> list[Doses]:
    """Select the outcomes that have a difference to draw."""
    names = {outcome.arm.name for outcome in compared if outcome.difference}
    return [one for one in doses_of_arms if any(arm.name in names for arm in one.arms)]
