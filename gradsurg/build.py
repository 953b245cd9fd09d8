"""From a resolved config, plain dicts and numbers, to the objects of a study."""

import copy
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg import __version__
from gradsurg.arms import Run, Schedule
from gradsurg.fields import FieldError, nearest, validated
from gradsurg.intervention import Intervention
from gradsurg.ledger import SurgeryWarning
from gradsurg.make import (
    ERRORS,
    Config,
    called,
    fields_of,
    make,
    named,
    sentence,
    sources_of,
    theirs,
)
from gradsurg.sinks.base import Guarded, Sink
from gradsurg.sites.base import Selector
from gradsurg.surgery import Surgery
from gradsurg.tasks.base import Data, Task
from gradsurg.transforms.base import Transform
from gradsurg.transforms.chain import Chain
from gradsurg.transforms.identity import Identity
from gradsurg.transforms.norm_matched import NormMatched
from gradsurg.triggers.base import Trigger

Positive = Annotated[int, Field(ge=1)]
# YAML reads `study=2024` as a number.
Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
GROUPS = ("transform", "site", "when", "model", "task", "optimizer", "sink")
REQUIRED = ("site", "when", "model", "task", "optimizer")
TREATMENT = ("transform", "site", "when")


def _study_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.,+=@-]*", name, flags=re.ASCII):
        raise ValueError("must be a folder's name of letters, digits and any of _.,+=@-")
    return name


