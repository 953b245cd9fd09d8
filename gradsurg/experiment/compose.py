"""Compose the config of every job of a command line with Hydra, and report all errors at once.

Names are checked against the config files first: modules that import torch, which takes seconds,
are imported in functions.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.overrides import (
    CONFIG_DIR,
    LISTS,
    MAX_RUNS,
    YES,
    first_line,
    is_sweep,
    key_in,
    options_of,
    parse,
    register,
    repeated_keys,
    split_repeated_options,
    split_unknown_options,
    too_many,
    wrong_config_dirs,
)
from gradsurg.plugins.messages import nearest

if TYPE_CHECKING:
    from gradsurg.experiment.build import Experiment

Keep = Callable[[list[str], "Experiment", int], None]

MAX_WRONG_JOBS = 20  # after which the other jobs of a sweep are not checked

STUDY_FILE = "experiment="
# A broken yaml file is a YAMLError, a yaml file that is no mapping an OSError.
# Hydra checks the types of few values.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError, YAMLError, OSError, TypeError)
COMPOSE_ERRORS += (AttributeError, LookupError, AssertionError, RecursionError)
KINDS = {
    "site": "sites",
    "when": "triggers",
    "transform": "transforms",
    "aggregator": "aggregators",
}
KINDS |= {"model": "models", "task": "tasks", "logger": "loggers"}
GONE = {
    "plan": "is now called dry_run",
    "sink": "is now called logger",
    "runner": "is gone: runs train one after another; -m with hydra/launcher=joblib, or several "
    "commands on one study, train some at the same time",
}
"""The lines for keys of earlier versions."""
NO_KEY = "is not a key here."

_composed: dict[tuple[str, ...], DictConfig | None] = {}
"""The config of the first job, which `check_names` has composed and `check` takes."""


def expand_study(
    overrides: Sequence[str],
    multirun: bool,
    config_dirs: Sequence[str],
    config_name: str = "config",
) -> tuple[list[str], bool]:
    """Return the overrides with those of the study file before them, and whether it is a sweep.

    A study file, `experiment=`, may set `hydra.mode: MULTIRUN` and the swept values under
    `hydra.sweeper.params`. Overrides of the command line replace those of the file.
    """
    register()
    words = list(overrides)
    if wrong_config_dirs(config_dirs) or not any(word.startswith(STUDY_FILE) for word in words):
        return words, multirun
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        single = [word for word in words if not is_sweep(word)]
        job = _Job(single, config_dirs, config_name)
        try:
            hydra = job.compose(single, return_hydra_config=True).hydra
        except COMPOSE_ERRORS:
            return words, multirun  # `check` reports the error
    if not multirun and hydra.mode is not RunMode.MULTIRUN:
        return words, False
    typed = {key_in(word) for word in words}
    params = hydra.sweeper.params or {}
    return [f"{key}={value}" for key, value in params.items() if key not in typed] + words, True


def check(
    overrides: Sequence[str],
    multirun: bool,
    config_dirs: Sequence[str],
    config_name: str = "config",
    keep: Keep | None = None,
    builds: bool = True,
) -> None:
    """Compose and build every job without training. Raises ConfigError with all errors.

    `keep` gets the overrides of each job, the experiment built from them, and the number of jobs.
    Without `builds` the config is only composed.
    """
    register()
    faults = wrong_config_dirs(config_dirs)
    if faults:
        raise ConfigError(faults)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        words, faults = parse(overrides, multirun, config_dirs)
        unreadable = {fault.partition("=")[0].partition(":")[0] for fault in faults}
        count = prod(map(len, words))
        if count > MAX_RUNS and not any(YES.fullmatch(word) for word in overrides):
            raise ConfigError([*faults, f"sweep: {too_many(count, 'jobs')}"])
        wrong_jobs = 0
        for combination in product(*words):
            job = _Job(list(combination), config_dirs, config_name)
            errors = job.check(unreadable, builds, count, keep)
            faults += errors
            wrong_jobs += bool(errors)
            if wrong_jobs > MAX_WRONG_JOBS:
                break
    if faults:
        raise ConfigError(faults)


def check_names(
    overrides: Sequence[str], multirun: bool, config_dirs: Sequence[str], config_name: str
) -> None:
    """Check the names of options, and the keys of the first job, by the config files alone.

    Raises ConfigError with all errors of this kind, and leaves those of values to `check`.
    """
    overrides, multirun = expand_study(overrides, multirun, config_dirs, config_name)
    register()
    faults = wrong_config_dirs(config_dirs)
    if faults:
        raise ConfigError(faults)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        words, faults = parse(overrides, multirun, config_dirs)
        if prod(map(len, words)) > MAX_RUNS:
            return  # `check` has the numbers that this error names
        for values in words:
            faults += split_unknown_options(values, config_dirs)[1]
        if not all(words) or len(words) < len(overrides):
            raise ConfigError(faults)  # the config is not composed without these words
        job = _Job([values[0] for values in words], config_dirs, config_name)
        errors, _composed[job.key] = job.composed()
    if faults + errors:
        _composed.clear()
        raise ConfigError(faults + errors)


def compose_config(*words: str) -> dict[str, Any]:  # Any: what a YAML file can hold
    """Return the resolved config of these overrides."""
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return plain(compose("config", list(words)))


def plain(config: DictConfig) -> dict[str, Any]:
    """Return the config as dicts, lists and numbers. Raises ConfigError if a value is missing."""
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError([f"{error.full_key}: is required"]) from None
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError([key + first_line(error)]) from None
    assert isinstance(resolved, dict)
    named = {key: _with_key(resolved[key]) for key in LISTS if key in resolved}
    return {str(key): value for key, value in (resolved | named).items()}


def _with_key(options: object) -> object:
    """Put a user's option that lies at the top of its file under a key, as those of gradsurg."""
    if not isinstance(options, Mapping) or any(map(_is_named, options.values())):
        return options
    name = str(options.get("name") or options.get("_target_", "")).rpartition(".")[2]
    return {name: options} if name and _is_named(options) else options


