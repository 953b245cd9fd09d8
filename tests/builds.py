"""Builders of configs and experiments from command-line words."""

from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from gradsurg.config import compose, overrides
from gradsurg.config.build import Experiment, build


def config(*words: str) -> dict[str, Any]:  # Any: a YAML file holds values of any type
    """Return the composed config of `python -m gradsurg.run <words>`, as plain dicts."""
    overrides.register()
    with initialize_config_dir(str(overrides.CONFIG_DIR), version_base="1.3"):
        return compose.plain(hydra_compose("config", ["logger=none", "seeds=1", *words]))


def built(*words: str) -> Experiment:
    """Return the experiment built from the config of these words."""
    return build(config(*words))
