"""A paper's claim, its studies and the bands that they must meet, read from `expected.yaml`."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from gradsurg.plugins.fields import Contradiction, FieldError, validated
from gradsurg.plugins.messages import nearest

FILE = "expected.yaml"
STUDIES = "conf/experiment/*.yaml"  # of the checkout, and of a paper's own folder

Text = Annotated[str, Field(min_length=1)]
Form = Literal["quick", "full"]


class WrongExperiment(ValueError):
    """A missing or faulty experiment; the message is one sentence."""


@validated
class Band:
    """An interval, from `low` to `high` inclusive, for a number of some runs of a study.

    Args:
        says: The band in a sentence.
        metric: An outcome of a run, a sum or difference of outcomes (`test/x1 + test/x2`),
            `diverged`, 1 or 0, or `effect/<transform>/<site>/<number>`, read from `effects.jsonl`.
        of: The number that must lie in the band: `every` run's, their `mean`, their `total`, or the
            number of arms that dominate the front of the arms of `minus` (`dominating`).
        at: Take the metric at the `end`, or from the rows of `metrics.jsonl` its maximum (`most`),
            minimum (`least`) or value at a step.
        study: A study of `quick`; may be empty if there is only one.
        runs: The runs, by `label` or by keys of their config, as `task.start`.
        minus: Runs whose value of the same seed is subtracted.
        count: The required number of runs.

    Without `low` and `high` the measured number is reported and not judged.

    An arm of `runs` that is not in `minus` dominates the front if for one arm of `minus` the 95 %
    paired t interval of every term of `metric` lies below 0, and in the means no other arm of
    `minus` is at least as low as that one in every term and lower in one.
    """

    name: Text
    says: Text
    metric: Text
    low: float | None = None
    high: float | None = None
    of: Literal["every", "mean", "total", "dominating"] = "every"
    at: Literal["end", "most", "least"] | Annotated[int, Field(ge=1)] = "end"
    study: str = ""
    runs: dict[str, Any] = Field(default_factory=dict)  # Any: what YAML can hold
    minus: dict[str, Any] = Field(default_factory=dict)
    count: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        if self.of == "total" and self.count is None and not self.is_unbounded:
            raise Contradiction("count", "is required with of=total")
        if self.of == "dominating" and not self.minus:
            raise Contradiction("minus", "is required with of=dominating")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise Contradiction("low", f"must be <= high, found low={self.low}, high={self.high}")

    def holds(self, value: float) -> bool:
        """Return whether a value lies in the band; NaN does not."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    @property
    def quantity(self) -> str:
        """A description of the number: `test/accuracy, most` or `test/loss at step 300`."""
        if self.at == "end":
            return self.metric
        return f"{self.metric} at step {self.at}" if self.at_step else f"{self.metric}, {self.at}"

    @property
    def at_step(self) -> int | None:
        """The step at which the metric is taken, None for the end and for extremes."""
        return self.at if isinstance(self.at, int) else None

    @property
    def is_unbounded(self) -> bool:
        """Whether the number is reported only."""
        return self.low is None and self.high is None

    @property
    def is_two_sided(self) -> bool:
        """Whether the band has two bounds."""
        return self.low is not None and self.high is not None

    @property
    def bounds(self) -> str:
        """The band as text: `>= 0.99`, `<= 0.01` or `-8.6 to -8.2`; `-` without bounds."""
        if self.is_unbounded:
            return "-"
        if self.low is None:
            return f"<= {self.high:g}"
        return f">= {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"


@validated
class Drawing:
    """A figure of all arms of `studies`, or of every study if that is empty.

    `curves` has `metric` over the steps; `outcomes` has its value for each seed; `maps` has the
    numbers of an examination, whose names begin with `metric`, layer by layer, and the pictures
    saved by it. For `alignment` the metric is a transform, and the figure has the angle between the
    gradient before and after it, at each site. `front` has a panel for each task, with the means
    of the arms in the two terms of `metric`.
    """

    kind: Literal["curves", "outcomes", "maps", "alignment", "front"]
    metric: Text
    studies: tuple[Text, ...] = ()


