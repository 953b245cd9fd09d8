"""One comparison in the terminal, in Markdown and in LaTeX; formats of numbers."""

from pathlib import Path

import pytest

from gradsurg.report import wording
from gradsurg.report.compare import compare
from gradsurg.report.measures import link_shares
from gradsurg.report.study import read_study
from gradsurg.report.tables import (
    SHORT,
    SPARED,
    Table,
    alone_table,
    cost_table,
    fitted,
    latex,
    markdown,
    outcome_table,
    shares_text,
    uncompared,
)
from gradsurg.report.wording import (
    amount,
    amounts,
    better,
    digits,
    duration,
    filled,
    listed,
    p_text,
    size,
    sizes,
    title,
    titles,
    value,
)
from tests.report import studies
from tests.report.test_verdict import CLIP, frame, row


def cells(table: Table, arm: str = "clip") -> dict[str, str]:
    """The cells of the first row of an arm, by their heads."""
    heads, rows = table
    return next(dict(zip(heads, one, strict=True)) for one in rows if one[0] == arm)


def test_a_row_has_values_difference_interval_tests_wins_and_details() -> None:
    details = {"t_low": -0.0078, "t_high": -0.0022, "effect_size": -1.234, "q": 0.04}
    rows = frame(row(CLIP, **details), row([1] * 8, "noise", q=0.9)).to_dicts()
    found = cells(outcome_table(rows))
    assert found == {
        "arm": "clip",
        "metric": "test accuracy",
        "difference": "-0.50 pp",
        "95 % interval": "-0.75 to -0.20 pp",
        "p": "0.0234",
        "q": "0.04",
        "verdict": "lower",
        "higher": "1/8",
        "treated": "89.50%",
        "control": "90.00%",
        "n": "8 of 8",
        "median": "-0.64 pp",
        "t interval": "-0.78 to -0.22 pp",
        "effect size": "-1.2",
    }
    assert list(found)[:2] == ["arm", "metric"]


def test_a_column_that_is_empty_is_left_out_and_ranges_are_called_so() -> None:
    few = row([-1, -2], p_diverged=1.0, ended=3, diverged=1, not_compared="1 diverged")
    found = cells(outcome_table(frame(few).to_dicts()))
    assert found["range"] == "-2.00 to -1.00 pp"
    assert found["verdict"] == "too few"
    assert found["diverged"] == "1 and 0 of 3"
    assert found["not compared"] == "1 diverged"
    assert not {"p", "q", "link", "block", "margin", "95 % interval", "effect size"} & {*found}
    both = outcome_table(frame(few, row(CLIP, "other")).to_dicts())
    assert cells(both)["95 % interval"] == "-2.00 to -1.00 pp (range)"
    assert cells(both)["p"] == ""
    assert cells(outcome_table(frame(row([1], unit="split")).to_dicts()))["n"] == "1"


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_narrow_terminal_lacks_columns_in_a_fixed_order(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wording, "TEXT_WIDTH", width)
    name = "a name that is much longer than the column of names may be in any terminal"
    rows = frame(row(CLIP, name, q=0.03, not_compared="2 running"), row(CLIP, q=0.03)).to_dicts()
    text = fitted(outcome_table(rows, columns=SHORT))
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    gone = [more for more in SPARED if not all(head in lines[0] for head in more)]
    assert gone == list(SPARED[: len(gone)])
    assert (len(gone) == 0) == (width == 200)
    assert "-0.50 pp" in text
    assert "-0.75 to -0.20 pp" in text
    assert all(word in text for word in name.split())


def test_names_from_files_cannot_write_to_the_terminal() -> None:
    assert "\x1b" not in fitted((["arm", "n"], [["a\x1b[31m", "1"]]))


def test_arms_without_a_difference_have_their_means_and_ends(tmp_path: Path) -> None:
    for seed in range(2):
        studies.whole(tmp_path, "clip", seed, 0.8 + seed / 10)
    study = read_study(tmp_path)
    (arm,) = uncompared(study, compare(study))
    heads, rows = alone_table(study, [arm])
    assert heads == ["arm", "metric", "n", "mean", "least", "greatest"]
    assert rows[0] == ["clip", "test accuracy", "2", "85.00%", "80.00%", "90.00%"]
    assert len(alone_table(study, [arm], most=1)[1]) == 1
    mixed = read_study(studies.mixed(tmp_path / "mixed"))
    assert uncompared(mixed, compare(mixed)) == []  # noise has no finished run


def test_each_links_share_is_the_chain_minus_the_chain_without_it(tmp_path: Path) -> None:
    (text,) = shares_text(link_shares(read_study(studies.chain(tmp_path))))
    assert text.startswith("clip+noise. Each link's share in test accuracy, the chain minus the ")
    clip, noise = text.splitlines()[-2:]
    assert clip.split()[:3] == ["clip", "+0.00", "pp"]
    assert clip.endswith("1 shorter chain diverged  1 of 2")
    assert "-12.00 pp  -14.00 to -10.00 pp" in noise
    assert shares_text(link_shares(read_study(studies.mixed(tmp_path / "mixed")))) == []


def test_markdown_has_a_row_for_each_arm_and_metric_and_no_markup_of_names(tmp_path: Path) -> None:
    study = read_study(studies.chain(tmp_path / "first"))
    text = markdown(study, compare(study), ["<b>said</b>", "see https://x.y [z](q)"])
    lines = text.splitlines()
    assert lines[0] == "# first"
    assert lines[2] == r"\<b\>said\</b\>"
    assert lines[4] == r"see https:\//x.y \[z\](q)"
    rows = [line for line in lines if line.startswith("| ")]
    assert rows[1].startswith("| :-- | --: |")
    (one,) = [line for line in rows if line.startswith("| clip+noise | test accuracy | -")]
    assert "| -15.00 pp | -20.00 to -10.00 pp | too few | 0/2 | 75.00% | 90.00% | 2 of 2 |" in one
    assert "| clip+noise | noise | test accuracy | -12.00 pp |" in text
    assert "Each link's share, the chain minus the chain without it." in lines
    alone = read_study(_alone(tmp_path / "alone"))
    assert "| clip | test accuracy | 1 | 80.00% |" in markdown(alone, compare(alone), [])


