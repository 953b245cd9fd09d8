"""Imports point down the floors of the package, without a cycle; each library has one door."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gradsurg"

FLOORS = (
    ("torch_internals", "plugins", "stats", "experiments", "conf"),
    ("transforms", "triggers", "aggregators", "models", "tasks", "loggers", "effects"),
    ("core.pitfalls", "sites", "core", "testing"),
    ("multitask", "per_example", "integrations"),
    ("__init__", "packaging", "experiment"),
    ("report",),
    ("reproduce", "run", "script", "__main__", "comparison"),
)
"""Lowest first; each name is a folder or a root module. A unit may import units on lower floors and
units that stand left of it on its own floor. Inside a folder there must be no cycle. The pitfalls
are a unit of their own, since sites raise their errors."""

INDEPENDENT = ("transforms", "triggers", "aggregators", "models", "tasks", "loggers", "effects")
"""Units of one floor that may not import one another."""

LATE = {
    "core": ("multitask", "per_example"),
    "integrations": ("experiment",),
    "experiment": ("report",),
}
"""Units above that a unit imports inside functions, when a surgery or a command needs them."""

STANDALONE = ("experiment.loop",)
"""Modules that import nothing of gradsurg: the training loop knows nothing of surgery."""

DOORS = {
    "hydra": (
        "run",
        "experiment.compose",
        "experiment.hydra_errors",
        "experiment.making",
        "experiment.sweep",
    ),
    "omegaconf": (
        "run",
        "experiment.compose",
        "experiment.from_config",
        "experiment.grid",
        "experiment.hydra_errors",
        "experiment.overrides",
        "experiment.recipes",
        "experiment.sweep",
    ),
    "wandb": ("loggers.wandb",),
    "tensorboard": ("loggers.tensorboard",),
    "rich": ("effects.tables", "loggers.console", "report", "experiment"),
    "polars": ("experiment.frames", "effects.effects", "report", "comparison", "reproduce"),
    "altair": ("report", "reproduce"),
    "vl_convert": ("report",),
    "matplotlib": ("report",),
    "plotly": (),
    "sklearn": ("tasks",),
    "scipy": ("stats", "tasks"),
    "numba": ("effects.sums",),
    "filelock": ("experiment.files", "tasks"),
}
"""Library: the units or modules that may import it."""

WITHOUT_TORCH = (
    "report",
    "stats",
    "effects.numbers",
    "effects.tables",
    "effects.ledger",
    "plugins.registry",
    "experiment.catalogue",
    "experiment.own_code",
    "experiment.settings",
)
"""Units and modules that may not import torch: reading and printing numbers works without it."""


def _imports(source: str) -> Iterator[str]:
    """The dotted names of all imports in a module, also those inside functions."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(level=level) if level:
                yield "a relative import"
            case ast.ImportFrom(module=str(module), names=aliases):
                for alias in aliases:
                    full = f"{module}.{alias.name}"
                    yield full if module.startswith("gradsurg") and _exists(full) else module


def _without_types(source: str) -> str:
    """A module without its imports for types alone, which run never."""
    tree = ast.parse(source)
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return ast.unparse(tree)


def _exists(name: str) -> bool:
    path = PACKAGE.parent / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def _unit(module: str) -> str:
    if f"{module}.".startswith("core.pitfalls."):
        return "core.pitfalls"
    return module.partition(".")[0] or "__init__"


def _place(unit: str) -> tuple[int, int]:
    for number, floor in enumerate(FLOORS):
        if unit in floor:
            return number, floor.index(unit)
    raise AssertionError(f"'{unit}' has no floor: give it one in {__file__}")


def faults(module: str, source: str) -> list[str]:
    """The forbidden imports of a module, given as `loggers.wandb`."""
    unit, found = _unit(module), []
    for name in _imports(source):
        library, _, inside = name.partition(".")
        if library == "a relative import":
            found.append(f"{module} uses {name}")
        elif library != "gradsurg":
            doors = DOORS.get(library)
            if doors is not None and not {unit, module} & set(doors):
                found.append(f"{module} imports {library}, whose door is {' or '.join(doors)}")
            if library == "torch" and {unit, module} & set(WITHOUT_TORCH):
                found.append(f"{module} imports torch")
        else:
            target = _unit(inside)
            apart = unit in INDEPENDENT and target in INDEPENDENT
            if module in STANDALONE or (
                target != unit
                and target not in LATE.get(unit, ())
                and (apart or _place(target) > _place(unit))
            ):
                found.append(f"{module} imports {name}, which is not below it")
            if inside.rpartition(".")[2].startswith("_") and target != unit:
                found.append(f"{module} imports {name}, which is private to {target}")
    return found


