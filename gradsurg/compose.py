"""From a command line to resolved configs: every job of a sweep, with all faults at once."""

import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gradsurg.build import ConfigError, build
from gradsurg.fields import nearest

LISTS = ("transform", "sink")
NO_HEADER: dict[str, str | None] = {"package": None}


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
            name = target.rpartition(".")[2]
            config = {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(): config}
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


def check(overrides: Sequence[str], multirun: bool, config_dirs: Sequence[str]) -> None:
    """Compose and build every job, train nothing. Raises ConfigError with all that is wrong."""
    register()
    faults: list[str] = []
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        for job in _jobs(overrides, multirun):
            faults += _faults(job, config_dirs)
    if faults:
        raise ConfigError(faults)


def _faults(overrides: Sequence[str], config_dirs: Sequence[str]) -> list[str]:
    """What is wrong with one job: with its overrides, and with what is left without the wrong ones."""
    faults = _twice(overrides)
    rest = list(overrides)
    urls = ",".join(f"file://{Path(path).resolve()}" for path in config_dirs)
    search = [f"hydra.searchpath=[dotted://,{urls}]"] if urls else []
    while True:
        try:
            config = compose("config", [*rest, *search])
            break
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            culprit = _culprit(error, rest)
            if culprit is None:
                return [*faults, _one_line(error)]
            rest.remove(culprit)
            faults.append(_sentence(error, culprit))
    faults = [_with_keys(fault, config) for fault in faults]
    try:
        build(plain(config))
    except ConfigError as error:
        faults += error.faults
    return faults


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as dicts, lists and numbers. Raises ConfigError if a value is missing."""
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError([_one_line(error)]) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _jobs(overrides: Sequence[str], multirun: bool) -> Iterator[list[str]]:
    """The overrides of each job of a sweep."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise ConfigError([f"{error.override}: cannot be read: {_one_line(error)}"]) from None
    sweeps = [override for override in parsed if override.is_sweep_override()]
    if sweeps and not multirun:
        lines = [f"{item.input_line}: several values need a sweep: add -m" for item in sweeps]
        raise ConfigError(lines)
    for values in product(*(_values(override) for override in parsed)):
        yield list(values)


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.input_line or ""]
    prefix = "+" if override.is_add() else ""
    key = prefix + override.get_key_element()
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _twice(overrides: Sequence[str]) -> list[str]:
    """Hydra merges `[clip,clip]` into one without a word."""
    faults = []
    for override in overrides:
        key, _, value = override.partition("=")
        names = [name.strip() for name in value.strip("[] ").split(",")]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if key in LISTS and value.startswith("["):
            faults += [
                f"{key}: '{name}' stands twice and would be merged into one; give the second a key "
                f"of its own: '+{key}.{name}_2={{name: {name}}}'"
                for name in twice
            ]
    return faults


def _culprit(error: Exception, overrides: Sequence[str]) -> str | None:
    """The override that an error of Hydra is about."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return next((o for o in overrides if o.partition("=")[0] == group and name in o), None)
    text = str(error)
    if isinstance(error, OverrideParseException):
        return error.override if error.override in overrides else None
    found = re.search(r"(?:override|merging|append to|key)[^']*'([^'=]+)", text)
    if found:
        key = found.group(1)
        return next((o for o in overrides if o.partition("=")[0].lstrip("+~") == key), None)
    if "Config group override" in text:
        return next((o for o in overrides if o.partition("=")[2].strip() == "null"), None)
    return None


def _sentence(error: Exception, culprit: str) -> str:
    key, _, value = culprit.partition("=")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = [path.stem for path in sorted((CONFIG_DIR / group).glob("*.yaml"))]
        return f"{group}: there is no '{name}'. {nearest(name, options)}"
    if "Config group override" in str(error):
        return f"{key}: must name an option, found {value}; '{key}=none' is a plain run"
    if "Could not override" in str(error):
        return f"{key}: is not a key here."
    return f"{key}: {_one_line(error)}"


def _with_keys(fault: str, config: DictConfig) -> str:
    """Say which keys there are beside one that is not there."""
    key, _, text = fault.partition(": ")
    if not text.endswith("is not a key here."):
        return fault
    parent, _, name = key.rpartition(".")
    beside = OmegaConf.select(config, parent) if parent else config
    keys = [str(k) for k in beside] if isinstance(beside, DictConfig) else []
    return f"{fault} {nearest(name, keys)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split())