def _alone(folder: Path) -> Path:
    studies.whole(folder, "clip", 0, 0.8)
    return folder


def test_latex_has_the_same_rows_with_numbers_in_math_mode(tmp_path: Path) -> None:
    study = read_study(studies.paired(tmp_path / "a_b", "clip", [x / 100 for x in CLIP]))
    made = compare(study)
    text = latex(study, made)
    row_of = (
        r"clip & 8 of 8 & $49.50\%$ ($49.22\%$ to $49.78\%$) & $50.00\%$ ($50.00\%$ to "
        r"$50.00\%$) & $-0.50\mbox{ pp}$ & "
        r"$-0.75\mbox{ to }-0.20\mbox{ pp}$ & $0.0234$ \\"
    )
    assert row_of in text.splitlines()
    assert r"& $49.50\%$ $\pm$ $0.33\%$ & $50.00\%$ $\pm$ $0.00\%$ &" in latex(
        study, made, spread="sd"
    )
    assert r"\begin{tabular}{lrrrrrr}" in text
    assert r"\caption{a\_b. test accuracy: means of both arms" in text
    assert r"\label{tab:a-b}" in text
    assert r"\label{tab:a-b-train-loss}" in latex(study, made, "train/loss")
    lines = text.splitlines()
    assert [lines.index(rf"\{rule}rule") for rule in ("top", "mid", "bottom")] == [6, 8, 10]
    tiny = frame(row([0.0001] * 8, metric="area/train/loss"))
    assert r"$+1 \cdot 10^{-6}$" in latex(study, tiny, "area/train/loss")


def test_numbers_names_and_lists_have_one_format() -> None:
    assert amount("test/accuracy", -0.0062) == "-0.62 pp"
    assert amount("test/loss", 0.02531) == "+0.0253"
    assert amounts("test/accuracy", -0.0089, 0.0044) == "-0.89 to +0.44 pp"
    assert (amount("x", None), amounts("x", None, 1.0)) == ("-", "")
    assert (size("test/accuracy", -0.0062), size("x", -0.0253)) == ("0.62 pp", "0.0253")
    assert sizes("test/accuracy", -0.0078, -0.0011) == "0.11 to 0.78 pp"
    assert (value("test/accuracy", 0.96311), value("x", 0.138249)) == ("96.31%", "0.1382")
    assert [p_text(p) for p in (0.03906, 0.00001, None)] == ["0.0391", "< 0.0001", ""]
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(["a, lr=1", "b"]) == "a, lr=1 and b"
    assert listed(["a, lr=1", "b", "c"]) == "a, lr=1; b and c"
    assert listed(list("abcdefg"), 3) == "a, b and 5 more"
    times = [duration(s) for s in (3.21, 45.2, 250, 7500)]
    assert times == ["3.2 s", "45 s", "4 min 10 s", "2 h 5 min"]
    assert title("area/test/loss_first") == "test loss first AUC"
    directions = [better(k) for k in ("test/loss_first", "test/accuracy", "test/f1")]
    assert directions == ["lower", "higher", ""]


def test_every_metric_of_a_task_has_a_title_and_the_usual_ones_come_first() -> None:
    summary = {"test/r2": 0.5, "test/loss": 1.0, "train/loss": 0.9, "state": "finished"}
    summary |= {"examined/rank/output": 0.1, "time/step_ms": 0.2}
    assert list(titles(summary).items()) == [
        ("train/loss", "train loss"),
        ("test/loss", "test loss"),
        ("test/r2", "test r2"),
        ("examined/rank/output", "examined rank output"),
    ]


def test_a_number_stays_with_its_unit_in_a_folded_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the interval is 95 % and 0.11 to 0.78 pp of all n = 8 seeds in long-run-seed0-1234"
    for width in range(12, 60):
        monkeypatch.setattr(wording, "TEXT_WIDTH", width)
        folded = filled(text, "  ")
        assert " ".join(folded.split()) == text
        assert all(part in folded for part in ("95 %", "0.78 pp", "n = 8", "long-run-seed0-1234"))


def test_a_step_time_is_a_change_in_per_cent_beside_times_with_the_same_decimals() -> None:
    cost = {"arm": "clip", "ratio": 1.179, "low": 0.95, "high": 1.25, "pairs": 8}
    cost |= {"treated_ms": 7.701, "control_ms": 7.017, "measured_ms": 7.701}
    assert cells(cost_table([cost])) == {
        "arm": "clip",
        "step time": "+18 %",
        "range": "-5 to +25 %",
        "with it, ms": "7.7",
        "control, ms": "7.0",
        "pairs": "8",
    }
    alone = cells(cost_table([{**cost, "pairs": 1, "control_ms": 0.2334, "measured_ms": 9.0}]))
    assert (alone["range"], alone["with it, ms"], alone["control, ms"]) == ("", "7.70", "0.23")
    assert alone["measured step, ms"] == "9.00"


def test_significant_digits_are_kept_where_they_are_0() -> None:
    numbers = (0.1, 0.05, 96.25, 12345.678, 0.0, 1e-5, 1e7)
    texts = ["0.1000", "0.05000", "96.25", "12346", "0", "1e-05", "1e+07"]
    assert [*map(digits, numbers)] == texts
