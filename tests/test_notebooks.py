"""The notebooks in docs/notebooks run, and their stored outputs have the numbers of this run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
MAX_BYTES = 60_000


def printed(notebook: Any) -> str:  # Any: nbformat's nodes, or dicts
    """Return the printed lines of all cells, without digits, which differ between machines."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    text = "".join("".join(output.get("text", "")) for output in outputs)
    return re.sub(r"[-+]?[\d.]+%?| +|-{3,}", "", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_has_its_outputs(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert outputs
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}  # no warnings


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # of the client's own event loop
def test_a_notebook_runs_and_prints_what_is_stored(path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("ipykernel", reason="the extra `notebooks` has ipykernel")
    client = pytest.importorskip("nbclient", reason="the extra `notebooks` has nbclient")
    nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` has nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    client.NotebookClient(fresh, timeout=120, kernel_name="python3").execute()
    assert printed(fresh) == printed(stored)
