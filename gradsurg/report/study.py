"""The report of a study: everything computed once, for page, figures, tables and terminal."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from gradsurg.report.answer import cautions, effort, paragraph, states, uncompared
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
from gradsurg.report.load import Arm, LoadedRun, group, read_study
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
        doses=_compared(doses(arms), compared),
        fronts=fronts(arms),
        landscapes=grounds,
        conflicts=in_conflict,
        effects=effects.rows,
        conflict_rows=conflicts,
        answer=paragraph(compared, arms),
        cautions=[
            *cautions(runs, compared, arms),
            *about_lengths(in_conflict),
            *unequal(tunings),
            *faults,
        ],
        effort=effort(runs),
        tunings=tunings,
    )


def _compared(doses_of_arms: list[Doses], compared: list[Outcome]) -> list[Doses]:
    """Select the outcomes that have a difference to draw."""
    names = {outcome.arm.name for outcome in compared if outcome.difference}
    return [one for one in doses_of_arms if any(arm.name in names for arm in one.arms)]
