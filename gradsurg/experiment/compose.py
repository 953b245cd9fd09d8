"""Where Hydra finds the configs: the folders and their files, and the composed config.

Help and wrong names need this module, so it imports no torch.
"""

import json
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gradsurg.experiment.errors import ConfigError
from gradsurg.plugins.registry import CONFIG_DIR, name_of
from hydra_plugins.gradsurg_dotted.dotted_source import LISTS, RATE

GROUPS = (
    "transform",
    "site",
    "when",
    "aggregator",
    "model",
    "task",
    "optimizer",
    "schedule",
    "logger",
)

PRESETS = "surgery"
"""The group of whole surgeries, for the configs of other apps: `+surgery=clip`."""

QUIET = ({"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"})
AGAIN = "again.yaml"
"""The file in the folder of a run that trains it again."""

VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
"""Hydra 1.3 warns without it, and 1.4 with it."""


def register() -> None:
    """Register the resolvers of our configs with OmegaConf: names of plug-ins, and the help."""
    name = "register_new_resolver" if VERSION_BASE else "register_resolver"  # of OmegaConf 2.4
    getattr(OmegaConf, name)("gradsurg.name", name_of, replace=True)
    getattr(OmegaConf, name)("gradsurg.help", _help, replace=True)


def compose_config(*words: str) -> dict[str, Any]:  # Any: what a YAML file can hold
    """Return the resolved config of these overrides. Raises what Hydra raises, and ConfigError."""
    register()
    # Inside another app of Hydra, `initialize` would fail: put that app aside meanwhile.
    app, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(str(CONFIG_DIR), **VERSION_BASE):
            return plain(compose("config", list(words)))
    finally:
        GlobalHydra.instance().hydra = app  # `initialize` has replaced the instance


def again(config: Mapping[str, Any], seed: int, folder: Path) -> str:
    """Return the text of a primary config for Hydra that trains a run again.

    It is the config of the run's job, with this seed alone; it will lie in `folder`.
    """
    command = f"python -m gradsurg.run --config-dir {folder} --config-name {Path(AGAIN).stem}"
    own = {"seed": seed, "splits": 1, "attribute": False, "tune": None}
    whole = {"defaults": ["_self_", *QUIET], **config, **own, "hydra": _primary()["hydra"]}
    return f"# {command}\n{json.dumps(whole, indent=1)}\n"


@cache
def _primary() -> Mapping[str, Any]:
    """Return the content of `conf/config.yaml`, not composed."""
    return yaml.safe_load((CONFIG_DIR / "config.yaml").read_text(encoding="utf-8"))


def split_config_dirs(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the folders that `--config-dir` names, and the other words."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path, nargs="?", action="append", default=[])
    found, others = parser.parse_known_args(words)
    return [folder for folder in found.config_dir if folder is not None], others


def search_path(*folders: Path) -> str:
    """Return the override that adds folders to Hydra's search path; `dotted://` finds classes."""
    quoted = ["'file://{}'".format(str(each.absolute()).replace("'", "\\'")) for each in folders]
    return f"hydra.searchpath=[{','.join(['dotted://', *quoted])}]"


def plain(config: DictConfig) -> dict[str, Any]:
    """Return the config as dicts, lists and numbers. Raises ConfigError if a value is missing."""
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError([f"{error.full_key}: is required"]) from None
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError([key + first_line(error)]) from None
    assert isinstance(resolved, dict)
    named = {key: _with_key(resolved[key]) for key in LISTS if key in resolved}
    return {str(key): value for key, value in (resolved | named).items()}


def words_of(hydra: Any) -> list[str]:
    """Return the overrides of a command or of a job as typed, with their interpolations.

    Any: the group `hydra` of a config.
    """
    words = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    assert isinstance(words, list)
    return [str(word) for word in words]


def searches(hydra: Any) -> bool:  # Any: the group `hydra` of a config
    """Whether the sweeper is one that chooses each job by the results of earlier ones."""
    return not str(hydra.sweeper["_target_"]).endswith(".BasicSweeper")


def files_of(group: str, config_dirs: Iterable[str | Path] = ()) -> dict[str, Path]:
    """Return the files of a group in gradsurg's folder and in these by their options, sorted."""
    folders = [CONFIG_DIR, *map(Path, config_dirs)]
    files = {path.stem: path for folder in folders for path in (folder / group).glob("*.yaml")}
    return dict(sorted(files.items()))


def key_in(word: str) -> str:
    """Return the key of an override, without the `+` or `~` before it."""
    return word.partition("=")[0].lstrip("+~")


def first_line(error: Exception) -> str:
    """Return the first line of an error: Hydra's explanations stand below it."""
    return " ".join(str(error).split("\n")[0].split())


def _help() -> str:
    from gradsurg.experiment.help import template  # which needs this module

    loader = GlobalHydra.instance().config_loader()
    options = {group: loader.get_group_options(group) for group in loader.list_groups("")}
    shown = [group for group in options if group not in (PRESETS, RATE, "hydra")]
    entries = [entry for entry in _primary()["defaults"] if isinstance(entry, Mapping)]
    chosen = {group: option for entry in entries for group, option in entry.items()}
    return template({group: options[group] for group in shown}, chosen)


def _with_key(options: object) -> object:
    """Return a list's options by key; an object at the top of a user's file gets its class name."""
    if not isinstance(options, Mapping) or any(map(_is_node, options.values())):
        return options
    return {name_of(options).rpartition(".")[2]: options} if _is_node(options) else options


def _is_node(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("_target_"), str)
