"""Metrics, effects and conflicts of many runs as polars data frames."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gradsurg.effects.numbers import CONFLICT_NAMES, CONFLICT_TASK_NAMES, EFFECT_NAMES
from gradsurg.experiment.run_directory import (
    CONFLICTS,
    EFFECTS,
    EXAMINED_EFFECTS,
    METRICS,
    NOT_FINITE,
)
from gradsurg.experiment.run_reader import BrokenFile, read_lines

if TYPE_CHECKING:
    import polars as pl

METRICS_KEYS = {"run": "String", "step": "Int64"}
EFFECTS_KEYS = {
    "run": "String",
    "step": "Int64",
    "transform": "String",
    "site": "String",
    "seen": "Int64",
    "calls": "Int64",
    "sampled": "Int64",
    "nonfinite": "Int64",
}
CONFLICTS_KEYS = {"run": "String", "step": "Int64", "aggregator": "String", "group": "String"}


def read_metrics(paths: Iterable[str | Path]) -> "pl.DataFrame":
    """Return the metrics of run directories, one row per line; `run` is the path as given.

    A half-written last line is left out: a killed run resumes before it. An empty or missing file
    has no rows. A broken line elsewhere, or a value of another type, raises BrokenFile.
    """
    return _read(paths, METRICS, METRICS_KEYS)


def read_effects(paths: Iterable[str | Path]) -> "pl.DataFrame":
    """Return the effects of run directories, read like their metrics."""
    return _read(paths, EFFECTS, EFFECTS_KEYS, _with_effects)


def _with_effects(frame: "pl.DataFrame") -> "pl.DataFrame":
    """Add a column of nulls for each number of effects that no row has."""
    import polars as pl

    missing = [name for name in EFFECT_NAMES if name not in frame.columns]
    return frame.with_columns(pl.lit(None, pl.Float64).alias(name) for name in missing)


def read_conflicts(paths: Iterable[str | Path]) -> "pl.DataFrame":
    """Return the conflicts of run directories, read like their metrics.

    The results of other aggregators on the same gradients are columns such as `others.mgda.cosine`
    and `others.mgda.weights`.
    """
    return _typed_conflicts(_read(paths, CONFLICTS, CONFLICTS_KEYS, _flat_others))


def _flat_others(frame: "pl.DataFrame") -> "pl.DataFrame":
    """Turn the struct `others` into columns: its fields differ between runs."""
    import polars as pl

    kind = frame.schema.get("others")
    names = [field.name for field in kind.fields] if isinstance(kind, pl.Struct) else []
    others = pl.col("others").struct
    columns = [
        others.field(name).struct.field(part).cast(dtype).alias(f"others.{name}.{part}")
        for name in names
        for part, dtype in (("cosine", pl.Float64), ("weights", pl.List(pl.Float64)))
    ]
    return _typed_conflicts(frame.with_columns(columns).drop("others", strict=False))


def _typed_conflicts(frame: "pl.DataFrame") -> "pl.DataFrame":
    """Cast all columns: a run with only empty lists or nulls has no types."""
    import polars as pl

    row, number = pl.List(pl.Float64), pl.Float64
    kinds = {"tasks": pl.List(pl.String), "cosines": pl.List(row), NOT_FINITE: pl.String}
    kinds |= dict.fromkeys(CONFLICT_TASK_NAMES, row) | dict.fromkeys(CONFLICT_NAMES, number)
    columns = [
        pl.col(name).cast(kind) if name in frame.columns else pl.lit(None, kind).alias(name)
        for name, kind in kinds.items()
    ]
    return frame.with_columns(columns)


def effect_table(paths: Iterable[str | Path], examined: bool = False) -> list[dict[str, object]]:
    """Return the mean effects of each transform at each site, over each run and then over the runs.

    Intervals are weighted by their calls of the site; all runs have equal weight. An interval in
    which a number is null (not sampled, or not finite) does not count for it. `runs`, `seen`,
    `calls`, `sampled` and `nonfinite` are totals. Rows are in order of first appearance. `examined`
    reads the effects of the examination after the training instead.
    """
    import polars as pl

    rows = _read(paths, EXAMINED_EFFECTS if examined else EFFECTS, EFFECTS_KEYS)
    numbers = [
        name
        for name, kind in rows.schema.items()
        if name not in EFFECTS_KEYS and (kind.is_numeric() or kind == pl.Null)
    ]
    rows = rows.with_columns(pl.col(numbers).cast(pl.Float64))
    totals = ["seen", "calls", "sampled", "nonfinite"]
    means = [
        (pl.col(name) * pl.col("calls")).sum()
        / pl.col("calls").filter(pl.col(name).is_not_null()).sum()
        for name in numbers
    ]
    keys = ["transform", "site"]
    return (
        rows.group_by(*keys, "run", maintain_order=True)
        .agg(*means, pl.col(totals).sum())
        .group_by(keys, maintain_order=True)
        .agg(pl.len().alias("runs"), pl.col(totals).sum(), pl.col(numbers).fill_nan(None).mean())
        .to_dicts()
    )


def _read(
    paths: Iterable[str | Path],
    name: str,
    keys: Mapping[str, str],
    change: "Callable[[pl.DataFrame], pl.DataFrame]" = lambda frame: frame,
) -> "pl.DataFrame":
    import polars as pl

    schema = {key: getattr(pl, kind) for key, kind in keys.items()}
    contents: dict[str, bytes] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"there is no run directory {path}")
        if content := read_lines(path / name):
            contents[str(path)] = content
    frames = [pl.DataFrame(schema=schema)]
    runs = list(contents)
    for start in range(0, len(runs), RUNS_AT_ONCE):
        some = {run: contents[run] for run in runs[start : start + RUNS_AT_ONCE]}
        try:
            frames.append(_parse(some, name, schema, change))
        except BrokenFile:  # of many files: which is it?
            frames += [_parse({run: some[run]}, name, schema, change) for run in some]
    return pl.concat(frames, how="diagonal_relaxed")


RUNS_AT_ONCE = 500


def _parse(
    contents: Mapping[str, bytes],
    name: str,
    schema: "Mapping[str, type[pl.DataType]]",
    change: "Callable[[pl.DataFrame], pl.DataFrame]",
) -> "pl.DataFrame":
    """Return the rows of several runs; BrokenFile names the first one's file."""
    import numpy as np
    import polars as pl

    file = Path(next(iter(contents))) / name
    counts = [content.count(b"\n") for content in contents.values()]
    try:
        # All rows determine the schema: some numbers are logged in few rows.
        whole = b"".join(contents.values())
        frame = pl.scan_ndjson(whole, infer_schema_length=None).collect()
    except pl.exceptions.PolarsError as error:
        raise BrokenFile(file, f"has a line that is not JSON: {error}") from error
    if len(contents) == 1:
        counts = [len(frame)]
    if len(frame) != sum(counts):
        raise BrokenFile(file, "has an empty line")
    try:
        frame = change(frame)
        frame = frame.with_columns(
            pl.col(key).cast(kind) for key, kind in schema.items() if key in frame.columns
        )
        _check_columns(file, frame, schema)
    except pl.exceptions.PolarsError as error:
        raise BrokenFile(file, f"has a value of another type: {error}") from error
    names = pl.Series("run", list(contents), dtype=pl.String)
    places = np.repeat(np.arange(len(counts)), counts)
    return frame.with_columns(names.gather(places))


def _check_columns(file: Path, frame: "pl.DataFrame", keys: Mapping[str, object]) -> None:
    """Raise BrokenFile for numbers that are text, or a conflict without its lists."""
    import polars as pl

    if file.name == CONFLICTS:
        lists = ["tasks", "cosines", "norms"]
        if any(frame[name].null_count() for name in lists):
            raise BrokenFile(file, f"has a line without {', '.join(lists)}")
        return
    for name, kind in frame.schema.items():
        if name not in (*keys, NOT_FINITE) and not (kind.is_numeric() or kind == pl.Null):
            raise BrokenFile(file, f"has a {name} that is not a number")
