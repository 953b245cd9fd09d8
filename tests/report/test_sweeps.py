"""Swept numbers: doses, trends, and best arm against best arm, by numbers worked out by hand."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pytest

from gradsurg.report.compare import compare
from gradsurg.report.study import Study, read_study
from gradsurg.report.sweeps import best_arms, dose_groups, doses, first_trends, trends
from gradsurg.report.terminal import overview
from gradsurg.report.verdict import answer, sweeps
from tests.report import studies


def by_dose(folder: Path, gains: Mapping[float, list[float]]) -> Study:
    """Six seeds of clip at each dose, by the difference of each seed to one control."""
    for seed in range(6):
        control = studies.whole(folder, "none", seed, 0.5)
        for dose, gain in gains.items():
            studies.whole(folder, "clip", seed, 0.5 + gain[seed], control, value=dose)
    return read_study(folder)


def test_three_values_of_one_number_are_doses_and_two_are_not(tmp_path: Path) -> None:
    for value in (0.1, 0.001, 0.01):
        studies.whole(tmp_path, "clip", 0, 0.8, value=value)
    for value in (0.1, 0.2):
        studies.whole(tmp_path, "zero", 0, 0.8, value=value)
    (found,) = dose_groups(read_study(tmp_path))
    assert (found.key, found.name, [*found.arms]) == (
        "transform.clip.value",
        "clip",
        [0.001, 0.01, 0.1],
    )


def test_a_split_is_no_dose(tmp_path: Path) -> None:
    for split in range(3):
        task = {"name": "digits", "split_seed": split}
        studies.whole(tmp_path, "clip", 0, 0.8, task=task)
    assert dose_groups(read_study(tmp_path)) == []


def test_a_dose_has_the_comparison_of_its_arm(tmp_path: Path) -> None:
    study = by_dose(tmp_path, {dose: [dose] * 6 for dose in (0.1, 0.3, 0.2)})
    frame = doses(study, compare(study)).filter(metric="test/accuracy")
    assert frame["dose"].to_list() == [0.1, 0.2, 0.3]
    assert frame["difference"].to_list() == pytest.approx([0.1, 0.2, 0.3])
    assert frame["key"].unique().to_list() == ["transform.clip.value"]


def test_a_value_swept_over_own_models_has_a_trend_for_each(tmp_path: Path) -> None:
    for name in ("mine.Net", "mine.FNet"):
        own = {"model": {"_target_": name}, "sources": {name: f"code of {name}"}}
        for seed in range(6):
            control = studies.whole(tmp_path, "none", seed, 0.5, **own)
            for dose in (0.001, 0.01, 0.1):
                accuracy = 0.5 + dose + seed / 1000
                studies.whole(tmp_path, "clip", seed, accuracy, control, value=dose, **own)
    study = read_study(tmp_path)
    found = first_trends(study, compare(study))
    assert {(one["name"], one["n"]) for one in found} == {
        ("clip, mine.Net", 6),
        ("clip, mine.FNet", 6),
    }
    assert "clip 0.1, mine.FNet" in overview(study)


def test_a_value_swept_over_two_texts_of_own_code_has_a_trend_for_each(tmp_path: Path) -> None:
    for text in ("before", "after"):
        for dose in (0.1, 0.2, 0.3):
            control = studies.whole(tmp_path, "none", 0, 0.5, sources={"mine": text})
            more = {"value": dose, "sources": {"mine": text}}
            studies.whole(tmp_path, "clip", 0, 0.5 + dose, control, **more)
    study = read_study(tmp_path)
    assert [one.name for one in dose_groups(study)] == ["clip", "clip #2"]
    assert len(first_trends(study, compare(study))) == 2


def trend_of(study: Study) -> dict:
    (found,) = trends(study, compare(study)).filter(metric="test/accuracy").rows(named=True)
    return found


def test_a_trend_has_a_direction_and_a_size(tmp_path: Path) -> None:
    noise = [0.001 * seed for seed in range(6)]
    study = by_dose(tmp_path, {dose: [dose + one for one in noise] for dose in (0.0, 0.1, 0.2)})
    found = trend_of(study)
    assert (found["direction"], found["n"], found["p"]) == ("rises", 6, 2 / 64)
    assert found["size"] == pytest.approx(0.2)
    assert found["low"] <= found["size"] <= found["high"]


def test_a_bend_is_no_trend_but_a_peak(tmp_path: Path) -> None:
    gains = {1: 0.01, 2: 0.2, 3: 0.1}
    noise = [0.001 * seed for seed in range(6)]
    study = by_dose(tmp_path, {dose: [gain + x for x in noise] for dose, gain in gains.items()})
    found = trend_of(study)
    assert found["direction"] == ""
    assert (found["extreme"], found["peak"]) == ("highest", 2.0)
    assert found["peak_difference"] == pytest.approx(0.2025)
    assert found["peak_p"] == 2 / 64
    assert found["peak_q"] is None


def test_a_dose_that_equals_the_control_is_inactive_and_in_no_trend(tmp_path: Path) -> None:
    gains = {0.1: -0.3, 0.2: -0.2, 0.3: -0.1, 1.0: 0.0, 2.0: 0.0}
    for seed in range(6):
        control = studies.whole(tmp_path, "none", seed, 0.5 + seed / 1000)
        for dose, gain in gains.items():
            place = studies.plan(tmp_path, "clip", seed, control, value=dose)
            studies.log(place, "clip")
            # at dose 1 the loss alone differs from the control
            loss = {"train/loss": 0.4} if dose == 1.0 else {}
            studies.end(place, "clip", 0.5 + seed / 1000 + gain * (1 + seed / 100), **loss)
    found = trend_of(read_study(tmp_path))
    assert (found["acting"], found["inactive"]) == ([0.1, 0.2, 0.3, 1.0], [2.0])
    assert found["direction"] == "rises"
    assert found["size"] == pytest.approx(0.3 * 1.025)


def test_too_few_doses_that_act_have_no_trend(tmp_path: Path) -> None:
    study = by_dose(tmp_path, {0.1: [0.1] * 6, 0.2: [0.2] * 6, 0.3: [0.0] * 6})
    found = trend_of(study)
    assert (found["size"], found["p"], found["inactive"]) == (None, None, [0.3])


def test_trends_of_several_arms_are_corrected_together(tmp_path: Path) -> None:
    for seed in range(6):
        control = studies.whole(tmp_path, "none", seed, 0.5)
        for dose in (1, 2, 3):
            gain = 0.01 * dose * (1 + seed / 10)
            studies.whole(tmp_path, "clip", seed, 0.5 + gain, control, value=dose)
            wobble = 0.01 * (-1) ** (seed + dose)
            studies.whole(tmp_path, "sign", seed, 0.5 + wobble, control, value=dose)
    study = read_study(tmp_path)
    found = trends(study, compare(study)).filter(metric="test/accuracy")
    assert found.select("name", "p", "q", "direction").rows()[0] == ("clip", 2 / 64, 4 / 64, "")


def swept_rates(
    folder: Path, outcomes: Mapping[str, Mapping[float, float]], **more: object
) -> Study:
    """Six seeds of each arm at each learning rate, by the mean accuracy, the control's first."""
    for seed in range(6):
        controls: dict[float, str] = {}
        for label, by_rate in outcomes.items():
            for rate, accuracy in by_rate.items():
                optimizer = {"name": "SGD", "lr": rate}
                place = studies.plan(folder, label, seed, controls.get(rate), optimizer=optimizer)
                wobble = (seed - 2.5) / 1000 * (label != "none")
                extra = {key: -accuracy if key == "validation/accuracy" else 0 for key in more}
                studies.end(place, label, accuracy + wobble, **extra)
                controls.setdefault(rate, place.path.name)
    return read_study(folder)


