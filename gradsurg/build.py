"""From a resolved config, plain dicts and numbers, to the objects of a study."""

import copy
import hashlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from gradsurg import __version__, triggers
from gradsurg.catalogue import find
from gradsurg.fields import FieldError, nearest, validated
from gradsurg.ledger import SurgeryWarning
from gradsurg.sinks.base import Guarded, Sink
from gradsurg.sites.base import Selector
from gradsurg.study import Run, Schedule
from gradsurg.surgery import Intervention, Surgery
from gradsurg.tasks.base import Data, Task
from gradsurg.transforms.base import Transform
from gradsurg.transforms.chain import Chain
from gradsurg.transforms.identity import Identity
from gradsurg.transforms.norm_matched import NormMatched
from gradsurg.triggers import Trigger

Config = Mapping[str, Any]  # Any: what a YAML file can hold

Positive = Annotated[int, Field(ge=1)]
NON_IDENTITY = ("transform", "site", "when")


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
    study: Annotated[str, Field(pattern=r"^[\w.,+=@-]+$")]
    out: Annotated[str, Field(min_length=1)]
    control: Literal["none", "plain", "norm_matched"]
    device: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0)] | None = None
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
                self.lines.append(f"{'.'.join(part for part in (key, field) if part)}: {text}")
        except (ValueError, TypeError, LookupError, ImportError, RuntimeError) as error:
            text = error.args[0] if error.args else type(error).__name__
            self.lines.append(f"{key}: {' '.join(str(text).split())}")

    def stop(self) -> None:
        if self.lines:
            raise ConfigError(self.lines)


