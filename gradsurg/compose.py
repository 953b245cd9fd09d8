"""From a command line to resolved configs: every job of a sweep, with all faults at once."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gradsurg.blame import COMPOSING, NO_KEY, culprit, one_line, sentence, with_keys
from gradsurg.build import Experiment, build
from gradsurg.dotted import register
from gradsurg.faults import ConfigError
from gradsurg.options import CONFIG_DIR, wrong_dirs
from gradsurg.overrides import each_once, is_sweep, jobs, known_options

STUDY_FILE = "experiment="


def sweep(
    overrides: Sequence[str],
    multirun: bool,
    config_dirs: Sequence[str],
    config_name: str = "config",
) -> tuple[list[str], bool]:
    """The overrides with those of a study file before them, and whether it is a sweep.

    A study file says `hydra.mode: MULTIRUN` and what is swept under `hydra.sweeper.params`; the
    command line has the last word.
    """
    register()
    words = list(overrides)
    if wrong_dirs(config_dirs) or not any(word.startswith(STUDY_FILE) for word in words):
        return words, multirun
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        single = [word for word in words if not is_sweep(word)]
        try:
            config = _composed(config_name, single, config_dirs, return_hydra_config=True)
        except COMPOSING:
            return words, multirun  # what is wrong is told when the jobs are composed
    multirun = multirun or config.hydra.mode is RunMode.MULTIRUN
    params = config.hydra.sweeper.params or {}
    if not multirun:
        return words, False
    return [f"{key}={value}" for key, value in params.items()] + words, True


def check(
    overrides: Sequence[str],
    multirun: bool,
    config_dirs: Sequence[str],
    config_name: str = "config",
    keep: Callable[[list[str], Experiment], None] = lambda words, experiment: None,
) -> None:
    """Compose and build every job, train nothing. Raises ConfigError with all that is wrong.

    `keep` gets the words of each job that is right, and what was built of them.
    """
    register()
    faults = wrong_dirs(config_dirs)
    if faults:
        raise ConfigError(faults)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        for job in jobs(overrides, multirun):
            faults += _faults(job, config_dirs, config_name, keep)
    if faults:
        raise ConfigError(faults)


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as dicts, lists and numbers. Raises ConfigError if a value is missing."""
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError([f"{error.full_key}: is required"]) from None
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError([key + one_line(error)]) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _faults(
    overrides: list[str],
    config_dirs: Sequence[str],
    config_name: str,
    keep: Callable[[list[str], Experiment], None],
) -> list[str]:
    """What is wrong with one job: its overrides, and what is left without the wrong ones."""
    rest, faults = known_options(overrides, config_dirs)
    unknown = {fault.partition(":")[0] for fault in faults}
    rest, twice = each_once(rest, config_dirs)
    faults += twice

    def composed(words: Sequence[str]) -> DictConfig:
        return _composed(config_name, words, config_dirs)

    while True:
        try:
            config = composed(rest)
            break
        except COMPOSING as error:
            word = culprit(error, rest, composed)
            if word is None:
                return [*faults, one_line(error)]
            rest.remove(word)
            faults.append(sentence(error, word))
    # A key of an option that is not there cannot be there either.
    faults = [fault for fault in faults if not _follows(fault, unknown)]
    faults = [with_keys(fault, config) for fault in faults]
    try:
        experiment = build(plain(config))
    except ConfigError as error:
        return faults + error.faults
    if not faults:
        keep(overrides, experiment)
    return faults


def _composed(
    config_name: str,
    words: Sequence[str],
    config_dirs: Sequence[str],
    return_hydra_config: bool = False,
) -> DictConfig:
    urls = ",".join(f"'{_url(path)}'" for path in config_dirs)
    search = [f"hydra.searchpath=[dotted://,{urls}]"] if urls else []
    with warnings.catch_warnings():
        # Hydra warns of what it also raises, and of folders that are asked for above.
        warnings.simplefilter("ignore", UserWarning)
        return compose(config_name, [*words, *search], return_hydra_config)


def _url(path: str) -> str:
    return f"file://{Path(path).resolve()}".replace("'", "\\'")


def _follows(fault: str, unknown: set[str]) -> bool:
    key = fault.partition(":")[0]
    return fault.endswith(NO_KEY) and key.partition(".")[0] in unknown - {key}
