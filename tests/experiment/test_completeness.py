"""Every plug-in class has its config, and every config its class and its command."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradsurg.experiment import compose
from gradsurg.experiment.build import build
from gradsurg.experiment.execution import execute
from gradsurg.plugins.registry import GROUPS, name_of, names
from hydra_plugins.gradsurg_dotted.dotted_source import RATE
from tests.house import is_plugin, trees

ROOT = Path(__file__).parents[2]

LISTS = ("transform", "logger")
"""Groups that take several configs at once, each under its own key."""

COMMAND = ["python", "-m", "gradsurg.run"]
OF_AN_APP = ["python", "my_app.py"]
"""The command of a preset for the configs of other apps."""


def missing(root: Path) -> list[str]:
    """Return one sentence for each missing class, config or command of the project at `root`."""
    said = []
    plugins = [
        (folder, stem)
        for folder in GROUPS
        for stem, tree in trees(root / "gradsurg" / folder).items()
        if is_plugin(f"{folder}.{stem}", tree)
    ]
    for folder, group in GROUPS.items():
        classes = [stem for kind, stem in plugins if kind == folder]
        configs = {path.stem: path for path in sorted((root / "conf" / group).glob("*.yaml"))}
        if not classes:
            said.append(f"gradsurg/{folder} has no class")
        said += [
            f"gradsurg/{folder}/{stem}.py has no conf/{group}/{stem}.yaml"
            for stem in classes
            if stem not in configs
        ]
        for stem, path in configs.items():
            place = f"conf/{group}/{stem}.yaml"
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
            said += [f"{place} {fault}" for fault in _faults(group, stem, config, names(folder))]
    for path in (*sorted(root.glob("conf/*/*.yaml")), *sorted(root.glob("experiments/*/conf/*/*"))):
        text = path.read_text(encoding="utf-8")
        head = text.removeprefix("# @package _global_\n")
        first, keys = head.partition("\n")[0], {path.stem, *yaml.safe_load(text)}
        if path.parent.name == RATE:  # its command chooses the two that it is named after
            continue
        is_loaded = first == f'# gs.load("{path.stem}")'  # a recipe of several interventions
        if not is_loaded and not _uses(first, path.parent.name, keys):
            place = path.relative_to(root)
            said.append(f"{place} does not begin with a '# {' '.join(COMMAND)}' that uses it")
    return said


def _faults(group: str, stem: str, config: Any, classes: list[str]) -> Iterator[str]:
    if stem == "none" and config == {}:
        return
    if group in LISTS:
        if list(config) != [stem]:
            yield f"has the keys {list(config)}, it must have one, named after the file"
            return
        config = config[stem]
    name = name_of(config)
    if name not in classes:
        yield f"names '{name}', which is none of {', '.join(classes)}"
    if stem in classes and name != stem:
        yield f"names '{name}', though there is a {stem}.py"


def _uses(first: str, group: str, names: set[str]) -> bool:
    """Return whether a first line is a command that selects or overrides one of `names`."""
    if not first.startswith("# "):
        return False
    words, command = shlex.split(first[2:]), OF_AN_APP if group == "surgery" else COMMAND
    if words[: len(command)] != command:
        return False
    for key, _, value in (word.partition("=") for word in words[len(command) :]):
        asked, *inside = key.removeprefix("+").split(".")
        if asked == group and names & set(inside[:1] or re.findall(r"\w+", value)):
            return True
    return False


def test_every_class_has_its_config_and_every_config_its_class_and_its_command() -> None:
    assert missing(ROOT) == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf/transform").glob("*.yaml")), ids=lambda path: path.stem
)
@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
def test_the_command_of_a_transform_trains(path: Path, tmp_path: Path) -> None:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    words = shlex.split(first.removeprefix("# "))[len(COMMAND) :]
    if any(word.endswith(".path=" + path.stem + ".pt") for word in words):
        pytest.skip("the file is computed by the user; tests/per_example/test_subspaces.py has one")
    config = compose.compose_config(*words, "steps=2", "seeds=1", "logger=none")
    (pair,) = build(config).pairs
    run = pair.treated or pair.control
    assert run is not None
    assert execute(run, tmp_path, []).summary["state"] == "finished"
