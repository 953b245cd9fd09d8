"""All that is said of a study, worked out once for the page, the figures and the tables."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from gradsurg.report import answer, dose, outcomes, series
from gradsurg.report.grouping import Arm, group
from gradsurg.report.reading import Found, read_study


@dataclass(frozen=True)
class StudyReport:
    """The runs of a study, its arms, and what follows from them."""

    folder: Path
    runs: list[Found]
    arms: list[Arm]
    metrics: dict[str, str]
    outcomes: list[outcomes.Outcome]
    shares: list[outcomes.Outcome]
    costs: list[outcomes.Cost]
    updates: list[outcomes.UpdateEffect]
    curves: list[series.Curve]
    maps: list[series.EffectMap]
    norms: list[series.Norms]
    doses: list[dose.Doses]
    effects: pl.DataFrame
    answer: str
    cautions: list[str]

    @property
    def states(self) -> dict[str, int]:
        return answer.states(self.runs)


def study_report(folder: Path) -> StudyReport:
    """Read a study; raises NotAStudy if `folder` is none."""
    runs = read_study(folder)
    arms = group(runs)
    metrics, faults = series.load_metrics(arms)
    effects = series.load_effects(arms)
    compared = outcomes.compare(arms)
    faults = [f"Left out, because it cannot be read: {text}" for text in faults + effects.faults]
    return StudyReport(
        folder=folder,
        runs=runs,
        arms=arms,
        metrics=outcomes.metrics_of(arms),
        outcomes=compared,
        shares=outcomes.shares(arms),
        costs=outcomes.costs(arms),
        updates=outcomes.update_effects(arms, series.update_means(metrics)),
        curves=series.curves(arms, metrics),
        maps=series.effect_maps(arms, effects),
        norms=series.norms(arms, effects),
        doses=dose.doses(arms),
        effects=effects.rows,
        answer=answer.paragraph(compared, arms),
        cautions=[*answer.cautions(runs, compared), *faults],
    )
