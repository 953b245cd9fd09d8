"""Files, classes and configs of plug-ins have the same names."""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gradsurg.aggregators.base import Aggregator
from gradsurg.loggers.base import Logger
from gradsurg.plugins.registry import GROUPS, find, name_of, names
from gradsurg.sites.places import Selector
from gradsurg.tasks.base import Task
from gradsurg.transforms.base import Transform
from gradsurg.transforms.norm_rescale import NormRescale
from gradsurg.triggers.base import Trigger

CONFIGS = Path(__file__).parents[2] / "conf"
BASES = {
    "transforms": Transform,
    "aggregators": Aggregator,
    "tasks": Task,
    "loggers": Logger,
    "sites": Selector,
    "triggers": Trigger,
}

CLASSES = [(kind, stem) for kind in GROUPS for stem in names(kind)]


@cache
def _configs(folder: str) -> dict[str, dict[str, Any]]:
    paths = sorted((CONFIGS / folder).glob("*.yaml"))
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) or {} for path in paths}


def _named(stem: str, config: dict[str, Any]) -> str:
    """Return the class named by a config, under the config's stem in groups that take lists."""
    inside = config.get(stem)
    node = inside if isinstance(inside, dict) else config
    return name_of(node)


def test_every_file_defines_the_class_that_is_spelled_like_it() -> None:
    for kind, stem in CLASSES:
        plugin, where = find(kind, stem), f"gradsurg.{kind}.{stem}"
        assert plugin.__name__.lower() == stem.replace("_", ""), where
        assert vars(import_module(where))[plugin.__name__] is plugin, where
        assert plugin.__module__ in (where, f"gradsurg.{kind}.base"), where
        assert issubclass(plugin, BASES.get(kind, object)), where


def test_every_class_has_a_config_that_names_it() -> None:
    for kind, stem in CLASSES:
        config = _configs(GROUPS[kind])[stem]
        assert _named(stem, config) == stem, f"conf/{GROUPS[kind]}/{stem}.yaml"


def test_every_config_with_a_name_names_a_class() -> None:
    for kind, folder in GROUPS.items():
        for stem, config in _configs(folder).items():
            name = _named(stem, config)
            assert name in names(kind) or config == {}, f"{folder}/{stem}.yaml"


@pytest.mark.parametrize("stem", _configs("optimizer"))
def test_every_config_of_an_optimizer_names_one(stem: str) -> None:
    name = str(_named(stem, _configs("optimizer")[stem]))
    assert name.lower() == stem
    assert issubclass(getattr(torch.optim, name), torch.optim.Optimizer)


def test_every_config_starts_with_the_command_that_uses_it() -> None:
    paths = sorted(CONFIGS.rglob("*.yaml"))
    assert len(paths) > 100
    for path in paths:
        text = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n")
        assert text.startswith(
            ("# python -m gradsurg.", "# python my_app.py +surgery=", '# gs.load("')
        ), path


def test_the_stems_are_those_of_the_files_without_the_contracts() -> None:
    assert {"convnet", "mlp"} <= {*names("models")}
    assert "norm_rescale" in names("transforms")
    assert not {"base", "__init__", "_spans"} & {*names("sites"), *names("transforms")}


def test_a_class_is_found_by_its_files_stem() -> None:
    assert find("transforms", "norm_rescale") is NormRescale


def test_an_unknown_name_is_refused_with_the_choices_and_the_nearest() -> None:
    message = "did you mean 'norm_rescale'? There is no 'norm_rescal' in transforms. All of them: "
    with pytest.raises(LookupError, match=re.escape(message)) as caught:
        find("transforms", "norm_rescal")
    assert str(caught.value).endswith(" python -m gradsurg.run --list transform")


@pytest.mark.parametrize("name", ["base", "__init__", "../surgery", "os", ""])
def test_names_that_are_no_plug_ins_are_not_imported(name: str) -> None:
    with pytest.raises(LookupError, match=re.escape(f"there is no '{name}' in sites")):
        find("sites", name)
