"""Hydra's callback `Sweep`: check all jobs of a sweep before training, report at the end.

`conf/config.yaml` names it under `hydra.callbacks`.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from gradsurg.experiment.compose import (
    CONFIG_DIR,
    files_of,
    key_in,
    plain,
    register,
    search_path,
    words_of,
)
from gradsurg.experiment.errors import FAILED, WRONG_INPUT, ConfigError
from gradsurg.experiment.overrides import (
    MAX_RUNS,
    composing,
    prepared,
    split_config_dirs,
    too_many,
)
from gradsurg.experiment.own_code import check_targets
from gradsurg.experiment.settings import check_seeds, check_settings_of
from gradsurg.plugins.messages import nearest, tell

if TYPE_CHECKING:
    from gradsurg.experiment.command import Command

ComposedJob = tuple[list[str], dict[str, Any]]  # Any: any YAML
"""The overrides of a job, and its resolved config."""
Given = TypeVar("Given")
Made = TypeVar("Made")
MAX_WRONG_JOBS = 20  # after more than these the other jobs of a sweep are not checked


class Sweep(Callback):
    """Exits with code 2 if a job is wrong, before any trains; with 1 at the end unless all finish.

    A job of a sweep must not raise or exit: Hydra would then not call `on_multirun_end`.
    """

    def __init__(self) -> None:
        self._command: Command | None = None

    def __getstate__(self) -> dict[str, None]:
        """Return what a launcher sends to its jobs: not the plan, whose tasks may hold locks."""
        return {"_command": None}

    def on_multirun_start(
        self, config: DictConfig, config_name: str = "config", **_: object
    ) -> None:
        """Compose and build each job, try a training step of it, and record all runs as planned."""
        try:
            self._command = _checked(_composed(config, _jobs(config), config_name))
            if self._command.jobs and not self._command.num_unfinished:
                self._end()  # here, as Hydra could not write its files into a read-only study
        except ConfigError as error:
            tell(str(error))
            sys.exit(WRONG_INPUT)
        except Exception as error:  # Hydra only warns of what a callback raises, and would go on
            _end_with(error)
        if self._command.num_untrained and not self._command.jobs:
            sys.exit()

    def on_multirun_end(self, config: DictConfig, **_: object) -> None:
        """Wait for the runs that other commands train, print the outcome of all jobs, report."""
        from gradsurg.experiment.job import train_left

        try:
            train_left()
            self._end()
        except Exception as error:  # as above
            _end_with(error)

    def _end(self) -> None:
        if self._command is not None and self._command.jobs:
            sys.exit(0 if self._command.report() else FAILED)


def _end_with(error: Exception) -> NoReturn:
    traceback.print_exception(error)
    sys.exit(FAILED)


def _checked(jobs: Sequence[ComposedJob]) -> "Command":
    from gradsurg.experiment.command import Command

    command = Command(sweeping=True)
    _for_each(jobs, lambda job: command.add(*job))
    command.plan()
    return command


def _for_each(jobs: Iterable[Given], action: Callable[[Given], Made]) -> list[Made]:
    """Return the results of an action. Raises ConfigError with the errors of all jobs."""
    results: list[Made] = []
    faults: list[str] = []
    wrong = 0
    for job in jobs:
        try:
            results.append(action(job))
        except ConfigError as error:
            faults += error.faults
            wrong += 1
        if wrong > MAX_WRONG_JOBS:
            break
    if faults:
        raise ConfigError(faults)
    return results


def jobs_of_study(words: Sequence[str]) -> list[ComposedJob]:
    """Compose the jobs of a command line without running them; a study file may state a sweep.

    `--config-dir` is the one option of a command that they may have. Raises ConfigError with the errors of all jobs.
    """
    register()
    folders, keys = split_config_dirs(words)
    keys = [search_path(*folders), *keys] if folders else keys
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        with composing():
            config = hydra.compose_config("config", keys, RunMode.MULTIRUN, False, False)
        sweeps = config.hydra.mode is RunMode.MULTIRUN
        return _composed(config, _jobs(config) if sweeps else [words_of(config.hydra)])


def check_config(words: Sequence[str], config: Mapping[str, Any]) -> None:  # Any: any YAML
    """Check the short keys and the dotted paths of a config, before torch is imported.

    Raises ConfigError with all errors; `words` are the overrides.
    """
    faults = [*check_seeds(words), *check_settings_of(config), *check_targets(config)]
    if faults:
        raise ConfigError(faults)


def _composed(
    config: DictConfig, jobs: Iterable[list[str]], config_name: str = "config"
) -> list[ComposedJob]:
    """Compose the config of each job of a command, whose own config is given.

    Raises ConfigError with the errors of all jobs.
    """
    hydras = [str(word) for word in config.hydra.overrides.hydra]
    search = [word for word in hydras if key_in(word) == "hydra.searchpath"]

    def composed(words: list[str]) -> ComposedJob:
        with composing():
            job = plain(compose(config_name, [*search, *prepared(words)]))
            check_config(words, job)
            return words, job

    return _for_each(jobs, composed)


def _jobs(config: DictConfig) -> Iterator[list[str]]:
    """Yield the overrides of each job: the sweep of a study file, then the words that are typed.

    A typed key replaces that of the study file.
    """
    typed = words_of(config.hydra)
    keys = {key_in(word) for word in typed}
    params = config.hydra.sweeper.get("params") or {}
    with open_dict(config.hydra.sweeper):
        for key in keys & {str(key) for key in params}:
            del params[key]  # Hydra would sweep over both
    words = [f"{key}={value}" for key, value in params.items()] + typed
    agreed = any(word.lstrip("+").lower() == "yes=true" for word in words)
    most = sys.maxsize - 1 if agreed else MAX_RUNS
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    values = [_values(override, most) for override in parser.parse_overrides(words)]
    if (count := prod(map(len, values))) > most:
        raise ConfigError([f"sweep: {too_many(count, 'jobs')}"])
    for combination in product(*values):
        yield list(combination)


def _values(override: Override, most: int) -> list[str]:
    """Return an override for each value that one sweeps over, or the override if it does not sweep.

    Raises ConfigError for no value, and for more than `most`.
    """
    word, key = override.input_line or "", override.get_key_element()
    if not override.is_sweep_override():
        return [word]
    match override.value():
        case RangeSweep(start=start, stop=stop) if not isfinite((stop or 0) - (start or 0)):
            raise ConfigError([f"{word}: cannot be swept: it has no end"])
    try:
        values = [f"{key}={v}" for v in islice(override.sweep_string_iterator(), most + 1)]
    except (HydraException, ValueError, TypeError, AttributeError) as error:
        raise ConfigError([f"{word}: cannot be swept: {error}"]) from error
    if not values:
        choices = [*files_of(key_in(word))]
        listed = f". {nearest('', choices)}" if choices else ""
        raise ConfigError([f"{word}: sweeps over no value{listed}"])
    if len(values) > most:
        raise ConfigError([f"{key}: {too_many(f'over {most:,}', 'values')}"])
    return values
