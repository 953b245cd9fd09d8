"""Which tests name a class: `scripts/new.py --check` runs them."""

import ast
import re
from pathlib import Path


def functions_that_name(word: str, folder: Path) -> dict[str, Path]:
    """Return the test functions with a word in their code or parameters, each with its file."""
    return {
        node.name: path
        for path in sorted(folder.glob("test_*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if re.search(rf"\b{word}\b", ast.unparse(node))
    }
