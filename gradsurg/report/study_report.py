"""All that is said of a study, worked out once for the page, the figures and the tables."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from gradsurg.report import answer, certainty, curves, effect_series, outcomes
from gradsurg.report.alone import uncompared
from gradsurg.report.conflict_text import about_lengths
from gradsurg.report.conflicts import ConflictSeries, conflict_series, load_conflicts
from gradsurg.report.curves import Curve
from gradsurg.report.dose import Doses, doses
from gradsurg.report.effect_series import EffectMap, Norms
from gradsurg.report.effort import effort
from gradsurg.report.grouping import Arm, group
from gradsurg.report.landscapes import Landscape, landscapes
from gradsurg.report.outcomes import Cost, Outcome, UpdateEffect
from gradsurg.report.pareto import Front, fronts
from gradsurg.report.reading import Found, read_study


@dataclass(frozen=True)
class StudyReport:
    """The runs of a study, its arms, and what follows from them."""

    folder: Path
    runs: list[Found]
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

    @property
    def about_tests(self) -> str:
        """What p, q and the reading of an outcome are of; empty if none has a p."""
        seeds = {o.difference.n for o in [*self.outcomes, *self.shares] if o.difference}
        said = [certainty.about_tests(seeds)] if max(seeds, default=0) > 1 else []
        if any(o.q_value is not None for o in [*self.outcomes, *self.shares]):
            said.append(f"{certainty.ABOUT_Q}.")
        return " ".join(said)

    @property
    def states(self) -> dict[str, int]:
        return answer.states(self.runs)


def study_report(
    folder: Path, only: Collection[str] | None = None, logs: bool = True
) -> StudyReport:
    """Read a study; raises NotAStudy if `folder` is none.

    `only` are names of run directories: of these and of their controls alone. Without `logs`, what
    the runs wrote as they went is not read: there are no curves, no maps and no norms.
    """
    runs = read_study(folder, only)
    arms = group(runs)
    logged = arms if logs else []
    metrics, faults = curves.load_metrics(logged)
    effects = effect_series.load_effects(logged)
    conflicts, torn = load_conflicts(logged)
    in_conflict = conflict_series(arms, conflicts)
    compared = outcomes.compare(arms)
    grounds, broken = landscapes(logged, metrics)
    faults = [*faults, *broken, *effects.faults, *torn]
    faults = [f"Left out, because it cannot be read: {text}" for text in faults]
    return StudyReport(
        folder=folder,
        runs=runs,
        arms=arms,
        metrics=outcomes.metrics_of(arms),
        alone=uncompared(arms, compared),
        outcomes=compared,
        shares=outcomes.shares(arms),
        costs=outcomes.costs(arms),
        updates=outcomes.update_effects(arms),
        curves=curves.curves(arms, metrics),
        maps=effect_series.effect_maps(arms, effects),
        norms=effect_series.norms(arms, effects),
        doses=_compared(doses(arms), compared),
        fronts=fronts(arms),
        landscapes=grounds,
        conflicts=in_conflict,
        effects=effects.rows,
        conflict_rows=conflicts,
        answer=answer.paragraph(compared, arms),
        cautions=[
            *answer.cautions(runs, compared, arms),
            *about_lengths(in_conflict),
            *faults,
        ],
        effort=effort(runs),
    )


def _compared(found: list[Doses], compared: list[Outcome]) -> list[Doses]:
    """Those that have a difference to draw."""
    names = {outcome.arm.name for outcome in compared if outcome.difference}
    return [one for one in found if any(arm.name in names for arm in one.arms)]
