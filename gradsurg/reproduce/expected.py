"""What a paper is expected to show: its claim and bands, as `expected.yaml` states them."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from gradsurg.plugins.fields import Contradiction, FieldError, nearest, validated

FILE = "expected.yaml"
STUDIES = "conf/experiment/*.yaml"  # of the checkout, and of a paper's own folder

Text = Annotated[str, Field(min_length=1)]
Form = Literal["quick", "full"]


class WrongExperiment(ValueError):
    """An experiment that is not there, or not whole; one sentence."""


@validated
class Band:
    """Where a number has to lie, from `low` to `high`, both included.

    `runs` says of which runs of `study` (of the only one, if empty): by their `label`, or by keys
    of their config, as `task.start`. `metric` is an outcome of a run, or a sum or a difference of
    some: `test/x1 + test/x2`. It is taken `at` the end, or from the rows of `metrics.jsonl`: at its
    most, its least, or at a step. `effect/<transform>/<site>/<number>` is taken from those of
    `effects.jsonl`. With `minus` the value of the run of the same seed among those runs is taken
    off. Each of the runs has to lie there, or with `of` their mean, or their total; `count` is how
    many runs there have to be. Without `low` and `high` it is told what was measured, and nothing
    is held against it.
    """

    name: Text
    says: Text
    metric: Text
    low: float | None = None
    high: float | None = None
    of: Literal["every", "mean", "total"] = "every"
    at: Literal["end", "most", "least"] | Annotated[int, Field(ge=1)] = "end"
    study: str = ""
    runs: dict[str, Any] = Field(default_factory=dict)  # Any: what YAML can hold
    minus: dict[str, Any] = Field(default_factory=dict)
    count: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        if self.of == "total" and self.count is None and not self.is_told:
            raise Contradiction("count", "is required with of=total")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise Contradiction("low", f"must be <= high, found low={self.low}, high={self.high}")

    def holds(self, value: float) -> bool:
        """Whether a value lies in it; NaN does not."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    @property
    def quantity(self) -> str:
        """What is measured, as `test/accuracy, most` or `test/loss at step 300`."""
        if self.at == "end":
            return self.metric
        return f"{self.metric} at step {self.at}" if self.at_step else f"{self.metric}, {self.at}"

    @property
    def at_step(self) -> int | None:
        """The step that it is taken at, if it is one."""
        return self.at if isinstance(self.at, int) else None

    @property
    def is_told(self) -> bool:
        """Whether it has no bounds to be held against."""
        return self.low is None and self.high is None

    @property
    def bounds(self) -> str:
        """`>= 0.99`, `<= 0.01` or `-8.6 to -8.2`."""
        if self.is_told:
            return "-"
        if self.low is None:
            return f"<= {self.high:g}"
        return f">= {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"


@validated
class Drawing:
    """A figure of all arms: a metric over the steps (`curves`), what its seeds came to
    (`outcomes`), or what an examination found layer by layer, all names of numbers that begin with
    `metric`, and pictures that it kept (`maps`); in `studies` (in all of them, if empty). With
    `alignment` the metric is a transform, and what is drawn the angle by which it turns the
    gradient at each site.
    """

    kind: Literal["curves", "outcomes", "maps", "alignment"]
    metric: Text
    studies: tuple[Text, ...] = ()


@validated
class Expected:
    """A claim, the studies that ask about it in each form, and what they must show.

    `conditions` are those under which alone the bands are stated, where the published ones are
    others; `figure` is a figure of the report of the first study, without its ending, or says what
    to draw. `front` is what the front table says was measured, `{name}` in it a band's value: of
    runs with a seed each their mean and its interval.
    """

    claim: Text
    source: Text
    published: Text
    quick: Annotated[tuple[Text, ...], Field(min_length=1)]
    bands: Annotated[tuple[Band, ...], Field(min_length=1)]
    full: tuple[Text, ...] = ()
    figure: Text | Drawing | None = None
    front: str = ""
    conditions: str = ""

    def __post_init__(self) -> None:
        names = [band.name for band in self.bands]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise Contradiction("bands", f"must have a name each, found {twice[0]} twice")
        if self.full and len(self.full) != len(self.quick):
            raise Contradiction("full", "must be as many studies as quick, in the same order")
        if unknown := [name for name in told_in(self.front) if name not in names]:
            raise Contradiction("front", f"names no band {{{unknown[0]}}}")
        for band in self.bands:
            if band.study not in (self.quick if len(self.quick) > 1 else ("", *self.quick)):
                rule = f"must name a study of quick in the band {band.name}"
                found = f"found {band.study or 'none'}. {nearest(band.study, list(self.quick))}"
                raise Contradiction("bands", f"{rule}, {found}")
        for study in self.figure.studies if isinstance(self.figure, Drawing) else ():
            if study not in self.quick:
                near = nearest(study, list(self.quick))
                raise Contradiction("figure", f"must name studies of quick, found {study}. {near}")

    def studies(self, form: Form) -> dict[str, str]:
        """What each study of the quick form is in `form`."""
        return dict(zip(self.quick, self.full if form == "full" else self.quick, strict=True))


def told_in(front: str) -> list[str]:
    """The names of the bands whose values a sentence tells."""
    return re.findall(r"\{(\w+)\}", front)


def papers(root: Path) -> list[str]:
    """The experiments of the project at `root` that state what they expect."""
    return sorted(path.parent.name for path in (root / "experiments").glob(f"*/{FILE}"))


def read_expected(root: Path, paper: str) -> Expected:
    """What a paper is expected to show; raises WrongExperiment if that is not there, or wrong."""
    if paper not in papers(root):
        raise WrongExperiment(f"there is no experiment '{paper}'. {nearest(paper, papers(root))}")
    path = root / "experiments" / paper / FILE
    where = path.relative_to(root)
    try:
        found = yaml.safe_load(path.read_text())
        if not isinstance(found, dict):
            raise WrongExperiment(f"{where}: must be a mapping, found {found!r}")
        expected = Expected(**found)
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
