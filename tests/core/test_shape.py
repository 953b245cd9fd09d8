"""The shape of the core: who knows whom, and what there is but once."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gradsurg as gs
from tests.nets import small

PACKAGE = Path(gs.__file__).parent
ROOMS = ("core", "sites", "effects")
KINDS = sorted(
    path.stem
    for path in (PACKAGE / "sites").glob("*.py")
    if 'Kind("' in path.read_text(encoding="utf-8")
)


def nodes(room: str) -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path, node


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for room in ROOMS:
        for path, node in nodes(room):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.name)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


@pytest.mark.parametrize(
    ("room", "functions"), [("sites", []), ("core", ["operation.py: _evaluate"]), ("effects", [])]
)
def test_the_answer_of_a_trigger_alone_is_true_false_or_unknown(
    room: str, functions: list[str]
) -> None:
    found = [
        f"{path.name}: {node.name}"
        for path, node in nodes(room)
        if isinstance(node, ast.FunctionDef) and node.returns is not None
        if re.search(r"bool \| None|Optional\[bool\]|Decision", ast.unparse(node.returns))
    ]
    assert found == functions


KNOWN = ("sites", "plugins", "torch_internals", "transforms", "core.pitfalls")
"""The modules that a kind of site may import. Of the core these are its errors, each with its
reason.
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_site_knows_no_intervention(kind: str) -> None:
    path = PACKAGE / "sites" / f"{kind}.py"
    tree = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    imported = [node.module or "" for node in tree if isinstance(node, ast.ImportFrom)]
    imported += [each.name for node in tree if isinstance(node, ast.Import) for each in node.names]
    own = [name.removeprefix("gradsurg.") for name in imported if name.startswith("gradsurg")]
    assert "sites.places" in own
    assert [name for name in own if not name.startswith(KNOWN)] == []


def test_there_are_kinds() -> None:
    assert {"parameters", "outputs", "nodes", "saved_tensors"} <= {*KINDS}


def test_interventions_at_one_place_share_a_hook() -> None:
    model = small()
    items = [gs.Intervention(gs.Scale(2.0), gs.Parameters(stage="backward")) for _ in range(3)]
    with gs.Surgery(*items).start(model):
        assert len(model.first.weight._backward_hooks or {}) == 1
        model(torch.ones(2, 6)).sum().backward()
        assert model.last.bias.grad is not None
        assert model.last.bias.grad.tolist() == [16.0, 16.0, 16.0]
