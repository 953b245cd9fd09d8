"""Where Hydra finds the configs: the folders, dotted paths as options, and the composed config.

Help and wrong names need this module, so it imports no torch.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gradsurg.experiment.errors import ConfigError
from gradsurg.experiments import config_dirs as experiment_dirs
from gradsurg.plugins.registry import CONFIG_DIR, name_of, snake

GROUPS = (
    "transform",
    "site",
    "when",
    "aggregator",
    "model",
    "task",
    "optimizer",
    "schedule",
    "logger",
)
LISTS = ("transform", "logger")
"""The groups that take a list of options."""
PRESETS = "surgery"
"""The group of whole surgeries, for the configs of other apps: `+surgery=clip`."""


CONFIG_DIRS = (CONFIG_DIR, *experiment_dirs())


def register() -> None:
    """Register names of plug-ins, dotted paths and the configs of papers with Hydra."""
    OmegaConf.register_new_resolver("gradsurg.name", name_of, replace=True)
    OmegaConf.register_new_resolver("gradsurg.help", _help, replace=True)
    SourcesRegistry.instance().register(DottedSource)
    Plugins.instance().register(ExperimentSearchPath)


class ExperimentSearchPath(SearchPathPlugin):
    """Add `experiments/<paper>/conf` of a checkout to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in experiment_dirs():
            search_path.append(folder.parent.name, f"file://{folder}")


class DottedSource(ConfigSource):
    """Makes a dotted path an option of a group: `model=my_module.make_model` is a `_target_`."""

    @staticmethod
    def scheme() -> str:
        return "dotted"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        return "." in _stem(config_path)

    def list(self, config_path: str, results_filter: object) -> list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        group = config_path.rpartition("/")[0]
        target = _stem(config_path)
        config: dict[str, Any] = {"_target_": target}
        if group in LISTS:
            config = {key_of(target): config}
        header: dict[str, str | None] = {"package": None}
        return ConfigResult(
            provider=self.provider,
            path=f"dotted://{target}",
            config=OmegaConf.create(config),
            header=header,
        )


def compose_config(*words: str) -> dict[str, Any]:  # Any: what a YAML file can hold
    """Return the resolved config of these overrides. Raises what Hydra raises, and ConfigError."""
    register()
    # In an app of Hydra's the app is there already, and is again afterwards.
    app, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            return plain(compose("config", list(words)))
    finally:
        GlobalHydra.instance().hydra = app  # the instance is another one now


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


def words_of(hydra: Any) -> list[str]:
    """Return the overrides of a command or of a job as typed, with their interpolations.

    Any: the group `hydra` of a config.
    """
    words = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    assert isinstance(words, list)
    return [str(word) for word in words]


def files_of(group: str, config_dirs: Iterable[str | Path] = ()) -> dict[str, Path]:
    """Return the files of a group in gradsurg's folders and in these by their options, sorted."""
    folders = [*CONFIG_DIRS, *map(Path, config_dirs)]
    files = {path.stem: path for folder in folders for path in (folder / group).glob("*.yaml")}
    return dict(sorted(files.items()))


def key_of(name: str) -> str:
    """Return the key of an option in its list: a dotted path has its last name in snake case."""
    return snake(name.rpartition(".")[2]) if "." in name else name


def key_in(word: str) -> str:
    """Return the key of an override, without the `+` or `~` before it."""
    return word.partition("=")[0].lstrip("+~")


def first_line(error: Exception) -> str:
    """Return the first line of an error: Hydra's explanations stand below it."""
    return " ".join(str(error).split("\n")[0].split())


def _help() -> str:
    from gradsurg.experiment.help import template  # which needs this module

    loader = GlobalHydra.instance().config_loader()
    options = {group: loader.get_group_options(group) for group in loader.list_groups("")}
    shown = [group for group in options if group not in (PRESETS, "hydra")]
    return template([f"{group}: {', '.join(options[group])}" for group in shown])


def _with_key(options: object) -> object:
    """Put a user's option that lies at the top of its file under a key, as those of gradsurg."""
    if not isinstance(options, Mapping) or any(map(_is_node, options.values())):
        return options
    return {name_of(options).rpartition(".")[2]: options} if _is_node(options) else options


def _is_node(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("_target_"), str)


def _stem(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".yaml")