def _modules() -> list[tuple[str, Path]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths]
    return list(zip(names, paths, strict=True))


@pytest.mark.parametrize(("module", "path"), _modules(), ids=[name for name, _ in _modules()])
def test_a_module_imports_only_what_is_below_it(module: str, path: Path) -> None:
    assert faults(module, path.read_text(encoding="utf-8")) == []


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of an import cycle, empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_one_another_in_a_circle_not_even_inside_functions() -> None:
    graph = {
        f"gradsurg.{name}": {
            one
            for one in _imports(_without_types(path.read_text(encoding="utf-8")))
            if one.startswith("gradsurg")
        }
        for name, path in _modules()
    }
    assert cycle(graph) == []


def test_a_cycle_is_found() -> None:
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("plugins.reductions", "from gradsurg.transforms.base import State", "not below it"),
        ("plugins.reductions", "from gradsurg import core", "not below it"),
        ("plugins.reductions", "import gradsurg.core", "not below it"),
        ("triggers", "from gradsurg.transforms.base import State", "not below it"),
        ("transforms.clip", "from gradsurg.stats import verdict", ""),
        ("sites.nodes", "def f():\n    from gradsurg.core.live import Live", "not below it"),
        ("effects.effects", "from gradsurg.core.live import Live", "not below it"),
        ("experiment.loop", "from gradsurg.plugins.fields import validated", "not below it"),
        ("experiment.run_directory", "from gradsurg.reproduce import judge", "not below it"),
        ("experiment.execution", "from gradsurg import Clip", ""),
        ("core.live", "from gradsurg import Clip", "not below it"),
        ("core.live", "from gradsurg.core.pitfalls.base import Pitfall", ""),
        ("sites.nodes", "from gradsurg.core.pitfalls import refusal", ""),
        ("core.pitfalls.fsdp", "from gradsurg.sites.places import Selector", "not below it"),
        ("core.pitfalls", "from gradsurg.core.live import Live", "not below it"),
        ("sites.nodes", "from .base import Selector", "relative import"),
        ("experiment.execution", "from gradsurg.models._transformer import A", "private to models"),
        ("models.mlp", "from gradsurg.models._transformer import A", ""),
        ("experiment.loop", "from omegaconf import DictConfig", "whose door is run or"),
        ("experiment.build", "import wandb", "whose door is loggers.wandb"),
        ("loggers.console", "import wandb.sdk", "whose door is loggers.wandb"),
        ("loggers.wandb", "import wandb", ""),
        (
            "experiment.build",
            "if True:\n    import polars as pl",
            "whose door is experiment.frames",
        ),
        ("report.figures", "import matplotlib.pyplot as plt", ""),
        ("report.figures", "from torch import Tensor", "imports torch"),
        ("models.mlp", "import sklearn", "whose door is tasks"),
        ("effects.sums", "import scipy", "whose door is stats or tasks"),
        ("core.live", "from gradsurg.multitask.losses import Losses", ""),
    ],
)
def test_the_rules_find_what_they_are_for(module: str, source: str, message: str) -> None:
    found = " ".join(faults(module, source))
    assert message in found
    assert bool(message) == bool(found)


def test_there_are_at_most_seven_floors_and_every_unit_has_one() -> None:
    listed = [unit for floor in FLOORS for unit in floor]
    assert len(FLOORS) <= 7
    assert len(listed) == len(set(listed))
    assert {_unit(name) for name, _ in _modules()} == set(listed)


PRIVATE = re.compile(
    r"torch\._[a-zA-Z]|\._(version|base|is_view|sequence_nr|input_metadata|modules|parameters)\b"
    r"|\._(buffers|compiled_call_impl|(full_)?(forward|backward)(_pre)?_hooks)\b"
    r"|_optimizer_step_(pre|post)_hooks|\._register_hook_dict|_raw_saved_"
)


def test_private_corners_of_torch_are_used_in_one_place() -> None:
    found = [
        f"{name}: {line.strip()}"
        for name, path in _modules()
        if _unit(name) != "torch_internals"
        for line in path.read_text(encoding="utf-8").splitlines()
        if PRIVATE.search(line)
    ]
    assert found == []
