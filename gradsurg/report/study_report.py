"""All that is said of a study, worked out once for the page, the figures and the tables."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from gradsurg.report import answer, outcomes, series
from gradsurg.report.dose import Doses, doses
from gradsurg.report.grouping import Arm, group
from gradsurg.report.outcomes import Cost, Outcome, UpdateEffect
from gradsurg.report.reading import Found, read_study
from gradsurg.report.series import Curve, EffectMap, Norms


@dataclass(frozen=True)
class StudyReport:
    """The runs of a study, its arms, and what follows from them."""

    folder: Path
    runs: list[Found]
    arms: list[Arm]
    metrics: dict[str, str]
    outcomes: list[Outcome]
    shares: list[Outcome]
    costs: list[Cost]
    updates: list[UpdateEffect]
    curves: list[Curve]
    maps: list[EffectMap]
    norms: list[Norms]
    doses: list[Doses]
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
        doses=doses(arms),
        effects=effects.rows,
        answer=answer.paragraph(compared, arms),
        cautions=[*answer.cautions(runs, compared), *faults],
    )
