"""Figures about the size and the wording of the code: python -m tests.house [FOLDER]"""

import ast
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = Path(__file__).parents[1] / "gradsurg"
PLUGINS = ("transforms", "triggers", "aggregators", "models", "tasks", "sites", "loggers", "sinks")

Calls = set[tuple[str, str]]

NEW = 300
"""Lines that new plug-ins, and their tests, may add before a limit must be raised."""

ROOMS = {
    "core": (("core", "effects", "torch_internals"), 8000),
    "sites": (("sites",), 6299 + NEW),
    "transforms": (("transforms",), 4636 + NEW),
    "aggregators": (("aggregators",), 3959 + NEW),
    "triggers models tasks loggers": (("triggers", "models", "tasks", "loggers"), 4527 + NEW),
    "multitask per_example": (("multitask", "per_example"), 4251),
    "experiment": (("experiment", "run.py", "__main__.py", "packaging.py"), 8075),
    "report": (("report",), 5704),
    "stats": (("stats.py",), 603),
    "reproduce": (("reproduce",), 1945),
    "script": (("script",), 2352),
}
"""Room: its folders and files in `gradsurg/`, and the lines that it may have.

A change that adds to what users can do raises the limit of its room by its own lines; any other
change keeps within it. A room that is rebuilt beside the old one gets a row of its own until the
old one is deleted."""

REST, TESTS = 2762, 54_750 + NEW
"""The lines that other files of `gradsurg/` and those of `tests/` without its oracle may have."""


def trees(package: Path = PACKAGE) -> dict[str, ast.Module]:
    """The syntax tree of each module, by its dotted name below the package."""
    paths = sorted(package.rglob("*.py"))
    return {
        ".".join(path.relative_to(package).with_suffix("").parts): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in paths
    }


def lines_below(*places: Path) -> int:
    """The lines of the Python files and page files in files and folders, outside of `conf/`."""
    kinds = (".py", ".js", ".css", ".html", ".j2", ".jinja")
    files = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place])]
    left_out = {"conf", "__pycache__"}  # the latter may hold scripts of pages that were made
    counted = [file for file in files if file.suffix in kinds and left_out.isdisjoint(file.parts)]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in counted)


def budget() -> Iterator[tuple[str, int, int]]:
    """Each row of the budget: its name, its lines, and the lines that it may have."""
    rooms = 0
    for room, (places, most) in ROOMS.items():
        lines = lines_below(*(PACKAGE / place for place in places if (PACKAGE / place).exists()))
        rooms += lines
        yield room, lines, most
    everything = lines_below(PACKAGE)
    yield "the rest", everything - rooms, REST
    yield "all of gradsurg/", everything, REST + sum(most for _, most in ROOMS.values())
    tests = PACKAGE.parent / "tests"
    yield "tests/", lines_below(tests) - lines_below(tests / "oracle"), TESTS


def is_plugin(name: str, tree: ast.Module) -> bool:
    """Whether a module is one plug-in: it defines a class spelled like its file."""
    folder, _, stem = name.rpartition(".")
    spelling = stem.replace("_", "")
    classes = (node.name.lower() for node in tree.body if isinstance(node, ast.ClassDef))
    return folder in PLUGINS and not stem.startswith("_") and spelling in classes


def importers(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """For each module the modules that import it, also those inside functions."""
    importing: dict[str, set[str]] = defaultdict(set)
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                dotted = [f"{node.module}.{alias.name}" for alias in node.names]
                for full in dotted:
                    inside = full.removeprefix("gradsurg.")
                    module = node.module.removeprefix("gradsurg.")
                    importing[inside if inside in modules else module].add(name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importing[alias.name.removeprefix("gradsurg.")].add(name)
    return importing


def docstrings(modules: dict[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Each docstring with the place it is at."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{name}:{getattr(node, 'lineno', 1)}", text


def what_share(modules: dict[str, ast.Module]) -> float:
    """The share of docstrings with a clause built around 'what'."""
    texts = [text for _, text in docstrings(modules)]
    return sum(bool(re.search(r"\b[Ww]hat\b", text)) for text in texts) / max(len(texts), 1)


def broad_excepts(modules: dict[str, ast.Module]) -> int:
    """Handlers that catch every exception, also behind an alias."""
    nodes = [node for tree in modules.values() for node in ast.walk(tree)]
    handlers = [node for node in nodes if isinstance(node, ast.ExceptHandler)]
    broad = ("Exception", "BaseException", "ERRORS")
    return sum(node.type is None or ast.unparse(node.type) in broad for node in handlers)


def functions_called(call: Callable[[], object]) -> Calls:
    """The functions of gradsurg that a call runs, as (file, name)."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    paths = [(Path(code.co_filename), code.co_qualname) for code in codes]
    return {
        (str(path.relative_to(PACKAGE)), name)
        for path, name in paths
        if PACKAGE in path.parents and not name.rpartition(".")[2].startswith("<")
    }


def life_of_a_clip() -> dict[str, Calls]:
    """The functions that attaching one `Clip`, its first step and a later step run."""
    import torch
    from torch import nn

    import gradsurg as gs

    def once() -> dict[str, Calls]:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        surgery = gs.Surgery(gs.Intervention(gs.Clip(0.01)))

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

        lives: list[gs.Live] = []
        attach = functions_called(lambda: lives.append(surgery.attach(model, optimizer)))
        calls = {"attach": attach}
        calls["first step"] = functions_called(step)
        step()
        calls["later step"] = functions_called(step)
        lives[0].close()
        return calls

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        once()  # imports are not counted
        return once()


def figures(package: Path = PACKAGE) -> dict[str, object]:
    """All static figures of a package folder."""
    modules = trees(package)
    outside = {
        name: tree
        for name, tree in modules.items()
        if not is_plugin(name, tree) and not name.endswith("__init__")
    }
    by_module = importers(modules)
    single = [name for name in outside if len(by_module.get(name, ())) == 1]
    lines = sum(
        len(path.read_text(encoding="utf-8").splitlines()) for path in package.rglob("*.py")
    )
    return {
        "files": len(modules),
        "lines": lines,
        "root modules": sum("." not in name and name != "__init__" for name in modules),
        "files outside the plug-ins": len(outside),
        "modules with a single importer": len(single),
        "docstrings with a 'what'": f"{what_share(modules):.1%}",
        "broad excepts": broad_excepts(modules),
    }


if __name__ == "__main__":
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE
    for name, number in figures(package).items():
        print(f"{name}: {number}")
    if package == PACKAGE:
        for name, count, most in budget():
            print(f"{name}: {count} lines of at most {most}")
        for name, calls in life_of_a_clip().items():
            print(f"{name}: {len(calls)} functions in {len({file for file, _ in calls})} files")
