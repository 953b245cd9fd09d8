"""The schema of the short keys, `steps=..` or `seeds=..`, and the check of all top-level keys.

Short keys are the keys at the top of the config that are not groups. They are checked without
torch, whose import takes seconds.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from gradsurg.effects.summary import AUTO
from gradsurg.experiment.compose import GROUPS
from gradsurg.experiment.errors import leaves
from gradsurg.experiment.grid import Grid
from gradsurg.experiment.run_directory import UNTIL, UNTIL_REACHED, UNTIL_STEP
from gradsurg.plugins.fields import Contradiction, FieldError, validated
from gradsurg.plugins.messages import no_key, one_line
from gradsurg.stats import parse_margin

Config = Mapping[str, Any]  # Any: what a YAML file can hold
Precision = Literal["float32", "bfloat16", "float16"]
Backend = Literal["eager", "aot_eager", "inductor"]
ControlKind = Literal["none", "plain", "norm_matched", "update_norm_matched", "placebo"]

REQUIRED = ("site", "when", "model", "task", "optimizer", "schedule")
STUDY = "${gradsurg.name:${task}}-${gradsurg.name:${model}}"
"""Studies are named after task and model."""
VALIDATION = "validation/"
SPLIT_SEEDS = 1000  # between the first seeds of two splits
DEFAULT_VALIDATION = 0.2  # share of the training examples, if `tune` or `until` decides on them
UNTIL_FORM = re.compile(r"\s*((?:(?:test|validation)/)?)(?!train/)([\w./-]+)\s*(>=|<=)\s*(\S+)\s*")
MAX_INT = 2**63  # one more than the largest integer of PyTorch
Positive = Annotated[int, Field(ge=1, lt=MAX_INT)]
Natural = Annotated[int, Field(ge=0, lt=MAX_INT)]
# YAML reads `study=2024` as a number.
Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


def _study_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.,+=@-]{,199}", name, flags=re.ASCII):
        rule = "must be a folder's name of at most 200 letters, digits and any of _.,+=@-"
        raise ValueError(rule)
    return name


def _folder(path: str) -> str:
    """Return the absolute path: a user's code may change the current folder.

    Raises ValueError if there can be no folder at the path.
    """
    if not path:
        raise ValueError("must not be empty")
    if path.startswith("~"):
        raise ValueError("must not begin with ~, which the shell does not expand here; write $HOME")
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
            f"must be a number, such as seeds={len(told)}; for these seeds write -m seed={chosen}"
        )
    return told


def _control(told: object) -> object:
    """Check a kind of control, or a list of them. Raises ValueError with the rule."""
    listed = isinstance(told, list | tuple)
    kinds: Sequence[object] = told if listed else [told]
    known = get_args(ControlKind)[listed:]  # `none` cannot be one of several
    if not kinds or any(kind not in known for kind in kinds):
        *first, last = map(repr, known)
        each = "be a list of" if listed else "be one of"
        raise ValueError(f"must {each} {', '.join(first)} {'and' if listed else 'or'} {last}")
    if len({*kinds}) < len(kinds):
        raise ValueError("must have each kind once")
    return tuple(kinds) if listed else told


def _margin(told: object) -> object:
    """Return a margin as text. Raises ValueError if it is not a margin."""
    if told is None:
        return None
    text = str(told)
    try:
        parse_margin(text)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("margin ").partition(". Found")[0]) from None
    return text


@dataclass(frozen=True)
class Until:
    """A condition that ends a run: a validation or test metric is at least `bound`, or at most
    `bound` if `at_most`.
    """

    metric: str
    bound: float
    at_most: bool = False

    @classmethod
    def of(cls, text: object) -> "Until":
        """Parse `validation/accuracy >= 0.95`; `accuracy` alone means `validation/accuracy`.

        Raises ValueError if the text has another form.
        """
        match = UNTIL_FORM.fullmatch(text if isinstance(text, str) else repr(text))
        rule = 'must be like "validation/accuracy >= 0.95": a metric, >= or <=, a finite number'
        if match is None:
            raise ValueError(rule)
        part, metric, sign, bound = match.groups()
        try:
            number = float(bound)
        except ValueError:
            number = nan
        if not isfinite(number):
            raise ValueError(rule)
        return cls(f"{part or VALIDATION}{metric}", number, sign == "<=")

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.at_most else '>='} {self.bound!r}"

    def check(self, metrics: Collection[str]) -> None:
        """Raise ValueError if a task with these metrics does not have this one."""
        if self.metric not in metrics:
            raise ValueError(f"the task has no {self.metric}, it has {', '.join(metrics)}")

    def holds(self, values: Mapping[str, Any]) -> bool:  # Any: any JSON value
        """Whether a row of metrics reaches the bound; False for NaN or without the metric."""
        value = values.get(self.metric)
        if value is None:
            return False
        return value <= self.bound if self.at_most else value >= self.bound

    def outcome(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, object]:
        """Return the summary entries: the condition, 1 or 0 (reached or not), the first step."""
        steps = [row["step"] for row in rows if self.holds(row)]
        outcome: dict[str, object] = {UNTIL: str(self), UNTIL_REACHED: int(bool(steps))}
        return outcome | {UNTIL_STEP: steps[0]} if steps else outcome


def _parsed(kind: type[Until] | type[Grid]) -> BeforeValidator:
    return BeforeValidator(
        lambda told: told if told is None or isinstance(told, kind) else kind.of(told)
    )


class Shared:
    """The keys of the group `shared`, which are the fields of `SharedParameters`."""

    pattern: str = "*"
    """names of the shared parameters that an aggregator acts on"""
    granularity: Any = "whole"
    """one aggregated gradient for the whole, each layer (member of a ModuleList or Sequential),
    each module, each tensor, or each group of a list: 'shared.granularity=[trunk.hidden.*,"*"]'
    """
    engine: str = "full"
    """full: a backward pass per task; feature: aggregate the gradients of a shared representation
    (needs accumulate=1)
    """
    features: str = ""
    """with feature: the module whose output is the representation, such as relu of model=multi_head
    """
    reduce: str = "mean"
    """under torchrun: aggregate the mean gradients; or local: in each process, and average the
    results
    """
    on_nonfinite: str = "propagate"
    """propagate: a NaN in one task makes the update NaN; skip: leave out the task, or the step, and
    count it
    """


@validated
class Settings:
    """The short keys: those at the top of the config that are not groups.

    The text below a field describes it in `--help` and in `conf/config.yaml`; its default is the
    command's. `scripts/stub.py` writes both.
    """

    steps: Natural = 500
    """optimizer steps of a run"""
    batch_size: Positive = 64
    """examples of a batch"""
    accumulate: Positive = 1
    """batches per step; their mean loss is minimised"""
    lr: Annotated[float, Field(gt=0)] | None = None
    """learning rate; null: the rate stored for this task and optimizer, otherwise the optimizer's
    """
    precision: Precision = "float32"
    """of the forward pass: float32, bfloat16 or float16 (with a GradScaler, on CUDA)"""
    compile: bool = False
    """use torch.compile on the model"""
    compile_backend: Backend = "inductor"
    """inductor, aot_eager or eager"""
    seeds: Annotated[Positive, BeforeValidator(_number_of_seeds)] = 8
    """number of seeds: 3 trains each arm with the seeds 0, 1, 2"""
    seed: Natural | None = None
    """train with this seed only"""
    splits: Positive = 1
    """number of train/test splits, drawn with task.split_seed, task.split_seed + 1, and so on. The
    first trains with the seeds 0, 1, .., the second with 1000, 1001, .. The report compares the
    arms within each split, and over all of them
    """
    control: Annotated[ControlKind | tuple[ControlKind, ...], BeforeValidator(_control)] = "plain"
    """the arm to compare with. plain: no surgery; norm_matched: plain gradients scaled to the norm
    of the treated ones; update_norm_matched: the same for the updates of the optimizer (a scale of
    the gradient has no effect on Adam's); placebo: a random change of the gradient, with
    the same norm and the same cosine to the plain gradient as the treated one; none. A list trains
    an arm of each kind: control=[plain,norm_matched]
    """
    attribute: bool = False
    """with several transforms: also train without each of them, to find how much it adds"""
    device: Annotated[str, Field(min_length=1)] = "auto"
    """auto: CUDA if available, else the CPU; or cpu, cuda:1, mps"""
    threads: Positive | None = 1
    """CPU threads of a run; null: PyTorch's default"""
    check_ranks: Natural = 50
    """under torchrun: steps between two comparisons of the processes' weights; 0: never"""
    study: Annotated[Text, AfterValidator(_study_name)] = STUDY
    """name of the study, a folder in out, by default TASK-MODEL: its runs are compared with one
    another
    """
    out: Annotated[Text, AfterValidator(_folder)] = "runs"
    """folder of the studies; a run writes its files into a folder in OUT/STUDY"""
    force: bool = False
    """repeat finished runs"""
    retry_failed: bool = True
    """repeat failed runs"""
    yes: bool = False
    """true allows more than 10,000 runs"""
    dry_run: bool = False
    """print where the transform would act, and stop"""
    metric: Annotated[Text, Field(min_length=1)] | None = None
    """the metric of the verdict, such as test/loss; null: accuracy if the task has it, otherwise
    the loss. A run keeps the metric of the command that created it
    """
    margin: Annotated[str, BeforeValidator(_margin)] | None = None
    """arms that differ by less are equivalent: 0.01 (in the metric's unit), 0.5pp (percentage
    points) or 2% (of the control's mean)
    """
    report: Literal["auto"] | bool = "auto"
    """auto: write the page and tables, for a sweep also figures; true: always figures; false: none
    """
    effects_every: Natural = 1
    """steps between two measurements of the change of each gradient; 0: never"""
    conflict_every: Positive = 10
    """steps between two measurements of how several tasks conflict, among those of effects_every"""
    log_every: Positive = 50
    """steps between two rows of the loss and the effects"""
    log: Annotated[Text, Field(min_length=1)] = AUTO
    """auto: loggers get the effects of each site, or a summary if a transform has more than 12
    sites; sites: always those of each site; or a pattern of site names. effects.jsonl has all
    """
    eval_every: Natural = 0
    """steps between two evaluations, a multiple of log_every; 0: only at the end"""
    until: Annotated[Until, _parsed(Until)] | None = None
    """end a run at the first evaluation that reaches a value: "until='validation/loss <= 0.1'"
    """
    validation: Annotated[float, Field(ge=0, le=0.9)] | None = None
    """share of the training examples set aside: these are evaluated during training, the
    test data once at the end; null: 0.2 if until or tune decides on them, otherwise 0
    """
    tune: Annotated[Grid, _parsed(Grid)] | None = None
    """train each arm with each of these values, choose its best on validation data, then compare:
    tune=lr (five rates, from a quarter to four times the config's), tune='lr=log(1e-3,1,7)',
    lin(0,1,5) or a list [1,2]; several keys joined by ';' are a grid. If a learning rate is among
    them, the control tries as many rates as the other arms have combinations of values
    """
    tune_seeds: Positive = 3
    """seeds for each value of tune (1000000, 1000001 ..), used only to choose among the values"""
    checkpoint_every: Positive = 100
    """steps between two checkpoints"""
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 1.0
    """seconds that must lie between two checkpoints"""

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
        if self.splits > 1 and self.all_seeds[-1] >= SPLIT_SEEDS:
            rule = f"of several splits must be below {SPLIT_SEEDS}, the first seed of the second"
            raise Contradiction("seeds" if self.seed is None else "seed", f"{rule} split")

    @property
    def all_seeds(self) -> Sequence[int]:
        """The seeds to train with; with several splits, the seeds of the first."""
        return range(self.seeds) if self.seed is None else [self.seed]

    @property
    def controls(self) -> tuple[ControlKind, ...]:
        """The kinds of control arms; empty with `control=none`."""
        kinds = (self.control,) if isinstance(self.control, str) else self.control
        return () if kinds == ("none",) else kinds

    @property
    def out_folder(self) -> Path:
        """The folder `out`."""
        return Path(self.out)

    @property
    def study_folder(self) -> Path:
        """The folder of the study in `out`."""
        return self.out_folder / self.study

    @property
    def decides_on_validation(self) -> bool:
        """Whether `tune` or `until` decides on validation data."""
        if self.tune is not None:
            return True
        return self.until is not None and self.until.metric.startswith(VALIDATION)

    @property
    def set_aside(self) -> float:
        """The share of the training examples that is set aside for validation."""
        if self.validation is None:
            return DEFAULT_VALIDATION if self.decides_on_validation else 0.0
        return self.validation


OTHER_KEYS = {
    "experiment": "its file must begin with the line '# @package _global_'",
    "interventions": "are for gs.load(..) in Python; the command line trains with one site",
}
"""The faults of keys that a config never has."""


def check_settings_of(config: Config) -> list[str]:
    """Return a line `key: rule` for each fault of the keys at the top of a config."""
    known = [*GROUPS, "shared", *Settings.__annotations__]
    faults = [
        f"{key}: {OTHER_KEYS.get(key) or no_key(key, known, listed_by='--help')}"
        for key in config
        if key not in known
    ]
    missing = [key for key in REQUIRED if not isinstance(config.get(key), Mapping)]
    faults += [f"{key}: is required, a mapping with a _target_" for key in missing]
    try:
        settings_of(config)
    except FieldError as error:
        faults += [f"{field}: {text}" for field, text in error.faults]
    return faults + [
        f"{key}: must be finite, found {value}"
        for key, value in leaves(config)
        if "." in key and isinstance(value, float) and not isfinite(value)
    ]


def settings_of(config: Config) -> Settings:
    """Return the short keys of a config. Raises FieldError with all wrong ones."""
    return Settings(**{key: config[key] for key in Settings.__annotations__ if key in config})


def check_seeds(words: Iterable[str]) -> list[str]:
    """Return an error if the overrides of a command give both `seed` and `seeds`."""
    given = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    seed, seeds = given.get("seed", "null"), given.get("seeds", "1")
    if seed == "null" or seeds == "1":
        return []
    return [
        f"seeds: contradicts seed={seed}: seeds=N trains with the seeds 0 to N-1, seed=N with that "
        f"one only; for several of your choice write -m seed=.., found seeds={seeds}"
    ]
