"""The examples in docstrings run, and the classes that people use most have one."""

import doctest
import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import gradsurg as gs

PACKAGE = Path(gs.__file__).parent
PITFALLS = PACKAGE / "core" / "pitfalls"
"""Its examples need process groups: `tests/core/test_pitfalls.py` runs them."""

MOST_USED = (
    *("AddNoise", "Centralize", "Chain", "Clamp", "Clip", "ClipGlobalNorm", "ClipNorm"),
    *("GradientReversal", "GrokfastEMA", "Identity", "LRP", "Mask", "Momentum", "NormRescale"),
    *("Orthogonalize", "PerSample", "Sanitize", "Scale", "ScaleBySign", "Sign", "Zero"),
)


def modules_with_examples() -> list[str]:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if PITFALLS not in path.parents]
    shown = [path for path in paths if ">>> " in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in shown]


@pytest.mark.parametrize("module", modules_with_examples())
def test_the_examples_of_a_module_print_what_they_show(module: str) -> None:
    names = {"torch": torch, "nn": nn, "gs": gs}
    runner, differences = doctest.DocTestRunner(), list[str]()
    for test in doctest.DocTestFinder().find(import_module(module), extraglobs=names):
        torch.manual_seed(0)
        runner.run(test, out=differences.append)
    assert not differences, "".join(differences)
    assert runner.tries > 0


@pytest.mark.parametrize("name", MOST_USED)
def test_a_class_that_many_use_has_an_example(name: str) -> None:
    assert "\n>>> " in (inspect.getdoc(getattr(gs, name)) or "")
