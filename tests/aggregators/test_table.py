"""The documented table of properties is what the checks find."""

import pytest

from gradsurg.catalogue import find, names
from gradsurg.testing import Verdict
from tests.aggregators.table import cell, head, paper, row, written


@pytest.mark.parametrize("name", names("aggregators"))
def test_the_documented_row_is_what_the_checks_find(name: str) -> None:
    assert row(name) in written(), "python -m tests.aggregators.table writes the table anew"


def test_the_table_has_a_row_for_each_aggregator_and_no_other() -> None:
    first, *rows = written()
    assert first == head()
    classes = [find("aggregators", name).__name__ for name in names("aggregators")]
    assert [line.split("|")[1].strip(" `") for line in rows] == classes


def test_a_cell_tells_what_is_promised_from_what_only_held() -> None:
    assert cell(Verdict("a", True, True)) == "yes"
    assert cell(Verdict("a", False, True)) == "(yes)"
    assert cell(Verdict("a", False, False)) == ""


@pytest.mark.parametrize(
    ("text", "cited"),
    [
        ("By Lin et al., TMLR 2022 (arXiv\n    2111.10603), equation 2.", "2111.10603"),
        ("Kendall, Gal and Cipolla, CVPR 2018 (arXiv 1705.07115), equation 7.", "1705.07115"),
        ("Equation 4 of Ban and Ji, ICML 2024 (arXiv 2402.15638).", "2402.15638"),
    ],
)
def test_a_paper_is_found_in_a_docstring(text: str, cited: str) -> None:
    own = type("Own", (), {"__doc__": text})
    assert paper(own).endswith(f"(https://arxiv.org/abs/{cited})")


def test_a_paper_without_a_number_is_cited_as_it_is() -> None:
    own = type("Own", (), {"__doc__": "As Robbins and Monro 1951 have it."})
    assert paper(own) == "Robbins and Monro 1951"
    assert paper(type("Own", (), {"__doc__": "The sum of 12 and 30."})) == ""
