"""Overrides that Hydra cannot parse or would silently change, and its exceptions in one line.

A word is one argument of the command line. `prepared` rewrites and checks the words before Hydra
reads them; `explained` turns an exception of Hydra into one line, `key: rule`, with the nearest
name. Neither imports torch.
"""

import json
import os
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from gradsurg.experiment.compose import (
    CONFIG_DIR,
    GROUPS,
    files_of,
    first_line,
)
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.launchers import LAUNCHERS, sweeper_fault
from gradsurg.plugins.messages import full_message, nearest, printable
from hydra_plugins.gradsurg_dotted.dotted_source import LISTS, key_of

MAX_RUNS = 10_000  # a command with more runs needs yes=true
UNQUOTED = re.compile(r"(tune|until)=(?!null$)([^'\"].*)", re.DOTALL)
FIELD = re.compile(rf"^((?:{'|'.join(GROUPS)})\.[\w.]+)=([^,()'\"\[]+|\[[^()\[\]]*\])$")
"""An override of one field of an option, such as transform.clip.value=1, with a single value."""
NO_KEY = "is not a key here."

RULES = (
    (r"Ambiguous value for argument '(logger=(.+))'", r"\1: a list is written logger=[\2]"),
    (r"Ambiguous value for argument '(.+)'", r"\1: several values need a sweep: add -m"),
    (r"Could not delete '(transform|logger)'.*", r"\1: cannot be taken out; '\1=[]' empties it"),
    (r"Could not delete from config\. '(.+)' does not exist\.", r"\1: is not a key here"),
    (r"Could not append to config\. An item is already at '(.+)'\.", r"\1: exists; omit the +"),
    (r"Additional config directory '(.+)' not found", r"--config-dir: there is no folder \1"),
    (r"Cannot find primary config '(.+?)'.*", r"--config-name: there is no config '\1'"),
)
"""Patterns of the first line of Hydra's messages, and the line that replaces each."""
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError)
COMPOSE_ERRORS += (AttributeError, LookupError, AssertionError, RecursionError)
"""What Hydra raises for wrong overrides and broken yaml files."""


def prepared(words: Sequence[str]) -> list[str]:
    """Return the words as Hydra reads them: `tune` and `until` quoted.

    In a sweep `transform.clip.value=1` becomes `transform.clip.value=choice(1)`: Hydra first
    composes a config without the swept options, in which that key would be missing. Raises
    ConfigError for what Hydra accepts silently: an option twice in a list, a list for a group that
    takes one option, a key given twice, a user's yaml file that one of gradsurg's hides.
    """
    faults = [*_dashes(words), *_repeated_keys(words), *_hidden_files(words)]
    for word in words:
        faults += _swallowed(word)
        faults += _refused(word)
    if faults:
        raise ConfigError(faults)
    expanded = [UNQUOTED.sub(r'\1="\2"', word) for word in words]
    if {"-m", "--multirun"} & {*words}:
        expanded = [FIELD.sub(r"\1=choice(\2)", word) for word in expanded]
    # Hydra's argument parser needs all overrides in one block: put options before them.
    behind = [word for word in expanded if "=" in word and not word.startswith("-")]
    return [word for word in expanded if word not in behind] + behind


