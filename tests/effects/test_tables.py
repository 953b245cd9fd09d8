"""Numbers as text."""

import pytest

from gradsurg.effects.tables import aligned, effect_table, number


def _row(**changes: object) -> dict[str, object]:
    row: dict[str, object] = {"transform": "clip", "site": "0.weight", "calls": 40, "sampled": 4}
    row |= {"norm_before": 1.25, "norm_after": 0.5, "cosine": 0.98765, "changed": 0.125}
    return row | {"flipped": 0.0, "zeroed": 0.0, "nonfinite": 0} | changes


def test_columns_in_which_nothing_happened_are_left_out() -> None:
    assert effect_table([_row(), _row(site="0.bias", changed=0.0)]) == (
        "site      norm before  norm after  cosine  changed  calls\n"
        "---------------------------------------------------------\n"
        "0.weight         1.25         0.5  0.9877    12.5%     40\n"
        "0.bias           1.25         0.5  0.9877     0.0%     40"
    )


def test_several_transforms_are_told_apart_and_kept_together() -> None:
    rows = [_row(), _row(transform="scale"), _row(site="1.weight")]
    lines = effect_table(rows).splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [
        ["clip", "0.weight"],
        ["clip", "1.weight"],
        ["scale", "0.weight"],
    ]


def test_what_a_table_leaves_out() -> None:
    assert "<0.1%" in effect_table([_row(changed=1e-5)])  # and not zero
    unchanged = effect_table([_row(changed=0.0, cosine=1.0)])
    assert "cosine" not in unchanged
    assert "changed" not in unchanged
    control = effect_table([{"site": "w", "norm_before": 2.0, "calls": 1, "norm_after": None}])
    assert control.splitlines()[0].split() == ["site", "norm", "before", "calls"]


def test_no_rows_are_a_sentence() -> None:
    assert effect_table([]) == "no gradient was measured"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.012345, "0.01235"),
        (1.5e-7, "1.5e-07"),
        (12.3, "12.3"),
        (123456.0, "1.235e+05"),
        (7, "7"),
        (None, "-"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ("text", "text"),
    ],
)
def test_a_number_has_four_digits(value: object, text: str) -> None:
    assert number(value) == text


def test_cells_stand_under_each_other_and_lines_end_with_ink() -> None:
    text = aligned([["a", "bb", "c"], ["longer", "1", ""], ["x", "100", "22"]], left=1)
    rule = "-" * 15
    assert text.splitlines() == ["a        bb   c", rule, "longer    1", "x       100  22"]
    assert aligned([["a", "b", "c"], ["1", "22", "333"]], left=2).splitlines()[0] == "a  b     c"


def test_a_table_is_text_in_a_notebook_too(monkeypatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert aligned([["site", "norm"], ["w", "1"]]) == "site  norm\n----------\nw        1"


def test_long_names_are_folded_where_the_table_would_be_too_wide() -> None:
    table = aligned([["site", "norm"], ["a" * 30, "1.25"]], width=20)
    assert max(map(len, table.splitlines())) <= 20
    assert "1.25" in table
    assert "".join(table.split()).count("a") == 30
