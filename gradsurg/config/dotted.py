"""Options of a group besides `conf/`: dotted paths, and the configs beside a paper's experiment."""

from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from gradsurg.config.options import LISTS, key_of
from gradsurg.experiments import config_dirs

NO_HEADER: dict[str, str | None] = {"package": None}


def register() -> None:
    """Register both sources of options with Hydra."""
    SourcesRegistry.instance().register(DottedSource)
    Plugins.instance().register(ExperimentSearchPath)


class ExperimentSearchPath(SearchPathPlugin):
    """Add `experiments/<paper>/conf` of a checkout to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in config_dirs():
            search_path.append(folder.parent.name, f"file://{folder}")


class DottedSource(ConfigSource):
    """Lets a group's option be a dotted path: `model=my_module.make_model` is `_target_: ...`."""

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
        return ConfigResult(
            provider=self.provider,
            path=f"dotted://{target}",
            config=OmegaConf.create(config),
            header=NO_HEADER,
        )


def _stem(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".yaml")
