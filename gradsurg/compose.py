"""From a command line to resolved configs: every job of a sweep, with all faults at once."""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gradsurg.blame import COMPOSING, NO_KEY, culprit, one_line, sentence, with_keys
from gradsurg.build import build
from gradsurg.dotted import register
from gradsurg.faults import ConfigError
from gradsurg.options import CONFIG_DIR, wrong_dirs
from gradsurg.overrides import each_once, given_twice, known_options, read


def check(
    overrides: Sequence[str],
    multirun: bool,
    config_dirs: Sequence[str],
    config_name: str = "config",
    builds: bool = True,
) -> None:
    """Compose and build every job, train nothing. Raises ConfigError with all that is wrong.

    Without `builds` only that there is a config is checked, not what it describes.
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
            faults += line.faults(unread, builds)
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

    def faults(self, unread: Collection[str], builds: bool) -> list[str]:
        """What is wrong with the words, and with what is left without the wrong ones.

        `unread` are keys that stood in words which could not be read.
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
        return faults + (self._wrong(rest) if builds else [])

    def composed(self, words: Sequence[str]) -> DictConfig:
        """The config that these words make."""
        urls = ",".join(f"'{_url(path)}'" for path in self.config_dirs)
        search = [f"hydra.searchpath=[dotted://,{urls}]"] if urls else []
        with warnings.catch_warnings():
            # Hydra warns of what it also raises, and of folders that are asked for above.
            warnings.simplefilter("ignore", UserWarning)
            return compose(self.config_name, [*words, *search])

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