def _is_named(value: object) -> bool:
    return isinstance(value, Mapping) and any(
        isinstance(value.get(key), str) for key in ("name", "_target_")
    )


@dataclass(frozen=True)
class _Job:
    """The overrides of one job, and the folders with its options."""

    words: Sequence[str]
    config_dirs: Sequence[str]
    config_name: str

    @property
    def key(self) -> tuple[str, ...]:
        return (self.config_name, *self.config_dirs, *self.words)

    def check(
        self, unreadable: Collection[str], builds: bool, num_jobs: int, keep: Keep | None
    ) -> list[str]:
        """Return the errors of the overrides, and of the config composed of the correct overrides.

        `unreadable` are the keys of overrides that could not be parsed.
        """
        faults, config = self.composed(unreadable)
        if not builds or config is None:
            return faults
        from gradsurg.experiment.build import build

        try:
            with chdir(Path.cwd()):  # which a user's code may change
                experiment = build(plain(config))
        except ConfigError as error:
            return faults + error.faults
        if keep is not None and not faults:
            keep(list(self.words), experiment, num_jobs)
        return faults

    def composed(self, unreadable: Collection[str] = ()) -> tuple[list[str], DictConfig | None]:
        """Return the errors of the overrides, and the config composed of the correct ones."""
        if self.key in _composed:
            return [], _composed.pop(self.key)
        words, faults = split_unknown_options(self.words, self.config_dirs)
        unknown = {fault.partition(":")[0] for fault in faults} | {*unreadable}
        words, repeated = split_repeated_options(words, self.config_dirs)
        faults += repeated + repeated_keys(words)
        try:
            return faults, self.compose(words)
        except COMPOSE_ERRORS as error:
            errors, config = self._compose_one_by_one(words, unknown)
            return faults + (errors if config is not None else [first_line(error)]), config

    def compose(self, words: Sequence[str], return_hydra_config: bool = False) -> DictConfig:
        """Compose the config of these overrides."""
        urls = ",".join(f"'{_url(path)}'" for path in self.config_dirs)
        search = [f"hydra.searchpath=[dotted://,{urls}]"] if urls else []
        with warnings.catch_warnings():
            # Hydra warns of errors that it also raises, and of folders searched on purpose.
            warnings.simplefilter("ignore", UserWarning)
            return compose(self.config_name, [*words, *search], return_hydra_config)

    def _compose_one_by_one(
        self, words: Sequence[str], unknown: Collection[str]
    ) -> tuple[list[str], DictConfig | None]:
        """Apply one override after the other, so that each error is that of the last override.

        Return the errors, and the config of the right overrides. Options of groups come first, as
        in Hydra: the keys of an option exist once it is chosen.
        """
        accepted: list[str] = []
        faults = []
        try:
            config = self.compose([])
        except COMPOSE_ERRORS:
            return [], None
        for word in sorted(words, key=lambda word: not options_of(key_in(word), self.config_dirs)):
            try:
                config = self.compose([*accepted, word])
                accepted.append(word)
            except COMPOSE_ERRORS as error:
                key = key_in(word)
                # A key of an option that does not exist is no error of its own.
                if key.partition(".")[0] not in {*unknown} - {key} or not _is_missing_key(error):
                    faults.append(_override_error(word, error, config))
        return faults, config


