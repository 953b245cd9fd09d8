"""Dotted paths as options of a group: `model=my_module.make_model`."""

from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from gradsurg.config.options import LISTS, key_of

NO_HEADER: dict[str, str | None] = {"package": None}


def register() -> None:
    """Make Hydra know dotted paths; it keeps its sources in a registry of its own."""
    SourcesRegistry.instance().register(DottedSource)


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
