"""Every numbered pitfall has a test."""

import ast
import re
from pathlib import Path


def test_each_of_the_forty_three_pitfalls_has_a_test_with_its_number() -> None:
    numbers = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                match = re.match(r"test_p(\d\d)_\w+", node.name)
                if match:
                    numbers.add(int(match.group(1)))
    assert numbers == set(range(1, 44))