def split_config_dirs(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the folders that `--config-dir` names, and the other words."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path, nargs="?", action="append", default=[])
    found, others = parser.parse_known_args(words)
    return [folder for folder in found.config_dir if folder is not None], others


@contextmanager
def composing() -> Iterator[None]:
    """Raise an exception of Hydra or OmegaConf in this block as a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except COMPOSE_ERRORS as error:
        raise ConfigError([explained(error)]) from error


def explained(error: Exception) -> str:
    """Return an exception of Hydra or OmegaConf as one line."""
    return printable(_explained(error))


def _explained(error: Exception) -> str:
    message, cause = str(error), error.__cause__
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        folders = [place.strip() for place in re.findall(r"path=file://(.*)", message)]
        return (
            f"{group}: {_unknown_option(group, name, error.options or [*files_of(group, folders)])}"
        )
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and "'" in message:
        path = message.split("'")[1]
        return f"{path}: {_missing_key(path, str(cause.key), cause.parent_node)}"
    for pattern, text in RULES:
        if match := re.fullmatch(pattern, first_line(error)):
            return match.expand(text)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {first_line(error)}"
    shown = first_line(error) if isinstance(error, HydraException) else full_message(error)
    return f"hydra: {shown}; HYDRA_FULL_ERROR=1 shows the traceback"


def too_many(count: int | str, things: str) -> str:
    """Return the error for more runs, jobs or values than `MAX_RUNS`."""
    shown = f"{count:,}" if isinstance(count, int) else count
    return f"{shown} {things} need yes=true; without it at most {MAX_RUNS:,} are allowed"


def _dashes(words: Sequence[str]) -> Iterator[str]:
    """Yield an error for a key that is written as an option: `--seeds 3` for `seeds=3`."""
    keys = {*GROUPS, *OmegaConf.load(CONFIG_DIR / "config.yaml")}
    for word, value in zip(words, [*words[1:], ""], strict=False):
        key, _, given = word.removeprefix("--").partition("=")
        if word.startswith("--") and key in keys:
            yield f"{word}: is a key, not an option: write {key}={given or value}"


def _repeated_keys(words: Sequence[str]) -> Iterator[str]:
    """Yield an error for each key with two values: Hydra silently takes the last one."""
    first: dict[str, str] = {}
    for word in words:
        key = word.partition("=")[0].lstrip("+")  # `~key` with `+key=` replaces a node: no fault
        if "=" in word and not word.startswith("-") and first.setdefault(key, word) != word:
            yield f"{key}: is given twice, {first[key]} and {word}"


def _hidden_files(words: Sequence[str]) -> Iterator[str]:
    """Yield an error for each file of `--config-dir` that one of gradsurg's hides."""
    for folder in split_config_dirs(words)[0]:
        for file in sorted(folder.glob("*/*.yaml")):
            if (CONFIG_DIR / file.parent.name / file.name).is_file():
                yield (
                    f"--config-dir: {file} has the name of one of gradsurg's own and would not be "
                    "read; give it another"
                )


def _refused(word: str) -> Iterator[str]:
    """Yield an error for a sweeper and for a launcher under torchrun."""
    key, _, value = word.lstrip("+").partition("=")
    if key == "hydra/sweeper" and value != "basic":
        yield sweeper_fault(value)
    under_torchrun = os.environ.get("WORLD_SIZE", "1") != "1"
    if key == "hydra/launcher" and value != "basic" and under_torchrun:
        yield f"{key}: {value} starts processes of its own, which cannot be those of torchrun"


def _swallowed(word: str) -> Iterator[str]:
    """Yield an error for values of a group that Hydra accepts silently, such as `[clip,clip]`."""
    key, _, value = word.partition("=")
    if key not in GROUPS:
        return
    if value.strip() == "null":
        plain_run = "; 'transform=none' is a plain run" if key == "transform" else ""
        yield f"{key}: must name an option, found null{plain_run}"
    for inside in re.findall(r"\[([^\[\]{}]*)\]", value) or [value]:
        options = [option.strip(" '\"") for option in inside.split(",") if option.strip()]
        for option in options:
            if "/" in option:
                yield f"{key}: there is no '{option}'. {nearest(option, [*files_of(key)])}"
        if inside == value:
            continue
        if key not in LISTS:
            if len(options) > 1:
                yield f"{key}: takes one option, found [{', '.join(options)}]"
            continue
        first: dict[str, str] = {}
        for option in options:
            place = key_of(option)
            if place in first:
                yield _repeated_option(key, first[place], option, place)
            first.setdefault(place, option)


def _repeated_option(group: str, before: str, option: str, key: str) -> str:
    text = f"'{option}' is listed twice"
    if option != before:
        text = f"'{before}' and '{option}' have the same key '{key}'"
    content = f"{{_target_: {option}}}"
    if file := files_of(group).get(option):
        fields = OmegaConf.to_container(OmegaConf.select(OmegaConf.load(file), option))
        content = json.dumps(fields).replace('"', "")
    return (
        f"{group}: {text} and would be merged into one; give the second a key of its own: "
        f"'+{group}.{key}_2={content}'"
    )


def _unknown_option(group: str, name: str, options: Sequence[str]) -> str:
    if group == "hydra/launcher" and name in LAUNCHERS:
        return f"'{name}' is not installed: pip install 'gradsurg[{LAUNCHERS[name]}]'"
    if name.isidentifier() and name in {path.stem for path in Path().glob("*.py")}:
        return f"{name}.py is a module; name a class or function in it: {group}={name}.<name>"
    from gradsurg.experiment.catalogue import also_named  # help does without

    return f"there is no '{name}'. {nearest(name, [*options], also_named(group, name))}"


def _unreadable(error: OverrideParseException) -> str:
    word = error.override
    key, _, value = word.partition("=")
    if "=" not in word and not word.startswith("~"):
        return f"{word}: is not key=value"
    if value.startswith("re:"):
        try:
            re.compile(value.removeprefix("re:"))
        except re.error as wrong:
            return f"{key}: is not a regular expression ({wrong}), found '{value}'"
    if value.startswith("~"):
        return f"{word}: cannot be read: the shell does not expand ~ after =; write $HOME"
    reason = first_line(error).partition(" expecting ")[0].partition("LexerNoViable")
    reason = reason[0] or "it has a character that needs quotes"
    advice = "Commas, brackets, braces and spaces need quotes"
    if not value.startswith(("[", "{")):
        advice += f" inside quotes: \"{key}='...'\""
    return f"{word}: cannot be read: {reason}. {advice}"


def _missing_key(path: str, key: str, place: object) -> str:
    """Return the error for an override of `key`, which the config node `place` does not have."""
    if path.startswith("hydra.launcher."):
        return f"'{key}' is not a key of this launcher; choose one: hydra/launcher=joblib"
    if not isinstance(place, DictConfig):
        length = f" of {len(place)}" if isinstance(place, ListConfig) else ""
        return f"{NO_KEY} There is no '{key}' in this list{length}."
    parts = path.split(".")
    if key not in parts:  # in the mapping that is given as value
        return f"cannot get keys that it lacks. Replace it as a whole: ~{path} '+{path}={{...}}'"
    keys = [str(name) for name in place if name != "hydra"]
    depth = parts.index(key)
    group = parts[0]
    if group in LISTS and depth == 1 and key in files_of(group):
        chosen = f"'{group}=[{','.join([*keys, key])}]'" if keys else f"{group}={key}"
        return f"'{key}' is not chosen; add {chosen}"
    if not keys:
        return f"{NO_KEY} {'.'.join(parts[:depth])} has no keys below."
    inside: Any = OmegaConf.to_container(place)  # a dict with strings as keys
    above = ".".join([*parts[:depth], ""])
    for name, value in inside.items():
        if isinstance(value, Mapping) and key in value and name != "hydra":
            return f"{NO_KEY} Is it {above}{name}.{'.'.join(parts[depth:])}?"
    for group in GROUPS if depth == 0 and len(parts) > 1 else ():
        if key in files_of(group):
            return f"{NO_KEY} '{key}' is an option: {group}={key} {group}.{path}=.."
    choices = nearest(key, keys)
    is_field = 0 < depth == len(parts) - 1 and "Did you mean" not in choices
    hint = f" '+{path}=...' adds it." if is_field else ""
    return f"'{key}' {NO_KEY} {choices}{hint}"