def build(config: Config) -> Experiment:
    """Make every object of an experiment. Raises ConfigError with all that is wrong with it."""
    faults = _Faults()
    settings = transforms = selector = trigger = task = data = None
    with faults.at(""):
        settings = Settings(**{key: config.get(key) for key in Settings.__annotations__})
    with faults.at("transform"):
        transforms = _transforms(config.get("transform"), faults)
    with faults.at("site"):
        selector = _make("sites", config["site"], Selector)
    with faults.at("when"):
        trigger = _trigger(config["when"])
    with faults.at("task"):
        task = _make("tasks", config["task"], Task)
        data = task.load()
    sinks = _sinks(config.get("sink"), faults)
    model = _checked_model(config, data, faults)
    make_optimizer = _optimizer(config, settings)
    if model is not None:
        with faults.at("optimizer"):
            make_optimizer(model)
    intervention = None
    if transforms and selector is not None and trigger is not None:
        key = f"transform.{next(iter(transforms))}" if len(transforms) == 1 else "transform"
        with faults.at(key):
            chain = Chain(*transforms.values())
            intervention = Intervention(chain, selector, trigger, tuple(transforms))
    at = intervention.at if intervention is not None else selector
    if at is not None and model is not None and data is not None:
        with faults.at(
            "site.module" if config["site"].get("module", "*") != "*" else "site.pattern"
        ):
            _probe(at, intervention, model, data)
    if settings is not None and data is not None and settings.batch_size > len(data.train_inputs):
        count = len(data.train_inputs)
        faults.lines.append(f"batch_size: must be <= {count} examples, found {settings.batch_size}")
    device = _device(settings, faults)
    faults.stop()
    assert settings and task and selector and device and data
    plan = _Plan(config, settings, task, make_optimizer, device, selector, intervention)
    seeds = [settings.seed] if settings.seed is not None else range(settings.seeds)
    return Experiment(
        settings,
        tuple(plan.pair(seed) for seed in seeds),
        plan.surgery(0),
        lambda: _model(config, data),
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
        identity = self._identity(seed, {key: self.config[key] for key in NON_IDENTITY})
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
            extra = {key: self.config[key] for key in NON_IDENTITY} | {"control": "norm_matched"}
            label = "norm_matched-" + "+".join(self.config["transform"])
            identity = self._identity(seed, extra)
            return self._run("control", label, seed, identity, surgery, shadow=False)
        surgery = Surgery(Intervention(Identity(), self.selector, names=("none",)), seed=seed)
        # The site stands here because the control's gradients are measured there.
        identity = self._identity(seed, {"site": self.config["site"]})
        return self._run("control", "none", seed, identity, surgery, shadow=True)

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
            "sources": dict(sorted(_sources(parts))),
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
            tags=tuple(self.config.get("transform") or ("none",)),
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


def _transforms(config: Config | None, faults: _Faults) -> dict[str, Transform]:
    made = {}
    for key, fields in (config or {}).items():
        with faults.at(f"transform.{key}"):
            made[key] = _make("transforms", fields, Transform)
    return made


def _make(kind: str, config: Config, base: type) -> Any:  # Any: an instance of `base`
    """The object that a mapping with `name:` (ours) or `_target_:` (a dotted path) describes."""
    if not isinstance(config, Mapping):
        raise TypeError(f"must be a mapping with a name, found {config!r}")
    fields = {key: value for key, value in config.items() if key not in ("name", "_target_")}
    fields = {key: _nested(kind, value, base) for key, value in fields.items()}
    made = _class(kind, config)(**fields)
    if callable(made) and base is Transform and not isinstance(made, Transform):
        return made
    if not isinstance(made, base):
        raise TypeError(f"must be a {base.__name__}, found {made!r}")
    return made


def _nested(kind: str, value: object, base: type) -> object:
    match value:
        case {"name": str()} | {"_target_": str()}:
            return _make(kind, value, base)
        case list():
            return [_nested(kind, item, base) for item in value]
        case _:
            return value


def _class(kind: str, config: Config) -> Callable[..., object]:
    if "_target_" in config:
        return _import(config["_target_"])
    if "name" not in config:
        raise ValueError("needs a name (one of gradsurg's) or a _target_ (a dotted path)")
    return find(kind, config["name"])


def _import(path: str) -> Callable[..., object]:
    """The class or function at a dotted path. Raises ImportError, saying which part is not there."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ImportError(f"'{path}' is not a dotted path, as my_package.my_module.MyTransform")
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ImportError(f"{module_name} has no '{name}'. {nearest(name, public)}")
    return getattr(module, name)


def _trigger(config: Config) -> Trigger:
    if "_target_" in config:
        return _make("triggers", config, Trigger)
    kinds = {
        name.lower(): kind
        for name, kind in vars(triggers).items()
        if isinstance(kind, type) and issubclass(kind, Trigger) and kind is not Trigger
    }
    name = str(config.get("name"))
    if name not in kinds:
        raise LookupError(f"there is no trigger '{name}'. {nearest(name, list(kinds))}")
    return kinds[name](**{key: value for key, value in config.items() if key != "name"})


def _sinks(config: Config | None, faults: _Faults) -> tuple[Sink, ...]:
    made = []
    for key, fields in (config or {}).items():
        with faults.at(f"sink.{key}"):
            made.append(Guarded(_make("sinks", fields, Sink)))
    return tuple(made)


def _model(config: Config, data: Data) -> nn.Module:
    fields = dict(config["model"])
    make = _class("models", fields)
    for key in ("name", "_target_"):
        fields.pop(key, None)
    model = make(data.input_shape, data.num_outputs, **fields)
    if not isinstance(model, nn.Module):
        raise TypeError(f"must make a torch.nn.Module, found {model!r}")
    return model


def _checked_model(config: Config, data: Data | None, faults: _Faults) -> nn.Module | None:
    """The model once over, without a trace in the global generator."""
    if data is None:
        return None
    with faults.at("model"), torch.random.fork_rng(devices=[]):
        return _model(config, data)
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
        return getattr(torch.optim, name)(model.parameters(), **fields)

    return make


def _is_optimizer(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer


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
        device = torch.device(settings.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("cuda is not available here; auto takes what there is")
        torch.empty(0, device=device)
        return device
    return None


def _sources(config: object) -> Iterator[tuple[str, str]]:
    """Dotted paths in a config, each with a hash of its module's source: its run's identity too."""
    if isinstance(config, Mapping):
        target = config.get("_target_")
        if isinstance(target, str):
            source = inspect.getsource(inspect.getmodule(_import(target)) or _import(target))
            yield target, hashlib.sha256(source.encode()).hexdigest()[:8]
        for value in config.values():
            yield from _sources(value)
    elif isinstance(config, list):
        for value in config:
            yield from _sources(value)
