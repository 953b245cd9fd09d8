"""What many runs have written down, as tables."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gradsurg.training.durable import whole_lines
from gradsurg.training.json_rows import NOT_FINITE
from gradsurg.training.run_directory import CONFLICTS, EFFECTS, EXAMINED_EFFECTS, METRICS

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
OF_TASKS = ("norms", "weights", "decrease")
ALONE = (
    "conflict_rate",
    "norm_spread",
    "condition",
    "cosine_to_mean",
    "norm_to_mean",
    "weight_entropy",
)


def read_metrics(paths: Iterable[str | Path]) -> "pl.DataFrame":
    """The metrics of these run directories, a row a line; `run` is the path as it was given.

    A half-written last line is left out: it belongs to a run that was killed and will resume
    before it. A file that is empty or not there yet has no rows. A broken line elsewhere is a
    ValueError.
    """
    return _read(paths, METRICS, METRICS_KEYS)


def read_effects(paths: Iterable[str | Path]) -> "pl.DataFrame":
    """The effects of these run directories, read like their metrics."""
    return _read(paths, EFFECTS, EFFECTS_KEYS)


def read_conflicts(paths: Iterable[str | Path]) -> "pl.DataFrame":
    """The conflicts of these run directories, read like their metrics.

    What another aggregator would have done has columns of its own, as `others.mgda.cosine` and
    `others.mgda.weights`.
    """

    return _typed_conflicts(_read(paths, CONFLICTS, CONFLICTS_KEYS, _flat_others))


def _flat_others(frame: "pl.DataFrame") -> "pl.DataFrame":
    """Runs differ in whom they have asked, so structs would not go together."""
    import polars as pl

    kind = frame.schema.get("others")
    names = [field.name for field in kind.fields] if isinstance(kind, pl.Struct) else []
    own = pl.col("others").struct
    columns = [
        own.field(name).struct.field(part).cast(dtype).alias(f"others.{name}.{part}")
        for name in names
        for part, dtype in (("cosine", pl.Float64), ("weights", pl.List(pl.Float64)))
    ]
    return _typed_conflicts(frame.with_columns(columns).drop("others", strict=False))


def _typed_conflicts(frame: "pl.DataFrame") -> "pl.DataFrame":
    """With the types of all, where a run has nothing but empty lists or nulls."""
    import polars as pl

    row, number = pl.List(pl.Float64), pl.Float64
    kinds = {"tasks": pl.List(pl.String), "cosines": pl.List(row), NOT_FINITE: pl.String}
    kinds |= dict.fromkeys(OF_TASKS, row) | dict.fromkeys(ALONE, number)
    lacking = [pl.lit(None, kind).alias(name) for name, kind in kinds.items()]
    there = [
        pl.col(name).cast(kind) if name in frame.columns else empty
        for (name, kind), empty in zip(kinds.items(), lacking, strict=True)
    ]
    return frame.with_columns(there)


def effect_table(paths: Iterable[str | Path], examined: bool = False) -> list[dict[str, object]]:
    """For each transform and site, each number's mean: over a run's steps, then over the runs.

    An interval counts as often as the site was called in it, a run counts once. Where a number is
    null (not sampled, or not finite) its interval does not count. `runs`, `seen`, `calls`,
    `sampled` and `nonfinite` are totals. In the order in which they were first met. With `examined`
    of the examination after the training instead.
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
    frames = [pl.DataFrame(schema=schema)]
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"there is no run directory {path}")
        file = path / name
        content = whole_lines(file)
        if content:
            frame = change(_parse(file, content))
            frames.append(frame.with_columns(pl.lit(str(path)).alias("run")))
    return pl.concat(frames, how="diagonal_relaxed")


def _parse(file: Path, content: bytes) -> "pl.DataFrame":
    import polars as pl

    try:
        # every row is looked at, because some numbers are logged more seldom than others
        return pl.scan_ndjson(content, infer_schema_length=None).collect()
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{file} has a line that is not JSON: {error}") from error
