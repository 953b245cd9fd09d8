"""What Hydra says of a config that it cannot compose, as a sentence about what was typed."""

import re
from collections.abc import Callable, Sequence
from typing import TypeGuard

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gradsurg.config.options import LISTS, options_of
from gradsurg.plugins.fields import nearest

NO_KEY = "is not a key here."
# A yaml file that is none, or is no mapping, is a YAMLError or an OSError.
COMPOSING = (HydraException, OmegaConfBaseException, ValueError, YAMLError, OSError)


def culprit(
    error: Exception, overrides: Sequence[str], composed: Callable[[Sequence[str]], object]
) -> str | None:
    """The override that an error is about: Hydra names it, or without it the error is gone."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return next((o for o in overrides if o.partition("=")[0] == group and name in o), None)
    found = re.search(r"(?:override|merging|append to|delete from|key)[^']*'([^'=]+)", str(error))
    if found:
        key = found.group(1)
        named = [word for word in overrides if word.partition("=")[0].lstrip("+~") == key]
        if named:
            return named[0]
    for index in reversed(range(len(overrides))):
        try:
            composed([*overrides[:index], *overrides[index + 1 :]])
        except COMPOSING as other:
            if one_line(other) == one_line(error):
                continue
        return overrides[index]
    return None


def sentence(error: Exception, culprit: str) -> str:
    """The error as a line that begins with the key of its override."""
    key, _, value = culprit.partition("=")
    key = key.lstrip("+~")
    if "Config group override" in str(error):
        plain_run = f"; '{key}=none' is a plain run" if key == "transform" else ""
        return f"{key}: must name an option, found {value}{plain_run}"
    if culprit == f"~{key}" and key in LISTS:
        return f"{key}: cannot be taken out; '{key}=[]' leaves it empty"
    if "Could not override" in str(error) or "Could not delete" in str(error):
        return f"{key}: {NO_KEY}"
    if isinstance(error, YAMLError | OSError):
        return f"{key}: '{value}' cannot be read: {' '.join(str(error).split())}"
    return f"{key}: {one_line(error)}"


def with_keys(path: str, config: DictConfig, adds: bool) -> str:
    """Say which keys there are beside one that is not there, as far down as there are any."""
    place: object = config
    parts = path.split(".")
    above = 0
    while above < len(parts) - 1 and _has(place, parts[above]):
        part = parts[above]
        place = place[int(part)] if isinstance(place, ListConfig) else place[part]
        above += 1
    if not isinstance(place, DictConfig):
        above_it = ".".join(parts[:above])
        return f"{path}: {NO_KEY} {above_it} is {place!r}, with no keys below."
    if parts[above] in place:
        return (
            f"{path}: cannot get other keys than it has. Remove it first: ~{path} '+{path}={{...}}'"
        )
    keys = [str(key) for key in place]
    if parts[0] in LISTS and above == 1 and parts[1] in options_of(parts[0], ()):
        chosen = ",".join([*keys, parts[1]])
        chosen = f"'{parts[0]}=[{chosen}]'" if keys else f"{parts[0]}={chosen}"
        return f"{path}: '{parts[1]}' is not chosen; add {chosen}"
    own = f" '+{path}=...' adds it." if adds else ""
    return f"{path}: '{parts[above]}' {NO_KEY} {nearest(parts[above], keys)}{own}"


def one_line(error: Exception) -> str:
    """The first line of what an error says: Hydra explains itself below it."""
    return " ".join(str(error).split("\n")[0].split())


def _has(place: object, key: str) -> TypeGuard[DictConfig | ListConfig]:
    """Whether something stands under a key, or under a number of a list."""
    if isinstance(place, ListConfig):
        return key.isdecimal() and int(key) < len(place)
    return isinstance(place, DictConfig) and key in place
