"""The floors of the house: imports point down only, and each outside library has one door."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gradsurg"

FLOORS = (
    ("engine", "compiler", "fields", "per", "catalogue", "ledger", "tables", "randomness", "pipes"),
    ("transforms", "aggregators", "triggers", "models", "tasks", "loggers", "stats"),
    ("sites", "testing"),
    (
        "sums",
        "samples",
        "effects",
        "operation",
        "rules",
        "link",
        "gate",
        "group_gate",
        "multitask.shared_parameters",
        "intervention",
        "roll_call",
        "attached",
        "multitask.losses",
        "multitask.rows",
        "multitask.reaching",
        "multitask.features",
        "multitask.others",
        "multitask.conflict",
        "multitask.merging",
        "multitask.around",
        "multitask.aggregation",
        "multitask.compiled",
        "multitask.flow",
        "multitask.passes",
        "multitask.joint",
        "output_error",
        "sources",
        "changes",
        "retuning",
        "closing",
        "roster",
        "live",
    ),
    ("travel", "surgery", "hooking"),
    ("train", "runs.switches", "runs.until", "comparison", "__init__"),
    (
        "runs.hardware",
        "runs.made_with",
        "runs.learned",
        "runs.controls",
        "runs.durable",
        "runs.json_rows",
        "runs.lock",
        "runs.store",
        "runs.frames",
        "runs.arms",
        "runs.idle",
        "runs.warned",
        "runs.checkpoint",
        "runs.counterfactual",
        "runs.run_log",
        "runs.study",
    ),
    (
        "report",
        "config.make",
        "config.faults",
        "config.settings",
        "config.optimizers",
        "config.schedules",
        "config.parts",
        "config.culprits",
        "config.ever",
        "config.typed",
        "config.probe",
        "config.rehearsal",
        "config.pairs",
        "config.build",
    ),
    (
        "config.options",
        "config.dotted",
        "config.blame",
        "config.overrides",
        "config.compose",
        "config.jobs",
        "config.command",
    ),
    ("reproduce",),
    ("run",),
)
"""Lowest first; a folder is one unit, but for those of OPEN, whose modules stand here one by one.
On its own floor a unit may import what stands left of it.
"""

OPEN = ("config", "runs", "multitask")

STRANGERS = FLOORS[1]
"""They know nothing of one another."""

ALONE = ("train",)
"""They import nothing of the house: the loop knows nothing of surgery."""

DOORS = {
    "hydra": (
        "run",
        "config.command",
        "config.options",
        "config.dotted",
        "config.blame",
        "config.overrides",
        "config.compose",
    ),
    "omegaconf": (
        "run",
        "config.options",
        "config.dotted",
        "config.blame",
        "config.compose",
        "runs.store",
    ),
    "wandb": ("loggers.wandb",),
    "rich": ("loggers.console", "report"),
    "polars": ("runs.frames", "report"),
    "matplotlib": ("report", "reproduce"),
    "plotly": ("report",),
    "sklearn": ("tasks",),
    "scipy": ("stats", "tasks"),
}
"""Who may import a library: a unit or one module."""

CLOSED = {"torch": ("report", "tables", "stats", "ledger", "catalogue")}
"""Who may not: what only reads or prints numbers works without it."""

UNITS = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}


def _imports(source: str) -> Iterator[str]:
    """The dotted names of all that is imported anywhere in a module, lazily or for types."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module="gradsurg", names=aliases):
                for alias in aliases:
                    yield f"gradsurg.{alias.name if alias.name in UNITS else '__init__'}"
            case ast.ImportFrom(
                module="gradsurg.config" | "gradsurg.training" | "gradsurg.multitask" as folder,
                names=aliases,
            ):
                yield from (f"{folder}.{alias.name}" for alias in aliases)
            case ast.ImportFrom(module=None) | ast.ImportFrom(level=1 | 2 | 3):
                yield "a relative import"
            case ast.ImportFrom(module=str(module)):
                yield module
            case _:
                pass


