"""The runs of a study and their logs as polars data frames."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from gradsurg.report.conflicts import load_conflicts
from gradsurg.report.load import Arm, flat, group, read_study
from gradsurg.report.series import load_effects, load_metrics


@dataclass(frozen=True)
class StudyTables:
    """A study as data frames, one row for a run, for a logged step, or for a site at a step.

    `runs` has the outcome and the config of every run, whatever its state. `metrics` has what was
    logged during training, `effects` the numbers of each transform at each site, `conflicts` those
    of aggregators. `run`, `arm` and `seed` are columns of all four.
    """

    runs: pl.DataFrame
    metrics: pl.DataFrame
    effects: pl.DataFrame
    conflicts: pl.DataFrame

    def __repr__(self) -> str:
        arms = self.runs["arm"].unique(maintain_order=True).to_list()
        return (
            f"StudyTables of {len(self.runs)} runs in {len(arms)} arms ({', '.join(arms)}), with "
            "the data frames runs, metrics, effects and conflicts"
        )


def study_tables(folder: Path) -> StudyTables:
    """Return the tables of a study; see `gradsurg.load_study`."""
    arms = group(read_study(folder))
    metrics, faults = load_metrics(arms)
    effects = load_effects(arms)
    conflicts, torn = load_conflicts(arms)
    for fault in (*faults, *effects.faults, *torn):
        warnings.warn(f"left out, because it cannot be read: {fault}", stacklevel=3)
    logs = (with_arms(arms, rows) for rows in (metrics, effects.rows, conflicts))
    return StudyTables(runs_table(arms), *logs)


def runs_table(arms: Sequence[Arm]) -> pl.DataFrame:
    """A row for each run, whatever its state: outcome and config, `config.` before its keys."""
    rows = []
    for arm in arms:
        for run in arm.runs:
            row: dict[str, object] = {
                "run": run.name,
                "arm": arm.name,
                "role": run.arm,
                "label": run.label,
                "seed": run.seed if run.seed >= 0 else None,
                "state": run.state,
                "reason": run.reason,
                "steps": run.steps,
                "done": run.done,
                "control": run.control,
            }
            summary = run.summary or {}
            row |= {key: _number(summary[key]) for key in summary if "/" in key}
            row |= {
                f"config.{key}": item if isinstance(item, int | float | str) else _text(item)
                for key, item in flat(run.config or {}).items()
            }
            rows.append(row)
    # a key can be a number in one run and a word in another
    kinds = {key: _kind([row.get(key) for row in rows]) for row in rows for key in row}
    columns = {
        key: [_text(row.get(key)) if kind == pl.String else row.get(key) for row in rows]
        for key, kind in kinds.items()
    }
    return pl.DataFrame(columns, schema=kinds, strict=False)


def with_arms(arms: Sequence[Arm], rows: pl.DataFrame) -> pl.DataFrame:
    """Add the arm, seed and state of its run to each row."""
    known = [(run.name, arm.name, run.seed, run.state) for arm in arms for run in arm.runs]
    names = pl.DataFrame(known, schema=["run", "arm", "seed", "state"], orient="row")
    rows = rows.with_columns(pl.col("run").cast(pl.String)).join(
        names, on="run", how="left", maintain_order="left"
    )
    first = ["run", "arm", "seed", "state"]
    others = [name for name in rows.columns if name not in first]
    return rows.select(*first, *others).with_columns(
        pl.col("run", "arm", "state").cast(pl.Categorical)
    )


def _kind(values: Sequence[object]) -> type[pl.DataType]:
    known = [value for value in values if value is not None]
    for types, kind in (((bool,), pl.Boolean), ((int,), pl.Int64), ((int, float), pl.Float64)):
        if known and all(type(value) in types for value in known):
            return kind
    return pl.String


def _number(item: object) -> float | None:
    return float(item) if isinstance(item, int | float) else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
