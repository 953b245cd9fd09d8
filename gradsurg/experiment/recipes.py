"""Load a surgery from a recipe: an `experiment=` file that chooses no model and no task, or a
preset of the group `surgery`, which the configs of other apps choose too.

Hydra is imported in functions: `gradsurg.load` is a name of the library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from gradsurg.core.surgery import Surgery
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.from_config import KEYS, from_config
from gradsurg.plugins.messages import one_line, unknown

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

FOLDER = "experiment"

EVERY_STEP = {"_target_": "gradsurg.Steps", "start": 0, "stop": None, "every": 1}
"""The trigger of a command line that chooses none."""


def load(
    recipe: str | Path | Mapping[str, Any] | Sequence[Any] | DictConfig | ListConfig,
    *overrides: str,
    own_code: bool = False,
) -> Surgery:
    """Return the surgery of a recipe: a name such as `guided_backprop`, or the path of a yaml file.

    In place of a name, a config that `from_config` takes is accepted. (Any: what YAML can hold.)

    `overrides` change keys like on the command line, for example `load("sgm",
    "transform.scale.factor=0.2")`. A recipe with several sites maps names to interventions:
    `load("attnlrp", "interventions.gate.transform.factor=1")`. A recipe or an override may name
    classes and functions of your own by `_target_`, a dotted path. They are imported and called
    only with `own_code=True`: use it for files that you trust. Raises LookupError for an unknown
    name, FileNotFoundError for a missing file, and ValueError, with one line for each fault, if the
    file is not a recipe, has a wrong value, or names code without `own_code`.
    """
    from gradsurg.experiment.compose import PRESETS, files_of

    if not isinstance(recipe, str | Path):
        if overrides:
            raise ConfigError([f"{overrides[0]}: a config takes no overrides, change it instead"])
        return from_config(recipe, own_code=own_code)
    preset = files_of(PRESETS).get(str(recipe))
    path = preset or files_of(FOLDER).get(str(recipe), Path(recipe))
    if str(recipe).isidentifier() and not path.is_file():
        fault, name = f"there is no recipe '{recipe}'", str(recipe)
        raise LookupError(unknown(fault, name, recipes(), listed_by="--list experiment"))
    try:
        if preset is None and (fault := _fault(path)):
            raise ConfigError([fault])
        config = _composed(path, overrides, is_preset=preset is not None)
        surgery = {key: config[key] for key in KEYS if key in config}
        if surgery.get("when") == EVERY_STEP:
            del surgery["when"]
        return from_config(surgery, own_code=own_code)
    except ConfigError as error:
        faults = [fault.removeprefix(f"{PRESETS}.") for fault in error.faults]
        raise ConfigError([f"{recipe}: {fault}" for fault in faults]) from None


def recipes() -> list[str]:
    """Return the names of all recipes."""
    from gradsurg.experiment.compose import PRESETS, files_of

    whole = [name for name, path in files_of(FOLDER).items() if not _fault(path)]
    return sorted([*whole, *files_of(PRESETS)])


def _composed(path: Path, overrides: tuple[str, ...], is_preset: bool) -> dict[str, Any]:
    """Return the config of a file with overrides; composing imports nothing that it names."""
    from gradsurg.experiment.compose import GROUPS, PRESETS, compose_config, key_in, search_path
    from gradsurg.experiment.hydra_errors import composing
    from gradsurg.experiment.overrides import prepared

    if wrong := [word for word in overrides if key_in(word).partition(".")[0] not in KEYS]:
        rule = f"is no key of a recipe, which are {', '.join(KEYS)}"
        raise ConfigError([f"{word}: {rule}" for word in wrong])
    words = prepared(overrides)
    if is_preset:
        inside = []
        for word in words:
            name, marks = word.lstrip("+~"), word[: len(word) - len(word.lstrip("+~"))]
            group = f"{key_in(word)}@" if key_in(word) in GROUPS else ""
            inside.append(f"{marks}{group}{PRESETS}.{name}")
        with composing():
            config = compose_config(f"+{PRESETS}={path.stem}", f"+{PRESETS}.seed=null", *inside)
            return config[PRESETS]
    with TemporaryDirectory() as folder, composing():
        Path(folder, FOLDER).mkdir()
        copy(path, Path(folder, FOLDER, "recipe.yaml"))
        return compose_config(f"{FOLDER}=recipe", *words, search_path(Path(folder)))


def _fault(path: Path) -> str:
    """Return why a file is no recipe; empty if it is one."""
    text = path.read_text(encoding="utf-8")
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return f"is no yaml: {one_line(error)}"
    if not isinstance(content, dict) or not text.startswith("# @package _global_"):
        return "must be a mapping that begins with '# @package _global_'"
    chosen = [entry for entry in content.pop("defaults", []) if isinstance(entry, dict)]
    groups = [key.removeprefix("override ").removeprefix("/") for entry in chosen for key in entry]
    keys = [*groups, *content]
    if wrong := [str(key) for key in keys if key not in KEYS]:
        listed = ", ".join(dict.fromkeys(wrong))
        return f"is a study, no recipe: it sets {listed}; a recipe sets {', '.join(KEYS)} alone"
    return "" if {*KEYS[:-1]} & {*keys} else "sets no transform, site or aggregator"
