"""From a command line to resolved configs: every job of a sweep, with all faults at once."""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeGuard

from hydra import compose, initialize_config_dir
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from gradsurg.build import ConfigError, build, snake
from gradsurg.fields import nearest

LISTS = ("transform", "sink")
LAUNCHERS = ("joblib", "submitit_local", "submitit_slurm")
NO_HEADER: dict[str, str | None] = {"package": None}
NO_KEY = "is not a key here."
# A yaml file that is none, or is no mapping, is a YAMLError or an OSError.
COMPOSING = (HydraException, OmegaConfBaseException, ValueError, YAMLError, OSError)


def _config_dir() -> Path:
    """The packaged copy of `conf` where there is one (a wheel), else the checkout's."""
    package = Path(__file__).resolve().parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


CONFIG_DIR = _config_dir()


class DottedSource(ConfigSource):
    """Lets a group's option be a dotted path: `model=my_module.make_model` is `_target_: ...`."""

    @staticmethod
    def scheme() -> str:
        return "dotted"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        return "." in _stem(config_path)

    def list(self, config_path: str, results_filter: object) -> list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        group = config_path.rpartition("/")[0]
        target = _stem(config_path)
        config: dict[str, Any] = {"_target_": target}
        if group in LISTS:
            config = {_key(target): config}
        return ConfigResult(
            provider=self.provider,
            path=f"dotted://{target}",
            config=OmegaConf.create(config),
            header=NO_HEADER,
        )


def _stem(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".yaml")


def register() -> None:
    """Make Hydra know dotted paths; it keeps its sources in a registry of its own."""
    SourcesRegistry.instance().register(DottedSource)


def check(
    overrides: Sequence[str],
    multirun: bool,
    config_dirs: Sequence[str],
    config_name: str = "config",
) -> None:
    """Compose and build every job, train nothing. Raises ConfigError with all that is wrong."""
    register()
    faults = _wrong_dirs(config_dirs)
    if faults:
        raise ConfigError(faults)
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        for job in _jobs(overrides, multirun):
            faults += _faults(job, config_dirs, config_name)
    if faults:
        raise ConfigError(faults)


def _wrong_dirs(config_dirs: Sequence[str]) -> list[str]:
    """A folder that is not there, and files in it that Hydra would pass over for ours."""
    faults = []
    for path in map(Path, config_dirs):
        if not path.is_dir():
            faults.append(f"--config-dir: there is no folder {path}")
        for file in sorted(path.glob("*/*.yaml")):
            if (CONFIG_DIR / file.parent.name / file.name).is_file():
                faults.append(
                    f"--config-dir: {file} has the name of one of gradsurg's own and would not be "
                    "read; give it another"
                )
    return faults


def _faults(overrides: Sequence[str], config_dirs: Sequence[str], config_name: str) -> list[str]:
    """What is wrong with one job: its overrides, and what is left without the wrong ones."""
    rest, faults = _known_options(overrides, config_dirs)
    unknown = {fault.partition(":")[0] for fault in faults}
    rest, twice = _each_once(rest, config_dirs)
    faults += twice
    urls = ",".join(f"'{_url(path)}'" for path in config_dirs)
    search = [f"hydra.searchpath=[dotted://,{urls}]"] if urls else []

    def composed(words: Sequence[str]) -> DictConfig:
        with warnings.catch_warnings():
            # Hydra warns of what it also raises, and of folders that are asked for above.
            warnings.simplefilter("ignore", UserWarning)
            return compose(config_name, [*words, *search])

    while True:
        try:
            config = composed(rest)
            break
        except COMPOSING as error:
            culprit = _culprit(error, rest, composed)
            if culprit is None:
                return [*faults, _one_line(error)]
            rest.remove(culprit)
            faults.append(_sentence(error, culprit))
    # A key of an option that is not there cannot be there either.
    faults = [fault for fault in faults if not _follows(fault, unknown)]
    faults = [_with_keys(fault, config) for fault in faults]
    try:
        build(plain(config))
    except ConfigError as error:
        faults += error.faults
    return faults


def _follows(fault: str, unknown: set[str]) -> bool:
    key = fault.partition(":")[0]
    return fault.endswith(NO_KEY) and key.partition(".")[0] in unknown - {key}


