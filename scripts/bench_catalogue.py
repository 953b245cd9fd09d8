"""The catalogue: what each transform was compared with, its largest deviation, and its cost.

The comparisons are the tests of FILES, which are run. A deviation is the largest
|result - expected| over the largest |expected| of a comparison by `assert_close`; `-` where results
are compared bit by bit or in another way.
"""

import ast
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsurg.effects.tables import aligned
from gradsurg.experiment import catalogue
from gradsurg.testing.transforms import context_with
from gradsurg.transforms.base import Transform
from tests.transforms.cases import build

TESTS = Path(__file__).parents[1] / "tests"
FILES = tuple(
    TESTS / name
    for name in (
        "transforms/test_libraries.py",
        "transforms/test_oracles.py",
        "per_example/test_opacus.py",
        "per_example/test_subspaces.py",
        "sites/test_skipped_steps.py",
    )
)
BY_HAND = "rows by hand (cases.py)"


class Deviations:
    """A pytest plug-in that records the largest deviation in `assert_close`, by test function."""

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}
        self.passed: set[str] = set()
        self.test = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.test = item.name.partition("[")[0]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid.partition("::")[2].partition("[")[0])

    def record(self, actual: Any, expected: Any) -> None:  # Any: tensors, or nested
        if isinstance(actual, list | tuple):
            for one, other in zip(actual, expected, strict=True):
                self.record(one, other)
        elif isinstance(actual, Tensor) and isinstance(expected, Tensor) and actual.numel():
            gap = (actual.detach().double() - expected.detach().double()).abs()
            gap, size = gap.nan_to_num(0.0).max(), expected.double().abs().nan_to_num(0.0).max()
            value = float(gap / size) if size > 0 else float(gap)
            self.largest[self.test] = max(value, self.largest.get(self.test, 0.0))


def compared() -> Deviations:
    """Run the comparisons."""
    plugin, close = Deviations(), torch.testing.assert_close

    def watched(actual: Any, expected: Any, **options: Any) -> None:
        plugin.record(actual, expected)
        close(actual, expected, **options)

    torch.testing.assert_close = watched
    try:
        pytest.main(
            ["-q", "-p", "no:benchmark", "--no-header", "--assert=plain", *map(str, FILES)],
            [plugin],
        )
    finally:
        torch.testing.assert_close = close
    return plugin


def oracles() -> dict[str, dict[str, str]]:
    """Return the test functions that name each class, with the library or the file of each."""
    tests: dict[str, dict[str, str]] = defaultdict(dict)
    for file in FILES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                library = ""
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("skip"):
                        library = str(ast.literal_eval(call.args[0])).partition(".")[0]
                names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                names |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
                for name in names:
                    tests[name][node.name] = library or file.name
    return tests


def cost(transform: Transform, rounds: int) -> tuple[float, float]:
    """Return CPU time for 1e6 entries in us, and over that of `torch.clamp` in the same rounds."""
    grad, value = torch.randn(1000, 1000), torch.randn(1000, 1000)
    context, state = context_with(value), transform.init(grad)
    times, ratios = [], []
    for _ in range(rounds + 1):
        start = process_time()
        _, state = transform.update(grad, state, context)
        middle = process_time()
        for _ in range(5):
            torch.clamp(grad, -0.5, 0.5)
        times.append(middle - start)
        ratios.append((middle - start) / ((process_time() - middle) / 5))
    return 1e6 * median(times[1:]), median(ratios[1:])


def table(rounds: int, only: list[str]) -> str:
    """Return one line for each transform; its cost is the median over the rounds."""
    torch.set_num_threads(1)
    tests, plugin = oracles(), compared()
    cells = [["config", "compared with", "largest deviation", "us", "over clamp"]]
    alone = []
    for entry in catalogue.list("transform"):
        if not entry.target or not any(part in entry.name for part in only):
            continue
        mine = tests.get(entry.target.rpartition(".")[2], {})
        mine = {name: library for name, library in mine.items() if name in plugin.passed}
        sources = sorted(set(mine.values()))
        libraries = [source for source in sources if not source.endswith(".py")]
        if not libraries:
            alone.append(entry.name)
        second = f"a second version in {', '.join(sources)}" if mine else BY_HAND
        largest = max(
            (plugin.largest[name] for name in mine if name in plugin.largest), default=None
        )
        with torch.no_grad():
            time, ratio = cost(build(entry.name), rounds)
        deviation = "-" if largest is None else f"{largest:.1e}"
        cells.append(
            [entry.name, ", ".join(libraries) or second, deviation, f"{time:.0f}", f"{ratio:.1f}"]
        )
    return f"{aligned(cells, left=2)}\n\nWithout an outside oracle: {', '.join(alone)}"
