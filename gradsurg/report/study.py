"""A study as polars data frames: its runs, their metrics, effects and conflicts."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import polars as pl

from gradsurg.experiment.frames import (
    METRICS_KEYS,
    read_conflicts,
    read_effects,
    read_metrics,
)
from gradsurg.experiment.run_directory import NOT_FINITE
from gradsurg.experiment.run_reader import BrokenFile
from gradsurg.report.arms import Arm, block_names, flat, group
from gradsurg.report.load import STATES, LoadedRun, NotAStudy, read_runs
from gradsurg.report.search import trials_text
from gradsurg.report.tuning import Tuning, read_tunings, tuned_keys
from gradsurg.report.wording import HEADLINE, title, titles
from gradsurg.stats import Margin, parse_margin

AREA = "area/"
"""Prefix of the area under a learning curve: its mean height over the logged steps."""
CATEGORIES = ("run", "arm", "state")
RUN_SCHEMA = {
    **dict.fromkeys(("lr", "cosine"), pl.Float64()),
    "test_examples": pl.Int64(),
    "norm_ratio": pl.List(pl.Float64),
}
"""Columns of `runs` that have this type also if no run has a value."""


@dataclass(frozen=True)
class Study:
    """A study as data frames, one row for a run, for a logged step, or for a site at a step.

    `runs` has the outcome and the config of every run, whatever its state. `metrics` has what was
    logged during training, `effects` the numbers of each transform at each site, `conflicts` those
    of aggregators; these three are read when they are first used. `run`, `arm` and `seed` are
    columns of all four. `faults` has a line for each log that could not be read, `trials` the runs
    of searches, which are in no arm.
    """

    folder: Path
    arms: list[Arm]
    faults: list[str] = field(default_factory=list)
    trials: Sequence[LoadedRun] = ()

    def __repr__(self) -> str:
        names = ", ".join(arm.name for arm in self.arms)
        runs = sum(len(arm.runs) for arm in self.arms)
        return (
            f"Study of {runs} runs in {len(self.arms)} arms ({names}), with the data frames runs, "
            "metrics, effects and conflicts"
        )

    @cached_property
    def runs(self) -> pl.DataFrame:
        """A row for each run, whatever its state: outcome and config, `config.` before its keys.

        `lr` is the rate of its optimizer, `tuned` says that it has values that a tuning chose,
        `cosine` and `norm_ratio` are those of `changes`.
        """
        return _runs_frame(self)

    @cached_property
    def metrics(self) -> pl.DataFrame:
        """A row for each logged step of a run."""
        rows = self._read(read_metrics)
        numbers = [key for key in rows.columns if key not in (*METRICS_KEYS, NOT_FINITE)]
        rows = rows.select("run", "step", pl.col(numbers).cast(pl.Float64, strict=False))
        return self._with_arms(rows)

    @cached_property
    def effects(self) -> pl.DataFrame:
        """A row for each transform, site and logged step of a run."""
        rows = self._read(read_effects)
        empty = [key for key, kind in rows.schema.items() if kind == pl.Null]
        rows = rows.with_columns(
            pl.col("transform", "site").cast(pl.Categorical), pl.col(empty).cast(pl.Float64)
        )
        return self._with_arms(rows)

    @cached_property
    def conflicts(self) -> pl.DataFrame:
        """A row for each group of parameters and measured step of a run with an aggregator."""
        return self._with_arms(self._read(read_conflicts))

    @cached_property
    def changes(self) -> pl.DataFrame:
        """The change of the gradients in treated runs: columns run, cosine, norm_low, norm_high.

        `cosine` is the least over the sites of the mean between the gradient before and after.
        `norm_low` and `norm_high` are the least and the greatest over the sites of the mean norm
        after over the mean norm before. Links of a chain at a site are multiplied. A run with an
        aggregator, or in which nothing was measured, has no row.
        """
        acting = [
            run.name
            for run in self.all_runs
            if run.arm != "control" and not (run.config or {}).get("aggregator")
        ]
        calls, ratio = pl.col("calls"), pl.col("norm_after") / pl.col("norm_before")
        norms = ("norm_before", "norm_after")
        by_link = (
            self.effects.filter(pl.col("run").cast(pl.String).is_in(acting))
            .filter(pl.col("transform").cast(pl.String) != "none")
            .drop_nulls(["cosine", *norms])
            .group_by("run", "site", "transform")
            .agg(
                (pl.col("cosine") * calls).sum() / calls.sum(),
                *((pl.col(k) * calls).sum() for k in norms),
            )
            .filter(pl.col("norm_before") > 0)
        )
        return (
            by_link.group_by("run", "site")
            .agg(pl.col("cosine").min(), ratio=ratio.product())
            .group_by(pl.col("run").cast(pl.String))
            .agg(
                pl.col("cosine").min(),
                norm_low=pl.col("ratio").min(),
                norm_high=pl.col("ratio").max(),
            )
        )

    @cached_property
    def tunings(self) -> tuple[list[Tuning], list[str]]:
        """The choices of tuned arms, and a line for each of their files that cannot be read."""
        return read_tunings(self.folder, self.arms)

    @cached_property
    def tuning_of(self) -> Mapping[str, Tuning]:
        """The tuning that chose the values of a run, by the run's name."""
        return {run: one for one in self.tunings[0] for run in one.runs}

    @cached_property
    def areas(self) -> pl.DataFrame:
        """The area under each learning curve of a run: columns run, metric and value.

        By the trapezoidal rule over the logged steps, divided by their span; a curve needs two.
        """
        keys = [key for key in self.metrics.columns if key in {*HEADLINE, *_outcomes(self.arms)}]
        frames = [pl.DataFrame(schema={"run": pl.String, "metric": pl.String, "value": pl.Float64})]
        for key in keys:
            rows = self.metrics.select(pl.col("run").cast(pl.String), "step", value=key)
            rows = rows.drop_nulls().unique(["run", "step"]).sort("run", "step")
            width = pl.col("step").diff()
            height = (pl.col("value") + pl.col("value").shift()) / 2
            area = (width * height).sum() / (pl.col("step").last() - pl.col("step").first())
            areas = rows.group_by("run").agg(value=area, points=pl.len())
            areas = areas.filter(pl.col("points") > 1)
            frames.append(areas.select("run", pl.lit(AREA + key).alias("metric"), "value"))
        return pl.concat(frames)

    @cached_property
    def metrics_of(self) -> dict[str, str]:
        """The outcomes of finished runs with their titles.

        First the metric of the verdict: the metric that the first run was planned with, otherwise
        accuracy, otherwise a loss. Last the areas under learning curves.
        """
        known = dict.fromkeys(
            [*_outcomes(self.arms), *self.areas["metric"].unique(maintain_order=True)]
        )
        first = [key for key in (*self.chosen_metrics[:1], *HEADLINE) if key in known]
        return {key: title(key) for key in [*first, *known]}

    @cached_property
    def chosen_metrics(self) -> list[str]:
        """The metrics that runs were planned to be judged by, each once."""
        return list(dict.fromkeys(run.metric for run in self.all_runs if run.metric))

    @cached_property
    def margin(self) -> Margin | None:
        """The largest difference without importance that a run was planned with."""
        given = [text for run in self.all_runs if (text := run.measured.get("margin"))]
        return parse_margin(given[0]) if given else None

    @property
    def all_runs(self) -> list[LoadedRun]:
        return [run for arm in self.arms for run in arm.runs]

    @cached_property
    def by_name(self) -> Mapping[str, LoadedRun]:
        """The runs by the names of their directories."""
        return {run.name: run for run in self.all_runs}

    @cached_property
    def block_of(self) -> Mapping[str, str]:
        """The block of each run, by its name; "" for all if the study has one split."""
        return block_names(self.all_runs)

    @cached_property
    def states(self) -> dict[str, int]:
        """The number of runs in each state that occurs."""
        counts = Counter(run.state for run in self.all_runs)
        return {state: counts[state] for state in STATES if state in counts}

    def outcome(self, run: LoadedRun, metric: str) -> float | None:
        """Return a metric of a run, from its summary or the area under its learning curve."""
        if metric.startswith(AREA):
            return self._area_of.get((run.name, metric))
        return run.number(metric)

    @cached_property
    def _area_of(self) -> Mapping[tuple[str, str], float]:
        return {(run, metric): value for run, metric, value in self.areas.iter_rows()}

    def _read(self, read: Callable[[Sequence[str | Path]], pl.DataFrame]) -> pl.DataFrame:
        """Return the rows of all readable runs; a file that cannot be read is a fault."""
        names = {str(run.path): run.name for run in self.all_runs if run.is_readable}
        try:
            rows = read(list(names))
        except BrokenFile:
            frames = [read([])]
            for path, name in names.items():
                try:
                    frames.append(read([path]))
                except BrokenFile as error:
                    self.faults.append(f"{name}: {error}")
            rows = pl.concat(frames, how="diagonal_relaxed")
        return rows.with_columns(pl.col("run").replace_strict(names, return_dtype=pl.String))

    def _with_arms(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add the arm, seed and state of its run to each row."""
        known = [(run.name, arm.name, run.seed, run.state) for arm in self.arms for run in arm.runs]
        schema = {"run": pl.String, "arm": pl.String, "seed": pl.Int64, "state": pl.String}
        names = pl.DataFrame(known, schema=schema, orient="row")
        rows = rows.join(names, on="run", how="left", maintain_order="left")
        others = [name for name in rows.columns if name not in schema]
        return rows.select(*schema, *others).with_columns(pl.col(CATEGORIES).cast(pl.Categorical))


def read_study(folder: str | Path, only: Collection[str] | None = None) -> Study:
    """Read the runs of a study, such as `runs/digits-mlp`.

    `only` are names of run directories: the study is of these runs and their controls. Raises
    NotAStudy, a ValueError, if the folder has no runs but trials. torch is not imported.
    """
    found = read_runs(Path(folder), only)
    runs, trials = ([run for run in found if bool(run.search) is of] for of in (False, True))
    if not runs:
        raise NotAStudy("\n".join([f"{folder} has only trials of a search", *trials_text(trials)]))
    tuned = tuned_keys(read_tunings(Path(folder))[0], [run.name for run in runs])
    return Study(Path(folder), group(runs, tuned), trials=trials)


def _outcomes(arms: Sequence[Arm]) -> list[str]:
    """The numbers among the outcomes of finished runs, those common to all tasks first."""
    keys: dict[str, None] = {}
    for arm in arms:
        for run in arm.whole:
            keys |= {key: None for key in titles(run.summary or {}) if run.number(key) is not None}
    return list(keys)


def _runs_frame(study: Study) -> pl.DataFrame:
    rows: list[dict[str, object]] = []
    kinds: dict[str, set[type]] = {}
    changed = {run: (cosine, list(ends)) for run, cosine, *ends in study.changes.iter_rows()}
    for arm in study.arms:
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
                "idle": run.idle,
                "lr": run.lr,
                "tuned": run.name in study.tuning_of,
                "test_examples": run.test_examples,
            }
            row["cosine"], row["norm_ratio"] = changed.get(run.name, (None, None))
            row |= {key: run.number(key) for key in run.summary or {} if "/" in key}
            row |= {
                f"config.{key}": item if isinstance(item, int | float | str) else _text(item)
                for key, item in flat(run.config or {}).items()
            }
            rows.append(row)
            for key, item in row.items():
                kinds.setdefault(key, set()).add(type(item))
    # a key can be a number in one run and a word in another
    schema = {key: _kind(found - {type(None)}) for key, found in kinds.items()} | RUN_SCHEMA
    columns = {
        key: [_text(row.get(key)) if kind == pl.String else row.get(key) for row in rows]
        for key, kind in schema.items()
    }
    return pl.DataFrame(columns, schema=schema, strict=False)


def _kind(found: set[type]) -> type[pl.DataType]:
    for types, kind in (({bool}, pl.Boolean), ({int}, pl.Int64), ({int, float}, pl.Float64)):
        if found and found <= types:
            return kind
    return pl.String


def _text(value: object) -> str | None:
    return None if value is None else str(value)