def _folder(path: str) -> str:
    """Refuse what a folder cannot be made of."""
    if not path:
        raise ValueError("must not be empty")
    parent = next(place for place in (Path(path), *Path(path).absolute().parents) if place.exists())
    if not parent.is_dir():
        raise ValueError(f"must be a folder, and {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"must be a folder that can be written to, and {parent} cannot")
    return path


class ConfigError(ValueError):
    """A config that cannot be run; `faults` holds a line for each thing that is wrong."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = list(dict.fromkeys(faults))
        super().__init__("\n".join(self.faults))


@validated
class Settings:
    """The short keys at the top of the config."""

    steps: Positive
    batch_size: Positive
    seeds: Positive
    log_every: Positive
    checkpoint_every: Positive
    effects_every: Annotated[int, Field(ge=0)]
    study: Annotated[Text, AfterValidator(_study_name)]
    out: Annotated[Text, AfterValidator(_folder)]
    control: Literal["none", "plain", "norm_matched"]
    device: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    lr: Annotated[float, Field(gt=0)] | None = None
    threads: Positive | None = None
    force: bool = False
    plan: bool = False


@dataclass(frozen=True)
class Pair:
    """The two runs of one seed; either can be missing: `transform=none` is a plain run."""

    seed: int
    treated: Run | None
    control: Run | None


@dataclass(frozen=True)
class Experiment:
    """All that a config asks for, checked, before anything is trained."""

    settings: Settings
    pairs: tuple[Pair, ...]
    surgery: Surgery
    make_model: Callable[[], nn.Module]
    example_input: Tensor  # two examples of the task's data
    sinks: tuple[Sink, ...]


class _Faults:
    """Gathers what is wrong, so that all of it can be said at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """What goes wrong in this block is said of `key`."""
        try:
            yield
        except FieldError as error:
            for field, text in error.faults:
                # As it was typed: YAML's null, Python's None.
                typed = re.sub(r"found None$", "found null", text)
                self.lines.append(f"{'.'.join(part for part in (key, field) if part)}: {typed}")
        except (ValueError, TypeError, LookupError, ImportError, RuntimeError) as error:
            self.lines.append(f"{key}: {sentence(error)}")

    def stop(self) -> None:
        if self.lines:
            raise ConfigError(self.lines)


def build(config: Config) -> Experiment:
    """Make every object of an experiment. Raises ConfigError with all that is wrong with it."""
    faults = _Faults()
    faults.lines += _wrong_keys(config)
    faults.stop()
    settings = transforms = selector = trigger = task = data = None
    with faults.at(""):
        given: dict[str, Any] = {key: config.get(key) for key in Settings.__annotations__}
        settings = Settings(**given)
    with faults.at("transform"):
        transforms = _transforms(config.get("transform"), faults)
    with faults.at("site"):
        selector = make("sites", config["site"], Selector)
    with faults.at("when"):
        trigger = make("triggers", config["when"], Trigger)
    with faults.at("task"):
        task = make("tasks", config["task"], Task)
        with theirs(config["task"], "load"):
            data = task.load()
        if not isinstance(data, Data):
            raise TypeError(f"load() must give a gradsurg.tasks.base.Data, found {data!r}")
    sinks = _sinks(config.get("sink"), faults)
    model = _checked_model(config, task, data, faults)
    make_optimizer = _optimizer(config, settings)
    if model is not None:
        with faults.at("optimizer"):
            make_optimizer(model)
    intervention = None
    if transforms and selector is not None and trigger is not None:
        key = f"transform.{next(iter(transforms))}" if len(transforms) == 1 else "transform"
        with faults.at(key):
            chain = Chain(*transforms.values())
            intervention = Intervention(chain, selector, trigger, _names(transforms))
    at = intervention.at if intervention is not None else selector
    if at is not None and model is not None and data is not None:
        with faults.at(_culprit(config["site"])):
            _probe(at, intervention, model, data)
    if settings is not None and data is not None and settings.batch_size > len(data.train_inputs):
        count = len(data.train_inputs)
        faults.lines.append(f"batch_size: must be <= {count} examples, found {settings.batch_size}")
    device = _device(settings, faults)
    faults.stop()
    # What is missing has been said, and `stop` has raised.
    assert settings
    assert task
    assert selector
    assert device
    assert data
    plan = _Plan(config, settings, task, make_optimizer, device, selector, intervention)
    seeds = [settings.seed] if settings.seed is not None else range(settings.seeds)
    return Experiment(
        settings,
        tuple(plan.pair(seed) for seed in seeds),
        plan.surgery(0),
        lambda: _model(config, data),
        data.train_inputs[:2],
        sinks,
    )


@dataclass(frozen=True)
class _Plan:
    """What the runs of an experiment have in common."""

    config: Config
    settings: Settings
    task: Task
    make_optimizer: Callable[[nn.Module], Optimizer]
    device: torch.device
    selector: Selector
    intervention: Intervention | None

    def pair(self, seed: int) -> Pair:
        if self.intervention is None:
            return Pair(seed, None, self._control(seed))
        control = self.settings.control
        return Pair(seed, self._treated(seed), self._control(seed) if control != "none" else None)

    def surgery(self, seed: int) -> Surgery:
        return Surgery(*([self.intervention] if self.intervention else []), seed=seed)

    def _treated(self, seed: int) -> Run:
        label = "+".join(self.config["transform"])
        identity = self._identity(seed, self._treatment())
        return self._run("treated", label, seed, identity, self.surgery(seed), shadow=False)

    def _control(self, seed: int) -> Run:
        """No surgery, measured at the same sites; or the plain direction with the treated norm."""
        intervention = self.intervention
        if intervention is not None and self.settings.control == "norm_matched":
            matched = NormMatched(intervention.operator)
            surgery = Surgery(
                Intervention(matched, intervention.at, intervention.when, ("norm_matched",)),
                seed=seed,
            )
            extra = self._treatment() | {"control": "norm_matched"}
            label = "norm_matched-" + "+".join(self.config["transform"])
            identity = self._identity(seed, extra)
            return self._run("control", label, seed, identity, surgery, shadow=False)
        surgery = Surgery(Intervention(Identity(), self.selector, names=("none",)), seed=seed)
        # The site stands here because the control's gradients are measured there.
        identity = self._identity(seed, {"site": self.config["site"]})
        return self._run("control", "none", seed, identity, surgery, shadow=True)

    def _treatment(self) -> dict[str, object]:
        """What is done to gradients; a hash knows no order of keys, so that is said apart."""
        parts: dict[str, object] = {key: self.config[key] for key in TREATMENT}
        return parts | {"order": list(self.config["transform"])}

    def _identity(self, seed: int, extra: Config) -> dict[str, object]:
        parts = {key: self.config[key] for key in ("model", "task")} | dict(extra)
        return {
            "gradsurg": __version__,
            "seed": seed,
            "steps": self.settings.steps,
            "batch_size": self.settings.batch_size,
            "device": self.device.type,
            "optimizer": _optimizer_config(self.config, self.settings),
            **copy.deepcopy(parts),
            "sources": dict(sorted(sources_of(parts))),
        }

    def _run(
        self,
        arm: Literal["treated", "control"],
        label: str,
        seed: int,
        identity: dict[str, object],
        surgery: Surgery,
        shadow: bool,
    ) -> Run:
        settings = self.settings
        return Run(
            study=settings.study,
            arm=arm,
            label=label,
            seed=seed,
            identity=identity,
            # A control is of every treated arm that has its site and seed.
            tags=tuple(self.config["transform"]) if arm == "treated" else (label.split("-")[0],),
            task=self.task,
            make_model=lambda data: _model(self.config, data),
            make_optimizer=self.make_optimizer,
            surgery=surgery,
            shadow=shadow,
            schedule=Schedule(
                settings.steps,
                settings.batch_size,
                settings.log_every,
                settings.checkpoint_every,
                settings.effects_every,
            ),
            device=self.device,
        )


def _wrong_keys(config: Config) -> list[str]:
    """What stands at the top of the config and means nothing, and what is not there."""
    known = [*GROUPS, *Settings.__annotations__]
    faults = [
        f"{key}: is not a key here. {nearest(key, known)}" for key in config if key not in known
    ]
    return faults + [
        f"{key}: is required, a mapping with a name"
        for key in REQUIRED
        if not isinstance(config.get(key), Mapping)
    ]


def _names(transforms: Mapping[str, Transform]) -> tuple[str, ...]:
    """A name for each link that the transforms make together: a chain among them has several."""
    return tuple(
        f"{key}.{snake(type(link).__name__)}" if isinstance(transform, Chain) else key
        for key, transform in transforms.items()
        for link in (transform.links if isinstance(transform, Chain) else (transform,))
    )


def snake(name: str) -> str:
    """`ClipNorm` as `clip_norm`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _transforms(config: Config | None, faults: _Faults) -> dict[str, Transform]:
    made = {}
    for key, fields in (config or {}).items():
        with faults.at(f"transform.{key}"):
            made[key] = make("transforms", fields, Transform)
    return made


def _sinks(config: Config | None, faults: _Faults) -> tuple[Sink, ...]:
    made = []
    for key, fields in (config or {}).items():
        with faults.at(f"sink.{key}"):
            made.append(Guarded(make("sinks", fields, Sink)))
    return tuple(made)


def _model(config: Config, data: Data) -> nn.Module:
    fields = config["model"]
    made = named("models", fields)
    options = data.told(made, fields_of(fields))
    with theirs(fields):
        model = called(made, (data.input_shape, data.num_outputs), options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"must make a torch.nn.Module, found {model!r}")
    return model


def _checked_model(
    config: Config, task: Task | None, data: Data | None, faults: _Faults
) -> nn.Module | None:
    """The model once over, two examples through it, without a trace in the global generator."""
    if task is None or data is None:
        return None
    with faults.at("model"), torch.random.fork_rng(devices=[]):
        model = _model(config, data)
        try:
            task.loss(model(data.train_inputs[:2]), data.train_targets[:2])
        except ERRORS as error:
            shape = list(data.train_inputs[:2].shape)
            raise ValueError(
                f"inputs {shape} do not pass through it and the task's loss: "
                f"{type(error).__name__}: {sentence(error)}"
            ) from error
        return model
    return None


def _optimizer_config(config: Config, settings: Settings | None) -> dict[str, object]:
    fields = dict(config["optimizer"])
    if settings is not None and settings.lr is not None:
        fields["lr"] = settings.lr
    return fields


def _optimizer(config: Config, settings: Settings | None) -> Callable[[nn.Module], Optimizer]:
    def make(model: nn.Module) -> Optimizer:
        fields = _optimizer_config(config, settings)
        name = str(fields.pop("name", ""))
        kinds = [key for key, kind in vars(torch.optim).items() if _is_optimizer(kind)]
        if name not in kinds:
            raise LookupError(f"there is no '{name}' in torch.optim. {nearest(name, kinds)}")
        try:
            made = called(getattr(torch.optim, name), (model.parameters(),), fields)
        except FieldError:
            raise
        except ERRORS as error:
            shown = ", ".join(f"{key}={value}" for key, value in fields.items())
            raise ValueError(f"{name}({shown}) is refused: {sentence(error)}") from error
        assert isinstance(made, Optimizer)
        return made

    return make


def _is_optimizer(kind: object) -> bool:
    """Whether the training loop can use it: one that needs a closure it cannot."""
    if not isinstance(kind, type) or not issubclass(kind, Optimizer) or kind is Optimizer:
        return False
    return inspect.signature(kind.step).parameters["closure"].default is None


def _culprit(site: Config) -> str:
    """The key to which it is due if a selector does not find what it should."""
    if site.get("module", "*") != "*":
        return "site.module"
    return "site.pattern" if "pattern" in site else "site"


def _probe(
    selector: Selector, intervention: Intervention | None, model: nn.Module, data: Data
) -> None:
    """Attach to a throw-away model and let two examples through: what matches nothing fails now."""
    at = intervention or Intervention(Identity(), selector)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # No gradient will pass here, which is what the ledger would warn of.
        warnings.simplefilter("ignore", SurgeryWarning)
        with Surgery(at).attach(model, optimizer, effects_every=0):
            model(data.train_inputs[:2])


def _device(settings: Settings | None, faults: _Faults) -> torch.device | None:
    if settings is None:
        return None
    with faults.at("device"):
        if settings.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(settings.device)
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError):
            raise ValueError(
                f"there is no '{settings.device}' here; auto takes what there is"
            ) from None
        return device
    return None