@validated
class Expected:
    """A claim, the studies that test it in each form, and their bands.

    Args:
        conditions: How the conditions here differ from the published ones.
        figure: A drawing, or the name of a figure in the report of the first study.
        front: The result in the claims' table; `{name}` stands for the value of a band: for runs of
            several seeds their mean and its interval.
        result: The result in the experiment's README, with `{name}` as in `front`.
        opens: Another README of the repository that has the result between its markers.
        full_conditions: As `conditions`, of the full form.
        full_result: As `result`, of the full form.
    """

    claim: Text
    source: Text
    published: Text
    quick: Annotated[tuple[Text, ...], Field(min_length=1)]
    bands: Annotated[tuple[Band, ...], Field(min_length=1)]
    full: tuple[Text, ...] = ()
    figure: Text | Drawing | None = None
    front: str = ""
    result: str = ""
    opens: str = ""
    conditions: str = ""
    full_conditions: str = ""
    full_result: str = ""

    def __post_init__(self) -> None:
        names = [band.name for band in self.bands]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise Contradiction("bands", f"must have a name each, found {twice[0]} twice")
        if self.full and len(self.full) != len(self.quick):
            raise Contradiction("full", "must be as many studies as quick, in the same order")
        for field in ("front", "result", "full_result"):
            text = getattr(self, field)
            if unknown := [name for name in _names_in(text) if name not in names]:
                raise Contradiction(field, f"names no band {{{unknown[0]}}}")
        for band in self.bands:
            if band.study not in (self.quick if len(self.quick) > 1 else ("", *self.quick)):
                rule = f"must name a study of quick in the band {band.name}"
                found = f"found {band.study or 'none'}. {nearest(band.study, list(self.quick))}"
                raise Contradiction("bands", f"{rule}, {found}")
        for study in self.figure.studies if isinstance(self.figure, Drawing) else ():
            if study not in self.quick:
                near = nearest(study, list(self.quick))
                raise Contradiction("figure", f"must name studies of quick, found {study}. {near}")

    def of(self, form: Form) -> "Expected":
        """Return it with the conditions and the result of a form."""
        if form == "quick":
            return self
        conditions = self.full_conditions or self.conditions
        return replace(self, conditions=conditions, result=self.full_result)

    def studies(self, form: Form) -> dict[str, str]:
        """Return the names of the studies in `form`, by those of the quick form."""
        return dict(zip(self.quick, self.full if form == "full" else self.quick, strict=True))


def _names_in(text: str) -> list[str]:
    """Return the names of the bands in a sentence with `{name}`."""
    return re.findall(r"\{(\w+)\}", text)


def papers(root: Path) -> list[str]:
    """Return the experiments of the checkout `root` that have an `expected.yaml`."""
    return sorted(path.parent.name for path in (root / "experiments").glob(f"*/{FILE}"))


def read_expected(root: Path, paper: str) -> Expected:
    """Read a paper's `expected.yaml`; WrongExperiment if it is missing or wrong."""
    if paper not in papers(root):
        raise WrongExperiment(f"there is no experiment '{paper}'. {nearest(paper, papers(root))}")
    path = root / "experiments" / paper / FILE
    where = path.relative_to(root)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise WrongExperiment(f"{where}: must be a mapping, found {content!r}")
        expected = Expected(**content)
    except yaml.YAMLError as error:
        raise WrongExperiment(f"{where}: {' '.join(str(error).split())}") from error
    except FieldError as error:
        faults = (f"{field}: {text}" for field, text in error.faults)
        raise WrongExperiment("\n".join(f"{where}: {fault}" for fault in faults)) from error
    there = sorted(file.stem for own in (root, path.parent) for file in own.glob(STUDIES))
    unknown = [study for study in (*expected.quick, *expected.full) if study not in there]
    if unknown:
        lines = (f"there is no study '{study}'. {nearest(study, there)}" for study in unknown)
        raise WrongExperiment("\n".join(f"{where}: {line}" for line in lines))
    return expected
