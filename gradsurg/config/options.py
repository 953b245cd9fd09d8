"""The options of the config's groups: the files they lie in, and dotted paths beside them."""

import json
from collections.abc import Sequence
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from gradsurg.experiments import config_dirs as experiment_dirs
from gradsurg.plugins.registry import snake

LISTS = ("transform", "logger")
LAUNCHERS = ("joblib", "submitit_local", "submitit_slurm")  # an extra: gradsurg[launchers]


def _config_dir() -> Path:
    """The packaged copy of `conf` where there is one (a wheel), else the checkout's."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


CONFIG_DIR = _config_dir()
CONFIG_DIRS = (CONFIG_DIR, *experiment_dirs())


def options_of(group: str, config_dirs: Sequence[str]) -> list[str]:
    """Their names; none if it is not a group."""
    if group.startswith("hydra/"):
        return GlobalHydra.instance().config_loader().get_group_options(group)
    folders = [*CONFIG_DIRS, *map(Path, config_dirs)]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def content_of(group: str, name: str, config_dirs: Sequence[str]) -> str:
    """What an option holds, as it is typed on a command line."""
    if "." in name:
        return f"{{_target_: {name}}}"
    files = [folder / group / f"{name}.yaml" for folder in (*CONFIG_DIRS, *map(Path, config_dirs))]
    config = OmegaConf.load(next(file for file in files if file.is_file()))
    fields = OmegaConf.to_container(OmegaConf.select(config, name, default=config))
    return json.dumps(fields).replace('"', "")


def key_of(name: str) -> str:
    """The key under which an option of a list stands: a dotted path's is its last name."""
    return snake(name.rpartition(".")[2]) if "." in name else name


def wrong_dirs(config_dirs: Sequence[str]) -> list[str]:
    """A folder that is not there, and files in it that Hydra would pass over for ours."""
    faults = []
    for path in map(Path, config_dirs):
        if not path.is_dir():
            faults.append(f"--config-dir: there is no folder {path}")
        for file in sorted(path.glob("*/*.yaml")):
            if any((own / file.parent.name / file.name).is_file() for own in CONFIG_DIRS):
                faults.append(
                    f"--config-dir: {file} has the name of one of gradsurg's own and would not be "
                    "read; give it another"
                )
    return faults