def test_the_best_arms_are_compared_where_a_rate_is_swept(tmp_path: Path) -> None:
    control = {0.1: 0.8, 0.2: 0.9, 0.4: 0.3}
    treated = {0.1: 0.5, 0.2: 0.88, 0.4: 0.9}
    study = swept_rates(tmp_path, {"none": control, "clip": treated})
    (found,) = best_arms(study).rows(named=True)
    assert (found["label"], found["key"], found["chosen_on"]) == (
        "clip",
        "optimizer.lr",
        "test/accuracy",
    )
    assert (found["control_value"], found["treated_value"], found["values"]) == (0.2, 0.4, 3)
    assert (found["control"], found["treated"]) == pytest.approx((0.9, 0.9))
    assert (found["verdict"], found["n"]) == ("no clear difference", 6)
    assert (found["usable_control"], found["usable_treated"]) == (1, 2)
    best = answer(study, compare(study))
    assert ("at its best" in best[0], "arms against" in best[1]) == (True, True)
    assert not any("at its best" in text for text in sweeps(study, compare(study)))
    assert found["edge"] == "clip"  # its best rate is the largest, the control's is not


def test_the_best_arms_are_chosen_on_validation_data(tmp_path: Path) -> None:
    rates = {0.1: 0.5, 0.2: 0.9}
    study = swept_rates(tmp_path, {"none": rates, "clip": rates}, **{"validation/accuracy": 1})
    (found,) = best_arms(study).rows(named=True)
    assert (found["chosen_on"], found["control_value"]) == ("validation/accuracy", 0.1)
    assert found["control"] == pytest.approx(0.5)


def test_a_dose_of_the_transform_alone_has_no_best_arms(tmp_path: Path) -> None:
    study = by_dose(tmp_path, {dose: [dose] * 6 for dose in (0.1, 0.2, 0.3)})
    assert best_arms(study).is_empty()
    assert "treated_value" in best_arms(study).columns
    assert isinstance(best_arms(study), pl.DataFrame)
