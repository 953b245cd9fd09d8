"""The short keys at the top of the config, and their rules."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from gradsurg.effects.summary import AUTO
from gradsurg.experiment import processes
from gradsurg.experiment.grid import Grid
from gradsurg.experiment.run import VALIDATION, Backend, ComputeOptions, Precision, Until
from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.plugins.messages import one_line
from gradsurg.stats import parse_margin

DEFAULT_VALIDATION = 0.2  # of the training examples, where something is decided on them
Positive = Annotated[int, Field(ge=1)]
# YAML reads `study=2024` as a number.
Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


def _study_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.,+=@-]{,199}", name, flags=re.ASCII):
        rule = "must be a folder's name of at most 200 letters, digits and any of _.,+=@-"
        raise ValueError(rule)
    return name


def _folder(path: str) -> str:
    """Return the absolute path, so that code which changes the current folder moves no run.

    Raises ValueError if there can be no folder.
    """
    if not path:
        raise ValueError("must not be empty")
    if path.startswith("~"):
        raise ValueError("must not begin with ~, which a shell leaves alone here; write $HOME")
    folder = Path(path).absolute()
    try:
        parent = next(place for place in (folder, *folder.parents) if place.exists())
    except (OSError, ValueError) as error:  # it is too long, or has a zero byte
        raise ValueError(f"cannot be a folder ({one_line(error)})") from None
    if not parent.is_dir():
        raise ValueError(f"must be a folder, and {parent} is a file")
    return str(folder)


def _number_of_seeds(told: object) -> object:
    if isinstance(told, list | tuple):
        chosen = ",".join(map(str, told))
        raise ValueError(
            f"must be the number of seeds, as seeds={len(told)}; for these seeds write "
            f"-m seed={chosen}"
        )
    return told


def _until(told: object) -> object:
    if told is None or isinstance(told, Until):
        return told
    return Until.of(told if isinstance(told, str) else repr(told))


def _margin(told: object) -> object:
    """Return a margin as text; ValueError if it is none."""
    if told is None:
        return None
    text = str(told)
    try:
        parse_margin(text)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("margin ").partition(". Found")[0]) from None
    return text


def _grid(told: object) -> object:
    return told if told is None or isinstance(told, Grid) else Grid.of(told)


@validated
class Settings:
    """The short keys at the top of the config."""

    steps: Annotated[int, Field(ge=0)]
    batch_size: Positive
    seeds: Annotated[Positive, BeforeValidator(_number_of_seeds)]
    log_every: Positive
    checkpoint_every: Positive
    effects_every: Annotated[int, Field(ge=0)]
    study: Annotated[Text, AfterValidator(_study_name)]
    out: Annotated[Text, AfterValidator(_folder)]
    control: Literal["none", "plain", "norm_matched", "update_norm_matched", "placebo"]
    device: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    splits: Positive = 1
    lr: Annotated[float, Field(gt=0)] | None = None
    accumulate: Positive = 1
    precision: Precision = "float32"
    compile: bool = False
    compile_backend: Backend = "inductor"
    eval_every: Annotated[int, Field(ge=0)] = 0
    until: Annotated[Until, BeforeValidator(_until)] | None = None
    validation: Annotated[float, Field(ge=0, le=0.9)] | None = None
    tune: Annotated[Grid, BeforeValidator(_grid)] | None = None
    tune_seeds: Positive = 3
    threads: Positive | None = None
    check_ranks: Annotated[int, Field(ge=0)] = 0
    force: bool = False
    retry_failed: bool = True
    conflict_every: Positive = 1
    update_effect_every: Annotated[int, Field(ge=0)] = 0
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 0.0
    attribute: bool = False
    dry_run: bool = False
    metric: Annotated[Text, Field(min_length=1)] | None = None
    margin: Annotated[str, BeforeValidator(_margin)] | None = None
    report: Literal["auto"] | bool = "auto"
    yes: bool = False
    log: Annotated[Text, Field(min_length=1)] = AUTO

    def __post_init__(self) -> None:
        if self.eval_every % self.log_every:
            rule = f"must be a multiple of log_every={self.log_every}, whose rows it is written to"
            raise Contradiction("eval_every", f"{rule}, found {self.eval_every}")
        if self.until is not None and not self.eval_every:
            rule = "is decided at evaluations: give eval_every, the steps between two of them"
            raise Contradiction("until", rule)
        if self.validation == 0 and self.decides_on_validation:
            decides = "tune chooses" if self.tune else f"until='{self.until}' is decided"
            raise Contradiction("validation", f"must be above 0: {decides} on it, found 0")
        if self.splits > 1 and self.tune is not None:
            rule = "must be 1 with tune, which would choose on examples that other splits test on"
            raise Contradiction("splits", f"{rule}, found {self.splits}")

    @property
    def all_seeds(self) -> Sequence[int]:
        """The seeds to train with."""
        return range(self.seeds) if self.seed is None else [self.seed]

    @property
    def decides_on_validation(self) -> bool:
        """Whether something is decided on validation data."""
        if self.tune is not None:
            return True
        return self.until is not None and self.until.metric.startswith(VALIDATION)

    @property
    def set_aside(self) -> float:
        """The share of the training examples that is set aside for validation."""
        if self.validation is None:
            return DEFAULT_VALIDATION if self.decides_on_validation else 0.0
        return self.validation

    @property
    def compute(self) -> ComputeOptions:
        """The computation of steps."""
        backend = self.compile_backend if self.compile else None
        return ComputeOptions(self.accumulate, self.precision, backend, processes.launched())
