"""Exceptions of Hydra and OmegaConf in one line, `key: rule`, with the nearest name.

No module here imports torch: a wrong word is answered at once.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from gradsurg.experiment.compose import GROUPS, files_of, first_line
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.launchers import PLUG_INS
from gradsurg.plugins.extras import how_to_install
from gradsurg.plugins.messages import full_message, printable, similar, unknown
from gradsurg.plugins.registry import HYDRAS
from hydra_plugins.gradsurg_dotted.dotted_source import LISTS

MEANT = {"dir": "out", "epochs": "steps", "learning_rate": "lr", "trigger": "when"}  # keys

RULES = (
    (r"Ambiguous value for argument '(logger=(.+))'", r"\1: write 'logger=[\2]', a list"),
    (r"Ambiguous value for argument '(.+)'", r"\1: add -m: several values need a sweep"),
    (
        r"Could not delete '(transform|logger)'.*",
        r"\1: write '\1=[]' to empty it; it cannot be taken out",
    ),
    (r"Error resolving .* '\$\{task\}_\$\{optimizer\}'.*", "task, optimizer: both are required"),
    (
        r"Could not delete from config\. '(.+)' does not exist\.",
        r"\1: there is no such key",
    ),
    (
        r"Could not append to config\. An item is already at '(.+)'\.",
        r"\1: omit the +: the key exists",
    ),
    (
        r"Could not override '(.+)'\. No match in the defaults list\.",
        r"\1: this config has one as a whole. Change its fields by \1.<field>=..",
    ),
    (r"Additional config directory '(.+)' not found", r"--config-dir: there is no folder '\1'"),
    (r"Cannot find primary config '(.+?)'.*", r"--config-name: there is no config '\1'"),
)
"""Patterns of the first line of Hydra's messages, and the line that replaces each."""
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError)
COMPOSE_ERRORS += (AttributeError, LookupError, AssertionError, RecursionError)
"""The errors that Hydra raises for wrong overrides and broken yaml files."""


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


def _unknown_option(group: str, name: str, options: Sequence[str]) -> str:
    if extra := PLUG_INS.get(group, {}).get(name):
        return how_to_install(f"'{name}'", extra)
    if name.isidentifier() and name in {path.stem for path in Path().glob("*.py")}:
        return f"write {group}={name}.<name>, with a class or function in {name}.py"
    return no_option(group, name, options)


def no_option(group: str, name: str, options: Sequence[str]) -> str:
    """Return the error for an option that a group does not have."""
    from gradsurg.experiment.catalogue import LISTED, also_named  # slow to load for --help

    listed_by = f"--list {group}" if group in LISTED else ""
    return unknown(f"there is no '{name}'", name, options, also_named(group, name), listed_by)


def _unreadable(error: OverrideParseException) -> str:
    word = error.override
    key, _, value = word.partition("=")
    if "=" not in word and not word.startswith("~"):
        return f"{word}: is not key=value" + f". Did you mean --list {word}?" * (word in GROUPS)
    if value.startswith("re:"):
        try:
            re.compile(value.removeprefix("re:"))
        except re.error as wrong:
            return f"{key}: is not a regular expression ({wrong}), found '{value}'"
    if key == "when" and re.search(r"[(&|]", value):
        several = "when=all_of 'when.of=[{_target_: gradsurg.Steps, start: 3}]'"
        return f"{word}: one trigger is when=steps when.start=3, several are {several}"
    if value.startswith("~"):
        return f"{word}: cannot be read, because the shell does not expand ~ after =. Write $HOME"
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) > value.count(closing):
            return f"{word}: a '{opening}' is not closed"
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
        return f"there is no '{key}' in this list{length}"
    parts = path.split(".")
    if key not in parts:  # in the mapping that is given as value
        return f"cannot get keys that it lacks. Replace it as a whole: ~{path} '+{path}={{...}}'"
    keys = [str(name) for name in place if name not in ("hydra", *HYDRAS)]
    depth = parts.index(key)
    group = parts[0]
    if group in LISTS and depth == 1 and key in files_of(group):
        chosen = f"'{group}=[{','.join([*keys, key])}]'" if keys else f"{group}={key}"
        beside = f" beside '{', '.join(keys)}'" if keys else ""
        alone = "; in a sweep give its field in a command of its own" if keys else ""
        return f"add {chosen}: '{key}' is not chosen{beside}{alone}"
    if not keys and "_target_" not in place:
        return f"there is no key '{key}': {'.'.join(parts[:depth])} has no keys below"
    inside: Any = OmegaConf.to_container(place)  # a dict with strings as keys
    above, below = ".".join([*parts[:depth], ""]), ".".join(parts[depth:])
    absent = f"There is no key '{path}'"
    for name, value in inside.items():
        if isinstance(value, Mapping) and key in value and name != "hydra":
            return f"did you mean {above}{name}.{below}? {absent}"
    if group in LISTS and depth == 1 == len(parts) - 1:
        fields = [f"{name}.{each}" for name in keys for each in inside[name] if each != "_target_"]
        near = similar(key, [field.partition(".")[2] for field in fields])
        close = [field for field in fields if field.partition(".")[2] in near]
        return unknown(f"there is no key '{key}'", key, fields, close)
    if depth == 1 < len(parts) - 1 and key in files_of(group):
        return f"did you mean {group}.{'.'.join(parts[2:])}? {absent}"
    for group in GROUPS if depth == 0 and len(parts) > 1 else ():
        if key in files_of(group):
            return f"did you mean {group}={key} {group}.{path}=..? {absent}"
    chosen = inside.get("transform") if depth == 0 else None
    for name, fields in chosen.items() if isinstance(chosen, Mapping) else ():
        if isinstance(fields, Mapping) and key in fields:
            return f"did you mean transform.{name}.{path}? {absent}"
    is_field = 0 < depth == len(parts) - 1 and not similar(key, keys)
    hint = f" If the class has it, '+{path}=...' adds it." if is_field else ""
    meant = [] if depth or key not in MEANT else [MEANT[key]]
    return unknown(f"there is no key '{key}'", key, keys, meant, "" if depth else "--help") + hint