def _unit(parts: list[str]) -> str:
    """What a module belongs to, by the parts of its name below gradsurg."""
    own = parts[:2] if parts and parts[0] in OPEN else parts[:1]
    return ".".join(own) or "__init__"


def _place(unit: str) -> tuple[int, int]:
    floors = (number for number, floor in enumerate(FLOORS) if unit in floor)
    number = next(floors, None)
    assert number is not None, f"'{unit}' has no floor: give it one in {__file__}"
    return number, FLOORS[number].index(unit)


def faults(module: str, source: str) -> list[str]:
    """What a module, as `loggers.wandb`, imports that it may not."""
    unit = _unit(module.split("."))
    said = []
    for name in _imports(source):
        library, *inside = name.split(".")
        if library == "a relative import":
            said.append(f"{module} uses {name}")
        elif library != "gradsurg":
            doors = DOORS.get(library)
            if doors is not None and not {unit, module} & set(doors):
                said.append(f"{module} imports {library}, whose door is {' or '.join(doors)}")
            if unit in CLOSED.get(library, ()):
                said.append(f"{module} imports {library}")
        else:
            target = _unit(inside)
            apart = unit in STRANGERS and target in STRANGERS
            if target != unit and (unit in ALONE or apart or _place(target) > _place(unit)):
                said.append(f"{module} imports {name}, which is not below it")
    return said


def _modules() -> list[tuple[str, Path]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [(".".join(path.relative_to(PACKAGE).with_suffix("").parts), path) for path in paths]
    empty = {f"{folder}.__init__" for folder in OPEN}
    return [(name, path) for name, path in names if name not in empty]


@pytest.mark.parametrize(("module", "path"), _modules(), ids=[name for name, _ in _modules()])
def test_a_module_imports_only_what_is_below_it(module: str, path: Path) -> None:
    _place(_unit(module.split(".")))
    assert faults(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("per", "from gradsurg.transforms.base import State", "not below it"),
        ("per", "from gradsurg import surgery", "not below it"),
        ("per", "import gradsurg.surgery.surgery", "not below it"),
        ("fields", "from gradsurg.plugins.per import norm", "not below it"),
        ("triggers", "from gradsurg.transforms.base import State", "not below it"),
        ("transforms.clip", "from gradsurg.stats import verdict", "not below it"),
        (
            "sites.nodes",
            "def f():\n    from gradsurg.effects.effects import Effects",
            "not below it",
        ),
        ("effects", "from gradsurg.surgery.surgery import Live", "not below it"),
        ("train", "from gradsurg.plugins.fields import validated", "not below it"),
        ("runs.store", "from gradsurg.config.build import build", "not below it"),
        ("runs.study", "from gradsurg import Clip", ""),
        ("surgery", "from gradsurg import Clip", "not below it"),
        ("sites.nodes", "from .base import Selector", "relative import"),
        ("config.build", "from omegaconf import DictConfig", "whose door is run or config.options"),
        ("config.build", "import wandb", "whose door is loggers.wandb"),
        ("loggers.console", "import wandb.sdk", "whose door is loggers.wandb"),
        ("loggers.wandb", "import wandb", ""),
        ("runs.study", "if True:\n    import polars as pl", "whose door is runs.frames or report"),
        ("report.figures", "import matplotlib.pyplot as plt", ""),
        ("report.figures", "from torch import Tensor", "imports torch"),
        ("models.mlp", "import sklearn", "whose door is tasks"),
        ("effects", "import scipy", "whose door is stats or tasks"),
        ("sites.nodes", "from gradsurg.sites.base import Selector", ""),
        ("surgery", "from gradsurg.hooks.transform_hook import TransformHook", ""),
    ],
)
def test_the_rules_find_what_they_are_for(module: str, source: str, message: str) -> None:
    found = " ".join(faults(module, source))
    assert message in found
    assert bool(message) == bool(found)


def test_every_unit_has_one_floor() -> None:
    listed = [unit for floor in FLOORS for unit in floor]
    assert len(listed) == len(set(listed))
    assert {_unit(module.split(".")) for module, _ in _modules()} <= set(listed)