def _url(path: str) -> str:
    return f"file://{Path(path).resolve()}".replace("'", "\\'")


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as dicts, lists and numbers. Raises ConfigError if a value is missing."""
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError([f"{error.full_key}: is required"]) from None
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError([key + _one_line(error)]) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _jobs(overrides: Sequence[str], multirun: bool) -> Iterator[list[str]]:
    """The overrides of each job of a sweep."""
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    parsed, faults = [], []
    for word in overrides:
        if word.startswith("="):
            faults.append(f"{word}: has no key before the =")
            continue
        try:
            (override,) = parser.parse_overrides([word])
        except OverrideParseException as error:
            faults.append(f"{word}: {_unparsed(word, error)}")
            continue
        parsed.append(override)
        if override.is_sweep_override() and not multirun:
            faults.append(f"{word}: several values need a sweep: add -m")
    if faults:
        raise ConfigError(faults)
    for values in product(*(_values(override) for override in parsed)):
        yield list(values)


def _unparsed(word: str, error: OverrideParseException) -> str:
    if "=" not in word and not word.startswith("~"):
        return "is not key=value"
    reason = _one_line(error).partition(" expecting ")[0]
    return f"cannot be read: {reason}. Commas, brackets, braces and spaces need quotes"


def _values(override: Override) -> list[str]:
    word = override.input_line or ""
    if not override.is_sweep_override():
        return [word]
    key = word.partition("=")[0]
    try:
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    except (ValueError, TypeError, HydraException) as error:
        raise ConfigError([f"{word}: cannot be swept: {_one_line(error)}"]) from None


def _group(word: str) -> tuple[str, list[str], bool]:
    """Of an override: its key, the options that it would choose, and whether that is a list."""
    key, _, value = word.partition("=")
    inside = value.strip()
    several = inside.startswith("[") and inside.endswith("]")
    names = inside[1:-1].split(",") if several else [inside]
    return key, [name.strip(" '\"") for name in names if name.strip()], several


def _options(group: str, config_dirs: Sequence[str]) -> list[str]:
    if group.startswith("hydra/"):
        return GlobalHydra.instance().config_loader().get_group_options(group)
    folders = [CONFIG_DIR, *map(Path, config_dirs)]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def _known_options(
    overrides: Sequence[str], config_dirs: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The overrides without options that are not there, and a fault for each of those."""
    rest, faults = [], []
    for word in overrides:
        key, names, several = _group(word)
        options = _options(key, config_dirs)
        wrong = [name for name in names if "." not in name and name not in options]
        if not options or (wrong == ["null"] and not several):
            rest.append(word)
            continue
        faults += [_unknown(key, name, options) for name in wrong]
        right = [name for name in names if name not in wrong]
        if not wrong and (names or several):
            rest.append(word)
        elif not names and not several:
            faults.append(f"{key}: there is no ''. {nearest('', options)}")
        elif right:
            rest.append(f"{key}=[{','.join(right)}]")
    return rest, faults


def _unknown(group: str, name: str, options: list[str]) -> str:
    if group == "hydra/launcher" and name in LAUNCHERS:
        return f"{group}: '{name}' is not installed: pip install 'gradsurg[launchers]'"
    return f"{group}: there is no '{name}'. {nearest(name, options)}"


def _each_once(overrides: Sequence[str], config_dirs: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides with each key of a list once, and a fault for each that stands there twice.

    Hydra merges `[clip,clip]`, and two options with one key, into one without a word.
    """
    rest, faults = [], []
    for word in overrides:
        group, names, several = _group(word)
        if group not in LISTS or not several:
            rest.append(word)
            continue
        first: dict[str, str] = {}
        for name in names:
            key = _key(name)
            if key not in first:
                first[key] = name
                continue
            what = f"'{name}' stands twice"
            if name != first[key]:
                what = f"'{first[key]}' and '{name}' have the same key '{key}'"
            faults.append(
                f"{group}: {what} and would be merged into one; give the second a key of its own: "
                f"'+{group}.{key}_2={_content(group, name, config_dirs)}'"
            )
        rest.append(f"{group}=[{','.join(first.values())}]")
    return rest, faults


def _key(name: str) -> str:
    """The key under which an option of a list stands: a dotted path's is its last name."""
    return snake(name.rpartition(".")[2]) if "." in name else name


def _content(group: str, name: str, config_dirs: Sequence[str]) -> str:
    """What an option holds, as it is typed on a command line."""
    if "." in name:
        return f"{{_target_: {name}}}"
    files = [folder / group / f"{name}.yaml" for folder in (CONFIG_DIR, *map(Path, config_dirs))]
    config = OmegaConf.load(next(file for file in files if file.is_file()))
    fields = OmegaConf.to_container(OmegaConf.select(config, name, default=config))
    return json.dumps(fields).replace('"', "")


def _culprit(
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
            if _one_line(other) == _one_line(error):
                continue
        return overrides[index]
    return None


def _sentence(error: Exception, culprit: str) -> str:
    key, _, value = culprit.partition("=")
    key = key.lstrip("+~")
    if "Config group override" in str(error):
        plain_run = f"; '{key}=none' is a plain run" if key == "transform" else ""
        return f"{key}: must name an option, found {value}{plain_run}"
    if "Could not override" in str(error) or "Could not delete" in str(error):
        return f"{key}: {NO_KEY}"
    if isinstance(error, YAMLError | OSError):
        return f"{key}: '{value}' cannot be read: {' '.join(str(error).split())}"
    return f"{key}: {_one_line(error)}"


def _with_keys(fault: str, config: DictConfig) -> str:
    """Say which keys there are beside one that is not there, as far down as there are any."""
    path, _, text = fault.partition(": ")
    if text != NO_KEY:
        return fault
    place: object = config
    parts = path.split(".")
    above = 0
    while above < len(parts) - 1 and _has(place, parts[above]):
        part = parts[above]
        place = place[int(part)] if isinstance(place, ListConfig) else place[part]
        above += 1
    if not isinstance(place, DictConfig):
        return f"{fault} {'.'.join(parts[:above])} is {place!r}, with no keys below."
    if parts[above] in place:
        return (
            f"{path}: cannot get other keys than it has. Remove it first: ~{path} '+{path}={{...}}'"
        )
    keys = [str(key) for key in place]
    own = f" '+{path}=...' adds it." if "_target_" in keys else ""
    return f"{path}: '{parts[above]}' {NO_KEY} {nearest(parts[above], keys)}{own}"


def _has(place: object, key: str) -> TypeGuard[DictConfig | ListConfig]:
    """Whether something stands under a key, or under a number of a list."""
    if isinstance(place, ListConfig):
        return key.isdecimal() and int(key) < len(place)
    return isinstance(place, DictConfig) and key in place


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split())
