"""Data frames of the rows of several runs."""

import polars as pl
import pytest

from gradsurg.effects.numbers import EXTREME_NAMES
from gradsurg.experiment.frames import effect_table, read_effects, read_metrics
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.run_reader import BrokenFile
from tests.runs import effect


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "study" / "clip-12345678")


def test_metrics_of_several_runs_form_one_table(tmp_path):
    first, second = RunDirectory(tmp_path / "a"), RunDirectory(tmp_path / "b")
    for step in range(1, 151):
        first.append("metrics.jsonl", [{"step": step, "train/loss": 1}])
    first.append("metrics.jsonl", [{"step": 151, "train/loss": 0.5, "test/accuracy": 0.9}])
    second.append("metrics.jsonl", [{"step": 1, "train/loss": float("nan")}])
    with (second.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step":2,"train/loss":0.4')  # a half-written line
    table = read_metrics([first.path, second.path])
    assert table["run"].unique(maintain_order=True).to_list() == [str(first.path), str(second.path)]
    assert table["train/loss"].to_list() == [1.0] * 150 + [0.5, None]
    assert table["test/accuracy"].drop_nulls().to_list() == [0.9]
    assert table["not_finite"].drop_nulls().to_list() == ["train/loss=nan"]


@pytest.mark.parametrize("content", [None, "", '{"st'])
def test_a_file_without_a_whole_line_has_no_rows(run, content):
    run.path.mkdir(parents=True)
    for name in ("metrics.jsonl", "effects.jsonl") if content is not None else ():
        (run.path / name).write_text(content, encoding="utf-8")
    assert read_metrics([run.path]).shape == (0, 2)
    assert read_effects([run.path]).schema["site"] == pl.String
    assert effect_table([run.path]) == effect_table([]) == []


@pytest.mark.parametrize("line", ['{"step":', '{"step":3,"train/loss":"x"}', '{"step":"three"}'])
def test_a_broken_line_is_an_error_that_names_the_file(tmp_path, run, line):
    RunDirectory(tmp_path / "whole").append("metrics.jsonl", [{"step": 1}])
    run.append("metrics.jsonl", [{"step": 1}])
    with (run.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(f'{line}\n{{"step":4}}\n')
    with pytest.raises(BrokenFile, match=r"metrics\.jsonl has a line that is not JSON") as caught:
        read_metrics([tmp_path / "whole", run.path])
    assert caught.value.file.parent == run.path


def test_a_run_directory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run directory .*nowhere"):
        read_metrics([tmp_path / "nowhere"])


def test_effect_table_equals_one_computed_by_hand(tmp_path):
    first, second = RunDirectory(tmp_path / "a"), RunDirectory(tmp_path / "b")
    first.append(
        "effects.jsonl",
        [
            effect(10, 30, 3, cosine=0.5, changed=1, norm_before=2.0),
            effect(20, 10, 1, cosine=0.9, changed=0, norm_before=4.0),
            {**effect(20, 10, 1, cosine=0.1), "site": "b"},
        ],
    )
    # a cosine that is not finite does not count, nor do the calls of its interval
    second.append(
        "effects.jsonl",
        [
            effect(10, 10, 1, cosine=float("nan"), changed=0.5, norm_before=1.0),
            effect(20, 10, 1, cosine=0.2, changed=0.5, norm_before=1.0),
            {**effect(30, 10, 0), "nonfinite": 4},
        ],
    )
    weight, bias = effect_table([first.path, second.path])
    assert weight == {
        "transform": "clip",
        "site": "w",
        "runs": 2,
        "seen": 140,
        "calls": 70,
        "sampled": 6,
        "nonfinite": 4,
        "cosine": pytest.approx(((30 * 0.5 + 10 * 0.9) / 40 + 0.2) / 2),
        "changed": pytest.approx((30 / 40 + 0.5) / 2),
        "norm_before": pytest.approx(((30 * 2 + 10 * 4) / 40 + 1) / 2),
    }
    assert (bias["site"], bias["runs"], bias["cosine"]) == ("b", 1, pytest.approx(0.1))
    assert bias["changed"] is None


def test_the_extremes_of_an_effect_table_are_those_over_all_runs(tmp_path):
    first, second = RunDirectory(tmp_path / "a"), RunDirectory(tmp_path / "b")

    def at(step, site, norm, norm_step, bad=None, rank=None):
        names = ("norm_max", "norm_max_step", "nonfinite_step", "nonfinite_rank")
        values = zip(names, (norm, norm_step, bad, rank), strict=True)
        return {**effect(step, 10, 1), "site": site, **dict(values)}

    first.append("effects.jsonl", [at(10, "v", 3.0, 4), at(10, "w", 1.0, 4, 8, 2)])
    first.append("effects.jsonl", [at(20, "v", 5.0, 12345), at(20, "w", None, None, 11, 1)])
    second.append("effects.jsonl", [at(10, "v", 4.0, 9, 8, 3), effect(10, 10, 1)])
    v, w = effect_table([first.path, second.path])
    assert [v[name] for name in EXTREME_NAMES] == [5.0, 12345, 8, 3]
    assert [w[name] for name in EXTREME_NAMES] == [1.0, 4, 8, 2]
    assert isinstance(v["norm_max_step"], int)
    schema = read_effects([second.path]).schema
    assert schema == read_effects([first.path]).schema
    assert schema["nonfinite_step"] == pl.Int64


def test_the_effects_of_an_earlier_version_have_no_extremes(run):
    run.append("effects.jsonl", [effect(1, 5, 5, cosine=0.5)])
    assert not {*EXTREME_NAMES} & effect_table([run.path])[0].keys()
    frame = read_effects([run.path])
    assert frame.select(EXTREME_NAMES).rows() == [(None,) * 4]


def test_effect_table_of_numbers_that_are_never_finite_is_null(run):
    run.append(
        "effects.jsonl", [effect(step, 5, 5, cosine=float("nan"), zeroed=0.5) for step in (1, 2)]
    )
    (row,) = effect_table([run.path])
    assert row["cosine"] is None
    assert row["zeroed"] == 0.5


def test_the_means_of_both_norms_are_over_the_same_intervals(run):
    run.append(
        "effects.jsonl",
        [
            effect(1, 5, 5, norm_before=float("nan"), norm_after=1.0, changed=1.0),
            effect(2, 5, 5, norm_before=4.0, norm_after=2.0, changed=0.0),
        ],
    )
    (row,) = effect_table([run.path])
    assert (row["norm_before"], row["norm_after"], row["changed"]) == (4.0, 2.0, 0.5)
