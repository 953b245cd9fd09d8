"""Hydra's callback `Sweep`: check all jobs of a sweep before training, report at the end.

`conf/config.yaml` names it under `hydra.callbacks`.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from gradsurg.experiment.compose import (
    CONFIG_DIR,
    VERSION_BASE,
    files_of,
    key_in,
    plain,
    register,
    search_path,
    searches,
    split_config_dirs,
    words_of,
)
from gradsurg.experiment.errors import FAILED, MAX_RUNS, WRONG_INPUT, ConfigError, too_many
from gradsurg.experiment.hydra_errors import composing
from gradsurg.experiment.overrides import prepared
from gradsurg.experiment.own_code import check_targets
from gradsurg.experiment.run_directory import ENDED
from gradsurg.experiment.settings import check_seeds, check_settings_of
from gradsurg.plugins.messages import tell, unknown

if TYPE_CHECKING:
    from gradsurg.experiment.command import Command

ComposedJob = tuple[list[str], dict[str, Any]]  # Any: any YAML
"""The overrides of a job, and its resolved config."""
Given = TypeVar("Given")
Made = TypeVar("Made")
MAX_WRONG_JOBS = 20  # after more than these the other jobs of a sweep are not checked


class Sweep(Callback):
    """Exits with code 2 if a job is wrong, before any trains; with 1 at the end unless all finish.

    A job of a sweep must not raise or exit: Hydra would then not call `on_multirun_end`. The jobs
    of a search are not known before (see `experiment/search.py`): its fixed words are checked.
    """

    def __init__(self) -> None:
        self._command: Command | None = None
        self._study: Path | None = None  # of a search

    def __getstate__(self) -> dict[str, None]:
        """Return what a launcher sends to its jobs: not the plan, whose tasks may hold locks."""
        return {"_command": None, "_study": None}

    def on_multirun_start(
        self, config: DictConfig, config_name: str = "config", **_: object
    ) -> None:
        """Compose and build each job, try a training step of it, and record all runs as planned."""
        try:
            if searches(config.hydra):
                self._begin_search(config, config_name)
            else:
                self._begin(_composed(config, _jobs(config), config_name))
        except ConfigError as error:
            tell(str(error))
            sys.exit(WRONG_INPUT)
        except Exception as error:  # Hydra would only warn of an error in a callback, and go on
            _end_with(error)

    def on_multirun_end(self, config: DictConfig, **_: object) -> None:
        """Wait for the runs that other commands train, print the outcome of all jobs, report."""
        from gradsurg.experiment.job import train_left

        if sys.exc_info()[0] is not None:  # Hydra 1.4 calls this after an exception and exit too
            return
        try:
            train_left()
            self._end()
        except Exception as error:  # as above
            _end_with(error)

    def _begin(self, jobs: Sequence[ComposedJob]) -> None:
        self._command = command = _checked(jobs)
        if command.jobs and not command.num_unfinished:
            self._end()  # here, since Hydra could not write its files into a read-only study
        if not command.jobs:
            sys.exit()

    def _begin_search(self, config: DictConfig, config_name: str) -> None:
        """Check the first of the swept options with the fixed words; set the direction."""
        from gradsurg.experiment.command import Command
        from gradsurg.experiment.search import search_metric

        (job,) = _composed(config, [_first_of(words_of(config.hydra))], config_name)
        command = Command()
        experiment = command.add(*job)
        if not command.jobs:
            command.plan()
            sys.exit()
        metric, lower = search_metric(experiment).values()
        sweeper, direction = config.hydra.sweeper, "minimize" if lower else "maximize"
        typed = {key_in(str(word)) for word in config.hydra.overrides.hydra}
        if "direction" not in sweeper:
            tell(f"hydra/sweeper: has no key direction, so it must {direction} {metric} by its own")
        elif "hydra.sweeper.direction" not in typed:
            with read_write(sweeper):
                sweeper.direction = direction
        self._study = experiment.settings.study_folder

    def _end(self) -> None:
        if self._command is not None and self._command.jobs:
            sys.exit(0 if self._command.report() else FAILED)
        if self._study is not None:
            from gradsurg.report.search import trials_in, trials_text

            trials = trials_in(self._study)
            print("\n".join(trials_text(trials)))
            sys.exit(FAILED if any(run.state not in ENDED for run in trials) else 0)


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

    `--config-dir` is the one option of a command that they may have. Raises ConfigError with the
    errors of all jobs.
    """
    register()
    folders, keys = split_config_dirs(words)
    keys = [search_path(*folders), *keys] if folders else keys
    with initialize_config_dir(str(CONFIG_DIR), **VERSION_BASE):
        # RunMode.RUN would refuse lists of values; the mode of the command is in the config.
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


def _first_of(words: Sequence[str]) -> list[str]:
    """Return the overrides with their first values only, without those that sweep an interval."""
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    known = (one for one in parser.parse_overrides([*words]) if not one.is_interval_sweep())
    return [_values(override, MAX_RUNS)[0] for override in known]


def _jobs(config: DictConfig) -> Iterator[list[str]]:
    """Yield the overrides of each job: the sweep of a study file, then the words that are typed.

    A typed key replaces the study file's.
    """
    typed = words_of(config.hydra)
    keys = {key_in(word) for word in typed}
    params: Any = config.hydra.sweeper.get("params") or {}
    for key in keys & {str(key) for key in params}:
        with read_write(params), open_dict(params):
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
        group = key_in(word)
        choices = [*files_of(group)]
        rule = "sweeps over no value"
        if choices:
            rule = unknown(rule, "", choices, listed_by=f"--list {group}")
        raise ConfigError([f"{word}: {rule}"])
    if len(values) > most:
        raise ConfigError([f"{key}: {too_many(f'over {most:,}', 'values')}"])
    return values
