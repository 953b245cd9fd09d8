"""Metrics, effects and conflicts of many runs as polars data frames.

A row is a line of the file, with its `run`, the path of the directory as given. A half-written last
line is left out: a killed run resumes before it. An empty or missing file has no rows; a missing
directory raises FileNotFoundError, a broken file BrokenFile, which names it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import polars as pl

from gradsurg.effects.numbers import (
    CONFLICT_NAMES,
    CONFLICT_TASK_NAMES,
    EFFECT_NAMES,
    EXTREME_NAMES,
    NORMS,
)
from gradsurg.experiment.run_directory import (
    CONFLICTS,
    EFFECTS,
    EXAMINED_EFFECTS,
    METRICS,
    NOT_FINITE,
)
from gradsurg.experiment.run_reader import BrokenFile, read_lines

Schema = Mapping[str, pl.DataType | type[pl.DataType]]

LISTS = ("tasks", "cosines", "norms")
OTHERS = "others"
"""The column of `conflicts.jsonl` with the results of other aggregators, by name."""

FLOATS = pl.List(pl.Float64)
TOTALS = ("seen", "calls", "sampled", "nonfinite")
METRICS_KEYS: Schema = {"run": pl.String, "step": pl.Int64}
EFFECTS_KEYS: Schema = {
    **METRICS_KEYS,
    "transform": pl.String,
    "site": pl.String,
    **dict.fromkeys(TOTALS, pl.Int64),
}
STEPS: Schema = dict.fromkeys(EXTREME_NAMES[1:], pl.Int64)  # that rows of earlier versions lack
CONFLICTS_KEYS: Schema = {
    **METRICS_KEYS,
    "aggregator": pl.String,
    "group": pl.String,
    "tasks": pl.List(pl.String),
    "cosines": pl.List(FLOATS),
    NOT_FINITE: pl.String,
    **dict.fromkeys(CONFLICT_TASK_NAMES, FLOATS),
    **dict.fromkeys(CONFLICT_NAMES, pl.Float64),
}


def read_metrics(paths: Iterable[str | Path]) -> pl.DataFrame:
    """Return the metrics of run directories."""
    return _read(paths, METRICS, METRICS_KEYS)


def read_effects(paths: Iterable[str | Path]) -> pl.DataFrame:
    """Return the effects of run directories; a number that no row has is a column of nulls."""
    rows = _read(paths, EFFECTS, EFFECTS_KEYS)
    names = (*EFFECT_NAMES, *EXTREME_NAMES)
    missing = [name for name in names if name not in rows.columns]
    kinds = {**dict.fromkeys(names, pl.Float64), **STEPS}
    return rows.with_columns(pl.lit(None, kinds[name]).alias(name) for name in missing)


def read_conflicts(paths: Iterable[str | Path]) -> pl.DataFrame:
    """Return the conflicts of run directories.

    The results of other aggregators on the same gradients are columns such as `others.mgda.cosine`
    and `others.mgda.weights`.
    """
    rows = _read(paths, CONFLICTS, CONFLICTS_KEYS)
    kind, others = rows.schema.get(OTHERS), pl.col(OTHERS).struct
    names = [field.name for field in kind.fields] if isinstance(kind, pl.Struct) else []
    columns = [
        others.field(name).struct.field(part).cast(dtype).alias(f"others.{name}.{part}")
        for name in names
        for part, dtype in (("cosine", pl.Float64), ("weights", FLOATS))
    ]
    return rows.with_columns(columns).drop(OTHERS, strict=False)


def effect_table(paths: Iterable[str | Path], examined: bool = False) -> list[dict[str, object]]:
    """Return the mean effects of each transform at each site, over each run and then over the runs.

    Intervals are weighted by their calls of the site; all runs have equal weight. An interval in
    which a number is null (not sampled, or not finite) does not count for it; one with a null norm,
    before or after, for neither. `runs`, `seen`, `calls`, `sampled` and `nonfinite` are totals. The
    largest norm and the first step that is not finite are those over all intervals of all runs.
    Rows are in order of first appearance. `examined` reads the effects of the examination after the
    training instead.
    """
    rows = _read(paths, EXAMINED_EFFECTS if examined else EFFECTS, EFFECTS_KEYS)
    no_means = (*EFFECTS_KEYS, NOT_FINITE, *EXTREME_NAMES)
    numbers = [name for name in rows.columns if name not in no_means]
    calls, keys = pl.col("calls"), ["transform", "site"]
    if norms := [name for name in numbers if name in NORMS]:
        finite = pl.all_horizontal(pl.col(norms).is_not_null())
        rows = rows.with_columns(pl.when(finite).then(pl.col(norms)).name.keep())
    means = [
        (pl.col(name) * calls).sum() / calls.filter(pl.col(name).is_not_null()).sum()
        for name in numbers
    ]
    table = (
        rows.group_by(*keys, "run", maintain_order=True)
        .agg(*means, pl.col(TOTALS).sum())
        .group_by(keys, maintain_order=True)
        .agg(pl.len().alias("runs"), pl.col(TOTALS).sum(), pl.col(numbers).fill_nan(None).mean())
    )
    if set(EXTREME_NAMES) <= set(rows.columns):
        largest, largest_step, first, rank = map(pl.col, EXTREME_NAMES)
        extremes = rows.group_by(keys).agg(
            largest.max(),
            largest_step.sort_by(largest, descending=True, nulls_last=True).first(),
            first.min(),
            rank.sort_by(first, rank, nulls_last=True).first(),
        )
        table = table.join(extremes, on=keys, maintain_order="left")
    return table.to_dicts()


def _read(paths: Iterable[str | Path], name: str, schema: Schema) -> pl.DataFrame:
    frames = [pl.DataFrame(schema=schema)]
    kinds = {NOT_FINITE: pl.String, **STEPS, **schema}
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"there is no run directory {path}")
        content = read_lines(path / name)
        if not content:
            continue
        try:
            # All rows determine the schema: some numbers are logged in few rows.
            rows = pl.read_ndjson(content, infer_schema_length=None)
            floats = [key for key in rows.columns if key not in (*kinds, OTHERS)]
            rows = rows.cast({key: kinds[key] for key in rows.columns if key in kinds})
            rows = rows.with_columns(pl.col(floats).cast(pl.Float64), run=pl.lit(str(path)))
            for key in rows.columns:
                if key != OTHERS and rows.schema[key] == pl.Struct:
                    raise pl.exceptions.SchemaError(f"{key} is a mapping")
            if name == CONFLICTS and len(rows.drop_nulls(LISTS)) < len(rows):
                raise pl.exceptions.NoDataError(f"{', '.join(LISTS)} are not all there")
        except pl.exceptions.PolarsError as error:
            fault = f"has a line that is not JSON, or a value of another type: {error}"
            raise BrokenFile(path / name, fault) from error
        frames.append(rows)
    return pl.concat(frames, how="diagonal_relaxed")
