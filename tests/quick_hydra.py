"""Hydra without what it repeats for each command of a process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO
from unittest.mock import patch

import yaml
from hydra._internal.hydra import Hydra
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode

_parse, _get_mode = yaml.load, Hydra.get_mode
_parsed: dict[str, Any] = {}  # Any: what a YAML file can hold


@contextmanager
def quick_hydra() -> Iterator[None]:
    """Parse equal YAML files once, and compose configs without need no second time.

    Hydra composes the config of a command once only to look for `hydra.mode`, which a study file
    alone sets, and that of a sweep's job once only to see that it can, as gradsurg does before.
    """
    with (
        patch("yaml.load", _load),
        patch.object(Hydra, "get_mode", _mode),
        patch.object(Sweeper, "validate_batch_is_legal", lambda *_: None),
    ):
        yield


def _load(stream: TextIO, *by_place: type, **by_name: type) -> Any:
    """As `yaml.load(stream, Loader)`."""
    (loader,) = (*by_place, *by_name.values())
    if loader.__name__ != "OmegaConfLoader" or isinstance(stream, str):
        return _parse(stream, loader)
    text = stream.read()
    if text not in _parsed:
        stream.seek(0)  # for errors, which name the file
        _parsed[text] = _parse(stream, loader)
    return _parsed[text]


def _mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> RunMode | None:
    if config_name == "config" and not any(_may_set_mode(word) for word in overrides):
        return None
    return _get_mode(hydra, config_name, overrides)


def _may_set_mode(word: str) -> bool:
    return "experiment" in word or "hydra" in word
