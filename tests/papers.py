"""Tasks and models of gradsurg and of the papers' experiments, by the stem of their yaml."""

from importlib import import_module
from pathlib import Path

import yaml

from gradsurg.experiment.compose import search_path
from gradsurg.plugins import registry

ROOT = Path(__file__).parents[1]

FROM_FILES = (
    "cifar10",
    "clipped_mnist",
    "fashion_mnist",
    "mnist",
    "mnist_overlay",
    "permuted_mnist",
    "permuted_stream",
    "scaled_mnist_overlay",
    "split_overlay",
    "workers",
)
"""Tasks whose data are fetched."""

OWN_METRICS = ("friedman_multi", "noisy_quadratics")
"""Tasks whose metrics are not their losses."""


def config_path(group: str, stem: str) -> Path:
    """Return the yaml of an option of `task` or `model`, of gradsurg or of a paper."""
    (path,) = {*ROOT.glob(f"conf/{group}/{stem}.yaml"), *_of_papers(group, stem)}
    return path


def searched(paper: str) -> str:
    """Return the override that puts the configs of a paper on Hydra's search path."""
    return search_path(ROOT / "experiments" / paper / "conf")


def names(group: str) -> list[str]:
    """Return the stems of all classes of a group."""
    return sorted([*registry.names(f"{group}s"), *(path.stem for path in _of_papers(group))])


def find(group: str, stem: str) -> type:
    """Return the class of a yaml."""
    paths = _of_papers(group, stem)
    if not paths:
        return registry.find(f"{group}s", stem)
    module, _, name = yaml.safe_load(paths[0].read_text(encoding="utf-8"))["_target_"].rpartition(
        "."
    )
    return getattr(import_module(module), name)


def _of_papers(group: str, stem: str = "*") -> list[Path]:
    return sorted(ROOT.glob(f"experiments/*/conf/{group}/{stem}.yaml"))
