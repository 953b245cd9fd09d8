"""The examples in experiments/hooks_tour say what stands beside them."""

import io
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

TOUR = Path(__file__).parents[1] / "experiments" / "hooks_tour"
EXAMPLES = sorted(TOUR.glob("*.py"))
BUILT = ("native_hooks",)  # by a compiler, in about 10 s

TOPICS = 10
"""The texts that users read have at least this many examples."""


def output_of(path: Path) -> str:
    """What an example prints."""
    said = io.StringIO()
    with torch.random.fork_rng(), redirect_stdout(said):
        runpy.run_path(str(path), run_name="__main__")
    return said.getvalue()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.full] * (path.stem in BUILT))
        for path in EXAMPLES
    ],
)
def test_an_example_prints_what_stands_beside_it(path: Path) -> None:
    expected = path.with_suffix(".txt").read_text(encoding="utf-8")
    printed = output_of(path)
    if printed.startswith("skipped: "):
        pytest.skip(printed)
    assert printed == expected, f"python {path} > {path.with_suffix('.txt').name} renews it"


def test_the_index_lists_every_example_and_nothing_else() -> None:
    assert len(EXAMPLES) >= TOPICS
    text = (TOUR / "README.md").read_text(encoding="utf-8")
    listed = {line.split("](")[1].split(")")[0] for line in text.splitlines() if "](" in line}
    assert {name for name in listed if name.endswith(".py")} == {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_is_short_and_begins_with_what_it_shows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith('"""')
    assert len(text.splitlines()) <= 90
