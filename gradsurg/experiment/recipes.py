"""Load a surgery from a recipe: an `experiment=` file that chooses no model and no task.

Hydra is imported in functions: `gradsurg.load` is a name of the library.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from gradsurg.core.surgery import Surgery
from gradsurg.experiment.errors import ConfigError
from gradsurg.plugins.messages import nearest
from gradsurg.plugins.registry import find, names

FOLDER = "experiment"
KEYS = ("transform", "site", "when", "aggregator", "shared", "seed")
"""The keys of a recipe; all others of a config are about training."""

FOLDERS = ("transforms", "sites", "triggers", "aggregators")


def load(recipe: str | Path, *overrides: str, own_code: bool = False) -> Surgery:
    """Return the surgery of a recipe: a name, as `guided_backprop`, or the path of a yaml file.

    `overrides` change keys, as on the command line: `load("sgm", "transform.sgm.factor=0.2")`.
    A recipe or an override may name classes and functions of your own by `_target_`, a dotted path.
    They are imported and called only with `own_code=True`: use it for files that you trust. Raises
    LookupError for an unknown name, FileNotFoundError for a missing file, and ValueError, with one
    line for each fault, if the file is no recipe, has a wrong value, or names code unasked.
    """
    from gradsurg.experiment.build import build_surgery
    from gradsurg.experiment.compose import COMPOSE_ERRORS, compose_config
    from gradsurg.experiment.overrides import CONFIG_DIRS, first_line, key_in, repeated_keys

    path, is_name = Path(recipe), str(recipe).isidentifier()
    if is_name:
        files = [folder / FOLDER / f"{recipe}.yaml" for folder in CONFIG_DIRS]
        path = next((file for file in files if file.is_file()), path)
    if is_name and not path.is_file():
        raise LookupError(f"there is no recipe '{recipe}'. {nearest(str(recipe), recipes())}")
    faults = [
        f"{word}: is no key of a recipe, which are {', '.join(KEYS)}"
        for word in overrides
        if key_in(word).partition(".")[0] not in KEYS
    ]
    faults += [*repeated_keys(overrides), *_faults(path)]
    if not faults and not own_code:  # before composing, which may import what a file names
        faults += _own_code(yaml.safe_load(path.read_text(encoding="utf-8")))
    if faults:
        raise ConfigError([f"{recipe}: {fault}" for fault in faults])
    with TemporaryDirectory() as folder:
        (Path(folder) / FOLDER).mkdir()
        copy(path, Path(folder) / FOLDER / "recipe.yaml")
        words = [f"{FOLDER}=recipe", *overrides]
        try:
            search = f"hydra.searchpath=[dotted://,'file://{folder}']"
            config = compose_config(*words, search)
            if foreign := [] if own_code else _own_code(config):
                raise ConfigError(foreign)
            return build_surgery(config)
        except ConfigError as error:
            raise ConfigError([f"{recipe}: {fault}" for fault in error.faults]) from None
        except COMPOSE_ERRORS as error:
            faults = _composition_faults(words, folder) or [first_line(error)]
            raise ConfigError([f"{recipe}: {fault}" for fault in faults]) from None


def recipes() -> list[str]:
    """Return the names of all recipes."""
    from gradsurg.experiment.overrides import CONFIG_DIRS, options_of

    return [
        name
        for name in options_of(FOLDER, [])
        for folder in CONFIG_DIRS
        if (path := folder / FOLDER / f"{name}.yaml").is_file() and not _faults(path)
    ]


def _own_code(config: Mapping[str, Any]) -> list[str]:
    """Return a line for each `_target_` in a recipe that is no plug-in of gradsurg.

    Nothing else is imported: importing a module runs it.
    """
    return [
        f"{place}: {path} is not of gradsurg: it is imported and called only by load(..., "
        "own_code=True)"
        for key in KEYS
        for place, path in _targets(config.get(key), key)
        if not _is_plugin(path)
    ]


def _is_plugin(path: str) -> bool:
    """Whether a dotted path is that of a plug-in: `gradsurg.transforms.clip.Clip`."""
    _, folder, stem, *_ = *path.split("."), "", ""
    if folder not in FOLDERS or stem not in names(folder):
        return False
    cls = find(folder, stem)
    return path == f"{cls.__module__}.{cls.__qualname__}"


def _targets(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the path of each `_target_` in a part of a config."""
    match value:
        case Mapping():
            for name, item in value.items():
                if name == "_target_":
                    yield f"{key}._target_", str(item)
                else:
                    yield from _targets(item, f"{key}.{name}")
        case list() | tuple():
            for index, item in enumerate(value):
                yield from _targets(item, f"{key}.{index}")


def _composition_faults(words: list[str], folder: str) -> list[str]:
    """Return why these overrides cannot be composed, as on the command line."""
    from gradsurg.experiment.compose import check

    try:
        check(words, multirun=False, config_dirs=[folder], builds=False)
    except ConfigError as error:
        return error.faults
    return []


def _faults(path: Path) -> Iterable[str]:
    """Return why a file is no recipe, a line for each reason."""
    text = path.read_text(encoding="utf-8")
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"is no yaml: {' '.join(str(error).split())}"]
    if not isinstance(content, dict):
        return [f"must be a mapping, found {content!r}"]
    if not text.startswith("# @package _global_"):
        return ["must begin with '# @package _global_'"]
    defaults = content.pop("defaults", [])
    chosen = [key for entry in defaults if isinstance(entry, dict) for key in entry]
    groups = [key.removeprefix("override ").removeprefix("/") for key in chosen]
    wrong = [key for key in [*groups, *content] if key not in KEYS]
    if wrong:
        listed = ", ".join(dict.fromkeys(map(str, wrong)))
        return [f"is a study, no recipe: it sets {listed}; a recipe sets {', '.join(KEYS)} alone"]
    return [] if {*KEYS[:-1]} & {*groups, *content} else ["sets no transform, site or aggregator"]
