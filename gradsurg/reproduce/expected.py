"""A paper's claim, its studies and the bands that they must meet, read from `expected.yaml`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from gradsurg.plugins.fields import Contradiction, FieldError, validated
from gradsurg.plugins.messages import unknown

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
        of: The number that must lie in the band: over seeds the `mean`, or the `share` of runs with
            a metric of 1; or `every` run's number, for runs that differ by more than their seed.
        at: Take the metric at the `end`, or from the rows of `metrics.jsonl` its maximum (`most`),
            minimum (`least`) or value at a step.
        claim: A claim of `claims`; empty: the first.
        study: A study of `quick`; may be empty if there is only one.
        runs: The runs, by `label` or by keys of their config such as `task.start`.
        minus: Runs whose value of the same seed is subtracted.
        minus_study: The study of these, if it is another; all its runs where `minus` is empty.

    Without `low` and `high` the measured number is reported and not judged.
    """

    name: Text
    says: Text
    metric: Text
    low: float | None = None
    high: float | None = None
    of: Literal["every", "mean", "share"] = "mean"
    at: Literal["end", "most", "least"] | Annotated[int, Field(ge=1)] = "end"
    claim: str = ""
    study: str = ""
    runs: dict[str, Any] = Field(default_factory=dict)  # Any: what YAML can hold
    minus: dict[str, Any] = Field(default_factory=dict)
    minus_study: str = ""

    def __post_init__(self) -> None:
        if self.of == "share" and self.is_difference:
            raise Contradiction("minus", "is for of=mean, which takes differences of 1 and 0 too")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise Contradiction("low", f"must be <= high, found low={self.low}, high={self.high}")

    def holds(self, value: float) -> bool:
        """Return whether a value lies in the band; NaN does not."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    @property
    def is_difference(self) -> bool:
        """Whether the number is a difference between two arms."""
        return bool(self.minus or self.minus_study)

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
    def selects(self) -> dict[str, Any]:
        """The settings that a measured value depends on, apart from runs' configs, as JSON."""
        keys = ("metric", "of", "at", "study", "runs", "minus", "minus_study")
        return {key: value for key in keys if (value := getattr(self, key))}

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

    `curves` has `metric` over the steps; `outcomes` has its value for each seed; for `own` the
    paper's `figure.py` has a function `chart(study, metric)` that returns an Altair chart or None.
    """

    kind: Literal["curves", "outcomes", "own"]
    metric: Text
    studies: tuple[Text, ...] = ()


@validated
class Claim:
    """One sentence that bands judge: the published one, or a variant of it under other conditions.

    Args:
        says: The sentence.
        conditions: How the conditions here differ from the published ones.
        not_tested: The reason why the setting here cannot refute the sentence; its bands are then
            reported and not judged.
        front: The result in the claims' table; `{name}` stands for the value of a band.
    """

    says: Text
    conditions: str = ""
    not_tested: str = ""
    front: str = ""


@validated
class Expected:
    """The claims about a paper, the studies that test them in each form, and their bands.

    Args:
        claims: The claims by name, the paper's own first.
        published: The sentence of the paper, quoted or paraphrased.
        result: The result in the experiment's README, with `{name}` for the value of a band.
    """

    claims: Annotated[dict[str, Claim], Field(min_length=1)]
    source: Text
    published: Text
    quick: Annotated[tuple[Text, ...], Field(min_length=1)]
    bands: Annotated[tuple[Band, ...], Field(min_length=1)]
    full: tuple[Text, ...] = ()
    figure: Drawing | None = None
    result: str = ""

    def __post_init__(self) -> None:
        names = [band.name for band in self.bands]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise Contradiction("bands", f"must have a name each, found {twice[0]} twice")
        if self.full and len(self.full) != len(self.quick):
            raise Contradiction("full", "must be as many studies as quick, in the same order")
        texts = {"result": self.result} | {
            f"claims.{name}.front": claim.front for name, claim in self.claims.items()
        }
        for field, text in texts.items():
            if wrong := [name for name in _names_in(text) if name not in names]:
                raise Contradiction(field, f"names no band {{{wrong[0]}}}")
        for band in self.bands:
            self._check(band, "claim", [*self.claims], may_be_empty=True)
            self._check(band, "study", self.quick, may_be_empty=len(self.quick) == 1)
            self._check(band, "minus_study", self.quick, may_be_empty=True)
        for study in self.figure.studies if self.figure else ():
            if study not in self.quick:
                rule = f"must name studies of quick, found {study}"
                raise Contradiction("figure", unknown(rule, study, self.quick))
        for name, claim in self.claims.items():
            judged = [band for band in self.bands_of(name) if not band.is_unbounded]
            if not judged and not claim.not_tested:
                raise Contradiction("bands", f"none with bounds is about the claim {name}")

    def _check(self, band: Band, field: str, choices: Sequence[str], may_be_empty: bool) -> None:
        found = getattr(band, field)
        if found not in choices and not (may_be_empty and not found):
            rule = f"must name a {field} in the band {band.name}, found {found or 'none'}"
            raise Contradiction("bands", unknown(rule, found, choices))

    def claim_of(self, band: Band) -> str:
        """Return the name of the claim that a band is about."""
        return band.claim or next(iter(self.claims))

    def bands_of(self, claim: str) -> list[Band]:
        """Return the bands about a claim."""
        return [band for band in self.bands if self.claim_of(band) == claim]

    def studies(self, form: Form) -> dict[str, str]:
        """Return the names of the studies in `form`, keyed by their names in the quick form."""
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
        raise WrongExperiment(unknown(f"there is no experiment '{paper}'", paper, papers(root)))
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
    wrong = [study for study in (*expected.quick, *expected.full) if study not in there]
    if wrong:
        lines = (unknown(f"there is no study '{study}'", study, there) for study in wrong)
        raise WrongExperiment("\n".join(f"{where}: {line}" for line in lines))
    return expected
