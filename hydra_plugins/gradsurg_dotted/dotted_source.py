"""Hydra's plug-in that makes a dotted path an option of a group: `model=my_module.Net`.

It acts where `dotted://` is on Hydra's search path, as in gradsurg's `config.yaml`. Each Hydra app
of the environment imports this file at its start, so it imports neither gradsurg nor torch.
"""

import re
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

LISTS = ("transform", "logger")
"""The groups that take a list of options, each under a key of its own."""
RATE = "rate"
"""The group whose options are named after a task and an optimizer, as `digits_sgd`: one of these
may be a dotted path, and the option then is no class.
"""


class DottedSource(ConfigSource):
    """Makes a dotted path the `_target_` of an option."""

    @staticmethod
    def scheme() -> str:
        return "dotted"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        return "." in _option(config_path) and not config_path.startswith(f"{RATE}/")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        group, target = config_path.rpartition("/")[0], _option(config_path)
        config: dict[str, Any] = {"_target_": target}  # Any: what a config can hold
        if group.rpartition("/")[2] in LISTS:
            config = {key_of(target): config}
        header: dict[str, str | None] = {"package": None}
        return ConfigResult(
            provider=self.provider,
            path=f"dotted://{target}",
            config=OmegaConf.create(config),
            header=header,
        )


def key_of(option: str) -> str:
    """Return the key of an option in its list: a dotted path has its last name in snake case."""
    if "." not in option:
        return option
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", option.rpartition(".")[2]).lower()


def _option(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".yaml")
