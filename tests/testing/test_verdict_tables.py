"""Tables of verdicts in the READMEs: cells, citations and rewriting."""

from pathlib import Path

import pytest

from gradsurg.testing import Verdict
from tests.verdict_tables import BEGIN, END, cell, line, paper, write, written


def test_a_cell_distinguishes_declared_properties_from_observed_ones() -> None:
    assert cell(Verdict("a", True, True)) == "yes"
    assert cell(Verdict("a", False, True)) == "(yes)"
    assert cell(Verdict("a", False, False)) == ""


@pytest.mark.parametrize(
    ("text", "cited"),
    [
        ("By Lin et al., TMLR 2022 (arXiv\n    2111.10603), equation 2.", "2111.10603"),
        ("A rule of Brock, De, Smith, Simonyan, ICML 2021 (arXiv 2102.06171).", "2102.06171"),
        ("Kendall, Gal and Cipolla, CVPR 2018 (arXiv 1705.07115), equation 7.", "1705.07115"),
        ("Some 2012; equation 4 of Ban and Ji, ICML 2024 (arXiv 2402.15638).", "2402.15638"),
    ],
)
def test_a_paper_is_found_in_a_docstring(text: str, cited: str) -> None:
    own = type("Own", (), {"__doc__": text})
    assert paper(own).endswith(f"(https://arxiv.org/abs/{cited})")


def test_a_paper_without_an_arxiv_number_is_cited_without_a_link() -> None:
    own = type("Own", (), {"__doc__": "As Robbins and Monro 1951 have it."})
    assert paper(own) == "Robbins and Monro 1951"
    assert paper(type("Own", (), {"__doc__": "The sum of 12 and 30."})) == ""


def test_a_table_replaces_the_old_one(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\n| old |\n{END}\nafter\n", encoding="utf-8")
    write(readme, line(["a", "b"]), [line(["1", ""])])
    assert written(readme) == ["| a | b |", "| 1 |  |"]
    assert (
        readme.read_text(encoding="utf-8")
        == f"before\n{BEGIN}\n| a | b |\n|---|---|\n| 1 |  |\n{END}\nafter\n"
    )
