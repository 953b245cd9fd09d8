"""Configs and experiments composed from overrides, without loggers and with one seed."""

from typing import Any

from gradsurg.experiment import compose
from gradsurg.experiment.build import Experiment, build


def config(*words: str) -> dict[str, Any]:  # Any: what a YAML file can hold
    return compose.compose_config("logger=none", "seeds=1", *words)


def built(*words: str) -> Experiment:
    return build(config(*words))