def _override_error(word: str, error: Exception, config: DictConfig) -> str:
    """Return the line for an override that cannot be applied to a config."""
    key, value = key_in(word), word.partition("=")[2]
    if "Config group override" in str(error):
        plain_run = f"; '{key}=none' is a plain run" if key == "transform" else ""
        return f"{key}: must name an option, found {value}{plain_run}"
    if word == f"~{key}" and key in LISTS:
        return f"{key}: cannot be taken out; '{key}=[]' leaves it empty"
    if _is_missing_key(error):
        return f"{key}: {_missing_key(key, config)}"
    if isinstance(error, YAMLError | OSError):
        return f"{key}: '{value}' cannot be read: {' '.join(str(error).split())}"
    return f"{key}: {first_line(error)}"


def _is_missing_key(error: Exception) -> bool:
    # Hydra has no exception class of its own for this.
    return "Could not override" in str(error) or "Could not delete" in str(error)


def _missing_key(path: str, config: DictConfig) -> str:
    """List the existing keys at the deepest existing level of a missing key."""
    place: object = config
    parts = path.split(".")
    depth = 0
    while depth < len(parts) - 1 and _contains(place, parts[depth]):
        part = parts[depth]
        place = place[int(part)] if isinstance(place, ListConfig) else place[part]
        depth += 1
    if not isinstance(place, DictConfig):
        parent = ".".join(parts[:depth])
        return f"{NO_KEY} {parent} is {place!r}, with no keys below."
    if parts[depth] in place:
        return f"cannot get other keys than it has. Remove it first: ~{path} '+{path}={{...}}'"
    if path in GONE:
        return GONE[path]
    keys = [str(key) for key in place]
    if parts[0] in LISTS and depth == 1 and parts[1] in options_of(parts[0], ()):
        chosen = ",".join([*keys, parts[1]])
        chosen = f"'{parts[0]}=[{chosen}]'" if keys else f"{parts[0]}={chosen}"
        return f"'{parts[1]}' is not chosen; add {chosen}"
    inside: Any = OmegaConf.to_container(place)  # a dict with strings as keys
    above = ".".join([*parts[:depth], ""])
    deeper = [
        f"{above}{key}"
        for key, value in inside.items()
        if isinstance(value, Mapping) and parts[depth] in value
    ]
    if deeper:
        return f"{NO_KEY} Is it {deeper[0]}.{parts[depth]}?"
    choices = nearest(parts[depth], keys)
    is_field = 0 < depth == len(parts) - 1 and "Did you mean" not in choices
    adds = is_field and _takes(parts[0], parts[depth], place)
    hint = f" '+{path}=...' adds it." if adds else ""
    return f"'{parts[depth]}' {NO_KEY} {choices}{hint}"


def _contains(place: object, key: str) -> TypeGuard[DictConfig | ListConfig]:
    """Return whether a mapping has a key, or a list an index."""
    if isinstance(place, ListConfig):
        return key.isdecimal() and int(key) < len(place)
    return isinstance(place, DictConfig) and key in place


def _takes(group: str, field: str, config: DictConfig) -> bool:
    """Return whether the class or function that a mapping names has a parameter of this name."""
    import torch

    from gradsurg.experiment.instantiate import target_of

    try:
        mapping = {str(key): value for key, value in config.items()}
        match group:
            case "optimizer":
                target = getattr(torch.optim, str(mapping.get("name")))
            case "schedule":
                target = getattr(torch.optim.lr_scheduler, str(mapping.get("name")))
            case _:
                target = target_of(KINDS[group], mapping)
        return callable(target) and field in inspect.signature(target).parameters
    except (
        LookupError,
        ValueError,
        TypeError,
        ImportError,
        AttributeError,
        MissingMandatoryValue,
    ):
        return False  # building the rest of the config reports this


def _url(path: str) -> str:
    return f"file://{Path(path).resolve()}".replace("'", "\\'")
