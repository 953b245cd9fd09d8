"""From a command line to resolved configs: every job of a sweep, with all faults at once."""

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gradsurg.config.blame import COMPOSING, NO_KEY, culprit, one_line, sentence, with_keys
from gradsurg.config.build import Experiment, build
from gradsurg.config.dotted import register
from gradsurg.config.faults import ConfigError
from gradsurg.config.options import CONFIG_DIR, wrong_dirs
from gradsurg.config.overrides import each_once, given_twice, is_sweep, key_in, known_options, read

Keep = Callable[[list[str], Experiment], None]

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
        line = CommandLine(single, config_dirs, config_name)
        try:
            hydra = line.composed(single, return_hydra_config=True).hydra
        except COMPOSING:
            return words, multirun  # what is wrong is told when the jobs are composed
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
    """Compose and build every job, train nothing. Raises ConfigError with all that is wrong.

    `keep` gets the words of each job and what was built of them. Without `builds` only that there
    is a config is checked, not what it describes.
    """
    register()
    faults = wrong_dirs(config_dirs)
    if faults:
        raise ConfigError(faults)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        words, faults = read(overrides, multirun)
        unread = {fault.partition("=")[0].partition(":")[0] for fault in faults}
        for job in product(*words):
            line = CommandLine(list(job), config_dirs, config_name)
            faults += line.faults(unread, builds, keep)
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


@dataclass(frozen=True)
class CommandLine:
    """The words of one job, and where its options lie."""

    words: Sequence[str]
    config_dirs: Sequence[str]
    config_name: str

    def faults(self, unread: Collection[str], builds: bool, keep: Keep | None = None) -> list[str]:
        """What is wrong with the words, and with what is left without the wrong ones.

        `unread` are keys that stood in words which could not be read; `keep` gets what was built
        if nothing is wrong.
        """
        rest, faults = known_options(self.words, self.config_dirs)
        unknown = {fault.partition(":")[0] for fault in faults} | {*unread}
        rest, twice = each_once(rest, self.config_dirs)
        faults += twice + given_twice(rest)
        no_keys: dict[str, str] = {}
        while True:
            try:
                config = self.composed(rest)
                break
            except COMPOSING as error:
                word = culprit(error, rest, self.composed)
                if word is None:
                    return [*faults, one_line(error)]
                rest.remove(word)
                key, _, text = sentence(error, word).partition(": ")
                if text == NO_KEY:
                    no_keys[key] = word
                else:
                    faults.append(f"{key}: {text}")
        for key, word in no_keys.items():
            # A key of an option that is not there cannot be there either.
            if key.partition(".")[0] not in unknown - {key}:
                faults.append(with_keys(key, config, self._adds([*rest, f"+{word}"], key)))
        if not builds:
            return faults
        try:
            experiment = build(plain(config))
        except ConfigError as error:
            return faults + error.faults
        if keep is not None and not faults:
            keep(list(self.words), experiment)
        return faults

    def composed(self, words: Sequence[str], return_hydra_config: bool = False) -> DictConfig:
        """The config that these words make."""
        urls = ",".join(f"'{_url(path)}'" for path in self.config_dirs)
        search = [f"hydra.searchpath=[dotted://,{urls}]"] if urls else []
        with warnings.catch_warnings():
            # Hydra warns of what it also raises, and of folders that are asked for above.
            warnings.simplefilter("ignore", UserWarning)
            return compose(self.config_name, [*words, *search], return_hydra_config)

    def _adds(self, words: Sequence[str], key: str) -> bool:
        """Whether a key that is not in the config may be added to it: its last word does."""
        try:
            wrong = self._wrong(words)
        except COMPOSING:
            return False
        refused = (f"{key}: is not a ", f"{key}: must be a mapping")
        above = {key[:index] for index, letter in enumerate(key) if letter == "."}
        return not any(
            fault.startswith(refused) or fault.partition(":")[0] in above for fault in wrong
        )

    def _wrong(self, words: Sequence[str]) -> list[str]:
        try:
            build(plain(self.composed(words)))
        except ConfigError as error:
            return error.faults
        return []


def _url(path: str) -> str:
    return f"file://{Path(path).resolve()}".replace("'", "\\'")
