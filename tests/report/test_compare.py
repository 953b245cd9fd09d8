"""The comparison of arms with their controls, against numbers worked out by hand."""

import json
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import polars as pl
import pytest

from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.report.compare import SCHEMA, compare, compare_pairs
from gradsurg.report.measures import (
    costs,
    left_out,
    link_shares,
    parts,
    times_to_target,
)
from gradsurg.report.study import read_study
from gradsurg.report.verdict import rows_of
from gradsurg.stats import parse_margin, sign_flip_interval
from tests.report import studies

T_975_2 = 4.302652729911275  # Student's t, two degrees of freedom


def row(frame: pl.DataFrame, arm: str, metric: str = "test/accuracy", block: str | None = None):
    """The row of an arm, metric and block."""
    where = pl.col("block").is_null() if block is None else pl.col("block") == block
    return frame.filter(where, arm=arm, metric=metric).row(0, named=True)


def of_folder(folder: Path) -> pl.DataFrame:
    return compare(read_study(folder))


def test_the_difference_is_that_of_pairs_with_its_details(tmp_path: Path) -> None:
    clip = row(of_folder(studies.mixed(tmp_path / "first")), "clip")
    differences = [-0.10, -0.06, 0.01]
    mean, sd = fmean(differences), stdev(differences)
    assert clip["differences"] == pytest.approx(differences)
    assert (clip["n"], clip["planned"], clip["unit"], clip["seeds"]) == (3, 3, "seed", [0, 1, 2])
    assert (clip["treated"], clip["control"]) == pytest.approx((0.85, 0.9))
    assert clip["difference"] == pytest.approx(mean)
    assert (clip["higher"], clip["lower"], clip["against"]) == (1, 2, "control")
    assert clip["p"] == 4 / 8  # of the signings of .10, .06 and .01 four reach .15
    assert clip["interval"] == "range"
    assert (clip["low"], clip["high"]) == pytest.approx((-0.1, 0.01))
    assert clip["median"] == pytest.approx(-0.06)
    assert clip["t_low"] == pytest.approx(mean - T_975_2 * sd / sqrt(3))
    assert clip["effect_size"] == pytest.approx(mean / sd)
    assert clip["verdict"] == "too few seeds"


def test_the_interval_inverts_the_test_from_six_seeds_on(tmp_path: Path) -> None:
    differences = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, -0.06]
    clip = row(of_folder(studies.paired(tmp_path, "clip", differences)), "clip")
    assert clip["interval"] == "95 %"
    assert (clip["low"], clip["high"]) == pytest.approx(sign_flip_interval(differences))
    assert clip["low"] > min(differences)
    assert clip["verdict"] == "no clear difference"
    assert clip["p"] > 0.05


def test_runs_that_did_not_finish_are_counted_and_not_averaged(tmp_path: Path) -> None:
    frame = of_folder(studies.mixed(tmp_path / "first"))
    zero, noise = row(frame, "zero"), row(frame, "noise")
    assert (zero["n"], zero["planned"], zero["not_compared"]) == (2, 3, "1 diverged")
    assert zero["difference"] == pytest.approx(-0.195)
    assert (noise["n"], noise["difference"], noise["verdict"]) == (0, None, "")
    assert noise["not_compared"] == "1 failed, 1 interrupted, 1 planned"


def test_divergence_is_counted_with_an_exact_test(tmp_path: Path) -> None:
    for seed in range(8):
        control = studies.plan(tmp_path, "none", seed)
        studies.end(control, "none", 0.5, "diverged" if seed < 7 else "finished")
        studies.whole(tmp_path, "clip", seed, 0.9, control.path.name)
    clip = row(of_folder(tmp_path), "clip")
    counts = [clip[key] for key in ("ended", "diverged", "diverged_control", "p_diverged")]
    assert counts == [8, 0, 7, 2 / 2**7]
    assert (clip["n"], clip["difference"], clip["p"]) == (1, pytest.approx(0.4), None)


def test_without_divergence_there_is_no_test_of_it(tmp_path: Path) -> None:
    assert row(of_folder(studies.paired(tmp_path, "clip", [0.1])), "clip")["p_diverged"] is None


def test_q_is_among_the_arms_of_one_metric(tmp_path: Path) -> None:
    for seed in range(6):
        control = studies.whole(tmp_path, "none", seed, 0.5)
        studies.whole(tmp_path, "clip", seed, 0.5 + (-1) ** seed / 10, control)
        studies.whole(tmp_path, "sign", seed, 0.5 + (seed + 1) / 100 - 0.02 * (not seed), control)
        studies.whole(tmp_path, "zero", seed, 0.4 - seed / 1e9, control)
    frame = of_folder(tmp_path)
    found = [row(frame, name) for name in ("zero", "sign", "clip")]
    # all alike; the smallest against the rest: it and none below; three of six each way
    assert [one["p"] for one in found] == [2 / 64, 4 / 64, 1.0]
    assert [one["q"] for one in found] == pytest.approx([3 * 2 / 64, 3 / 2 * 4 / 64, 1.0])
    assert [one["verdict"] for one in found] == ["no clear difference"] * 3
    losses = [row(frame, name, "train/loss")["q"] for name in ("zero", "sign", "clip")]
    assert losses == [None] * 3  # equal in all runs: there is nothing to test


def test_arms_tied_at_the_smallest_p_are_all_clear(tmp_path: Path) -> None:
    for seed in range(8):
        control = studies.whole(tmp_path, "none", seed, 0.5)
        for place in range(10):
            studies.whole(tmp_path, f"arm{place}", seed, 0.4 - seed / 1e3, control)
    frame = of_folder(tmp_path).filter(metric="test/accuracy")
    assert frame["q"].to_list() == [pytest.approx(2 / 2**8)] * 10
    assert frame["verdict"].to_list() == ["lower"] * 10


def test_a_single_arm_has_no_q(tmp_path: Path) -> None:
    frame = of_folder(studies.paired(tmp_path, "clip", [-0.1 - k / 100 for k in range(6)]))
    assert frame["q"].null_count() == len(frame)
    assert row(frame, "clip")["verdict"] == "lower"


def test_seeds_that_all_gave_the_same_numbers_count_as_one(tmp_path: Path) -> None:
    for seed in range(6):
        control = studies.whole(tmp_path, "none", seed, 0.5)
        studies.whole(tmp_path, "clip", seed, 0.4, control)
        studies.whole(tmp_path, "sign", seed, 0.4 + seed / 1e9, control)
    frame = of_folder(tmp_path)
    clip, sign = row(frame, "clip"), row(frame, "sign")
    assert (clip["n"], clip["p"], clip["planned"], clip["repeats"]) == (1, None, 6, 6)
    assert (sign["n"], sign["repeats"]) == (6, 0)


def test_the_metric_that_was_planned_comes_first(tmp_path: Path) -> None:
    studies.paired(tmp_path, "clip", [0.1])
    for file in tmp_path.glob("*/run.json"):
        facts = json.loads(file.read_text(encoding="utf-8"))
        text = json.dumps({**facts, "measured": {"metric": "train/loss"}})
        file.write_text(text, encoding="utf-8")
    study = read_study(tmp_path)
    assert [*study.metrics_of][:2] == ["train/loss", "test/accuracy"]
    assert compare(study)["metric"][0] == "train/loss"


def test_a_metric_of_another_task_is_not_told_of_an_arm(tmp_path: Path) -> None:
    for label, more in (("clip", {"test/f1": 0.5}), ("sign", {})):
        for seed in range(2):
            control = studies.plan(tmp_path, "none", seed)
            studies.end(control, "none", 0.9, **{"test/f1": 0.4})
            place = studies.plan(tmp_path, label, seed, control.path.name)
            studies.end(place, label, 0.8 + seed / 10, **more)
    frame = of_folder(tmp_path)
    assert row(frame, "clip", "test/f1")["n"] == 2
    assert frame.filter(arm="sign", metric="test/f1").is_empty()
    assert row(frame, "sign")["n"] == 2


def in_splits(folder: Path, by_split: Mapping[int, list[float]]) -> Path:
    """Differences of clip to the control, seed by seed, in each split."""
    for split, differences in by_split.items():
        task = {"name": "digits", "split_seed": split}
        studies.paired(folder, "clip", differences, task=task)
    return folder


def test_several_splits_are_a_random_factor(tmp_path: Path) -> None:
    means = {split: 0.01 * (split + 1) for split in range(6)}
    study = in_splits(
        tmp_path, {split: [mean - 0.005, mean + 0.005] for split, mean in means.items()}
    )
    frame = of_folder(study)
    whole = row(frame, "clip")
    assert (whole["unit"], whole["n"], whole["planned"], whole["seeds"]) == ("split", 6, 12, None)
    assert whole["differences"] == pytest.approx([*means.values()])
    assert (whole["p"], whole["verdict"]) == (2 / 64, "higher")
    assert (whole["splits"], whole["test_examples"]) == (6, None)
    one = row(frame, "clip", block="split 3")
    assert (one["n"], one["unit"], one["q"]) == (2, "seed", None)
    assert one["difference"] == pytest.approx(0.04)


def test_a_split_with_more_seeds_counts_as_much_as_another(tmp_path: Path) -> None:
    frame = of_folder(in_splits(tmp_path, {0: [0.1, 0.1, 0.1, 0.4], 1: [0.3]}))
    assert row(frame, "clip")["differences"] == pytest.approx([0.175, 0.3])


def change(folder: Path, name: str, **more: object) -> None:
    """Change these files of all runs."""
    for file in folder.glob(name):
        content = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**content, **more}), encoding="utf-8")


def test_a_row_has_the_number_of_splits_and_of_test_examples(tmp_path: Path) -> None:
    in_splits(tmp_path, {0: [0.1, 0.2]})
    change(tmp_path, "*/summary.json", test_examples=1450)
    clip = row(of_folder(tmp_path), "clip")
    assert (clip["splits"], clip["test_examples"]) == (1, 1450)
    change(tmp_path, "clip-seed0*/summary.json", test_examples=900)
    assert row(of_folder(tmp_path), "clip")["test_examples"] is None
    plain = row(of_folder(studies.paired(tmp_path / "b", "clip", [0.1])), "clip")
    assert (plain["splits"], plain["test_examples"]) == (None, None)


SGD = {"optimizer": {"name": "SGD", "lr": 0.1}}


def test_a_row_has_the_rate_the_steps_and_the_change_of_the_gradients(tmp_path: Path) -> None:
    for seed in range(2):
        control = studies.whole(tmp_path, "none", seed, 0.5, **SGD)
        place = studies.plan(tmp_path, "clip", seed, control, **SGD)
        for step, (calls, cosine) in ((10, (10, 0.5)), (20, (30, 0.9)), (30, (0, 0.0))):
            one, other = (
                studies.effect("clip", site, step, calls=calls, cosine=cosine, norm_after=after)
                for site, after in zip(studies.SITES, (1.0, 4.0 + seed), strict=True)
            )
            place.append("effects.jsonl", [{**one, "cosine": cosine / 2}, other])
        studies.end(place, "clip", 0.6)
    study = read_study(tmp_path)
    frame = compare(study)
    clip = row(frame, "clip")
    assert (clip["lr"], clip["lr_control"], clip["optimizer"], clip["steps"]) == (
        0.1,
        0.1,
        "SGD",
        studies.STEPS,
    )
    assert (clip["tuned"], clip["configurations"], clip["configurations_control"]) == (False, 1, 1)
    # weighted by the calls: (10 * 0.25 + 30 * 0.45) / 40; norms 1 / 2, and 4 / 2 and 5 / 2
    assert (clip["cosine"], clip["norm_low"], clip["norm_high"]) == pytest.approx((0.4, 0.5, 2.5))
    runs = study.runs.filter(pl.col("role") != "control").sort("seed")
    assert runs["lr"].to_list() == [0.1, 0.1]
    assert runs["cosine"].to_list() == pytest.approx([0.4, 0.4])
    assert runs["norm_ratio"].to_list() == [[0.5, 2.0], [0.5, 2.5]]
    assert study.runs.filter(role="control")["cosine"].null_count() == 2
    assert study.runs["tuned"].to_list() == [False] * 4


@pytest.mark.parametrize(
    ("optimizer", "site", "expected"),
    [("SGD", "parameters", False), ("Adam", "parameters", True), ("Adam", "updates", False)],
)
def test_a_scale_cancels_in_some_optimizers_if_it_comes_before_them(
    tmp_path: Path, optimizer: str, site: str, expected: bool
) -> None:
    more = {"optimizer": {"name": optimizer}, "site": {"name": site}}
    found = row(of_folder(studies.paired(tmp_path, "clip", [0.1], **more)), "clip")
    assert (found["scale_free"], found["optimizer"]) == (expected, optimizer)


def test_links_of_a_chain_multiply_their_lengths_at_a_site(tmp_path: Path) -> None:
    control = studies.whole(tmp_path, "none", 0, 0.5)
    place = studies.plan(tmp_path, "clip+noise", 0, control)
    for link, after, cosine in (("clip", 1.0, 0.9), ("noise", 3.0, 0.8)):
        row_ = studies.effect(link, "first.weight", 10, norm_after=after, cosine=cosine)
        place.append("effects.jsonl", [row_])
    studies.end(place, "clip+noise", 0.6)
    found = row(of_folder(tmp_path), "clip+noise")
    assert (found["cosine"], found["norm_low"], found["norm_high"]) == (0.8, 0.75, 0.75)


def tune(folder: Path, label: str, chosen: dict[str, float], places: int, arm: str) -> None:
    """Write the choice of an arm among this many places."""
    (folder / "tuning").mkdir(exist_ok=True)
    names = [path.name for path in folder.glob(f"{label}-seed*")]
    rows = [
        {"place": k, "values": chosen if not k else dict.fromkeys(chosen, -k), "seed": s}
        for k in range(places)
        for s in (1_000_000, 1_000_001)
    ]
    content = {
        "label": label,
        "role": arm,
        "metric": "validation/accuracy",
        "axes": [{"key": key, "values": [value]} for key, value in chosen.items()],
        "rows": [{**one, "score": 0.5} for one in rows],
        "chosen": chosen,
        "runs": names,
    }
    (folder / "tuning" / f"{label}.json").write_text(json.dumps(content), encoding="utf-8")


def test_a_tuned_arm_has_its_choice_and_the_number_of_configurations(tmp_path: Path) -> None:
    for seed in range(2):
        other = {"optimizer": {"name": "SGD", "lr": 0.4}}
        control = studies.whole(tmp_path, "none", seed, 0.5, **other)
        studies.whole(tmp_path, "clip", seed, 0.6, control, **SGD)
    before = read_study(tmp_path)
    assert [arm.name for arm in before.arms] == ["clip, lr=0.1", "control, lr=0.4"]
    tune(tmp_path, "none", {"lr": 0.4}, 3, "control")
    assert [arm.name for arm in read_study(tmp_path).arms] == ["clip, lr=0.1", "control, lr=0.4"]
    tune(tmp_path, "clip", {"lr": 0.1, "transform.clip.value": 0.01}, 6, "treated")
    study = read_study(tmp_path)
    clip = row(compare(study), "clip")  # what was chosen is in no name
    assert (clip["tuned"], clip["rate_tuned"]) == (True, True)
    assert (clip["lr"], clip["lr_control"]) == (0.1, 0.4)
    assert (clip["chosen"], clip["chosen_control"]) == ("value 0.01", "")
    assert (clip["configurations"], clip["configurations_control"]) == (6, 3)
    assert study.runs["tuned"].to_list() == [True] * 4


def with_both(folder: Path, seeds: int = 8) -> Path:
    """Runs whose direction costs 0.01 and whose size costs 0.02, and one without its match."""
    for seed in range(seeds + 1):
        plain = studies.whole(folder, "none", seed, 0.5)
        matched = studies.plan(folder, "norm_matched-clip", seed, arm="control")
        state = "finished" if seed < seeds else "diverged"
        studies.end(matched, "norm_matched-clip", 0.48 - seed / 1000, state)
        treated = studies.whole(folder, "clip", seed, 0.47 - seed / 1000, plain)
        both = {"plain": plain, "norm_matched": matched.path.name}
        change(folder, f"{treated}/run.json", controls=both)
    return folder


def test_direction_and_size_add_up_to_the_total_over_the_same_seeds(tmp_path: Path) -> None:
    study = read_study(with_both(tmp_path))
    assert row(compare(study), "clip")["n"] == 9
    total, direction, size = parts(study).to_dicts()
    assert [one["part"] for one in (total, direction, size)] == ["total", "direction", "size"]
    assert [one["n"] for one in (total, direction, size)] == [8, 8, 8]
    assert direction["difference"] == pytest.approx(-0.01)
    assert size["difference"] == pytest.approx(-0.02 - 0.0035)
    assert total["differences"] == pytest.approx(
        [a + b for a, b in zip(direction["differences"], size["differences"], strict=True)]
    )
    assert [one["against"] for one in (total, direction, size)] == [
        "control",
        "norm-matched",
        "control",
    ]
    assert [one["q"] for one in (total, direction, size)] == [None, 2 / 2**8, 2 / 2**8]
    assert parts(read_study(studies.mixed(tmp_path / "other"))).is_empty()


def test_an_arm_that_turned_nothing_is_not_split(tmp_path: Path) -> None:
    folder = with_both(tmp_path)
    for path in folder.glob("clip-*"):
        rows = [studies.effect("clip", site, 10, cosine=1.0) for site in studies.SITES]
        (path / "effects.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    assert parts(read_study(folder)).is_empty()


def test_the_other_controls_of_some_runs_are_read_with_them(tmp_path: Path) -> None:
    with_both(tmp_path)
    names = [path.name for path in tmp_path.glob("clip-*")]
    assert len(read_study(tmp_path, names).all_runs) == 27


LOWER, MIXED = [-0.01 * one for one in range(1, 9)], [0.01 * (-1) ** one for one in range(8)]


def test_each_named_model_and_task_has_a_verdict_and_all_are_one_family(tmp_path: Path) -> None:
    for model, differences in (("mlp", LOWER), ("convnet", MIXED)):
        for task in ("digits", "wine"):
            more = {"model": {"name": model}, "task": {"name": task, "split_seed": 0}}
            studies.paired(tmp_path, "clip", differences, **more)
    study = read_study(tmp_path)
    frame = compare(study)
    found = {name: row(frame, name) for name in frame["arm"].unique()}
    assert {name: one["verdict"] for name, one in found.items()} == {
        "clip, mlp, digits": "lower",
        "clip, mlp, wine": "lower",
        "clip, convnet, digits": "no clear difference",
        "clip, convnet, wine": "no clear difference",
    }
    assert {(one["unit"], one["n"]) for one in found.values()} == {("seed", 8)}
    assert found["clip, mlp, wine"]["q"] == pytest.approx(4 / 2 * 2 / 2**8)
    assert [arm.name for arm in study.arms if arm.is_control] == [
        f"control, {model}, {task}" for model in ("convnet", "mlp") for task in ("digits", "wine")
    ]


def test_a_split_is_drawn_within_each_model(tmp_path: Path) -> None:
    for model in ("mlp", "convnet"):
        for split in range(6):
            more = {"model": {"name": model}, "task": {"name": "digits", "split_seed": split}}
            studies.paired(tmp_path, "clip", [0.01 + split / 1000] * 2, **more)
    frame = of_folder(tmp_path)
    for name in ("clip, mlp", "clip, convnet"):
        whole = row(frame, name)
        assert (whole["unit"], whole["n"], whole["verdict"]) == ("split", 6, "higher")
    assert frame["block"].drop_nulls().unique().sort().to_list() == [
        f"split {split}" for split in range(6)
    ]


def test_verdicts_of_tasks_with_other_metrics_are_one_family(tmp_path: Path) -> None:
    """The last metric, which only one task has first, is corrected for the other's verdict."""
    for seed, difference in enumerate(LOWER):
        for task in ("digits", "friedman"):
            ends = []
            for label in ("none", "clip"):
                control = ends[0].path.name if ends else None
                place = studies.plan(tmp_path, label, seed, control, task={"name": task})
                outcome = 0.5 + difference * (label == "clip")
                summary = {"state": "finished", "label": label, "test/loss": outcome}
                accuracy = {"test/accuracy": outcome} if task == "digits" else {}
                place.write_summary({**summary, **accuracy})
                ends.append(place)
    study = read_study(tmp_path)
    frame = compare(study)
    p = 2 / 2**8
    assert row(frame, "clip, digits")["q"] == row(frame, "clip, friedman", "test/loss")["q"] == p
    assert row(frame, "clip, digits", "test/loss")["q"] is None
    names = [(one["arm"], one["metric"]) for one in rows_of(frame)]
    assert names == [("clip, digits", "test/accuracy"), ("clip, friedman", "test/loss")]


@pytest.mark.parametrize(
    ("margin", "differences", "verdict"),
    [
        ("1pp", [0.001, -0.001, 0.002, -0.002, 0.003, -0.003], "equivalent"),
        ("0.01", [0.001, -0.001, 0.002, -0.002, 0.003, 0.2], "not worse"),
        ("1%", [0.1, 0.11, 0.12, 0.13, 0.14, 0.15], "better"),
        ("0.01", [0.1, -0.11, 0.12, -0.13, 0.14, -0.15], "undecided"),
        ("1pp", [-0.02, -0.03, -0.02, -0.04, -0.02, -0.03], "worse by more than the margin"),
        ("1pp", [-0.002, -0.03, -0.02, -0.04, -0.02, -0.03], "worse"),
        ("1pp", [0.001, -0.001, 0.002], ""),
    ],
)
def test_a_margin_asks_for_equivalence(
    tmp_path: Path, margin: str, differences: list[float], verdict: str
) -> None:
    study = read_study(studies.paired(tmp_path, "clip", differences))
    assert row(compare(study, parse_margin(margin)), "clip")["margin"] == verdict
    assert row(compare(study), "clip")["margin"] == ""


@pytest.mark.parametrize(("sign", "alone"), [(1, "better"), (-1, "worse by more than the margin")])
def test_a_direction_beside_a_margin_needs_q_among_several_arms(
    tmp_path: Path, sign: int, alone: str
) -> None:
    acting = [sign * one / 100 for one in (2, 3, 2, 4, 2, 3)]
    studies.paired(tmp_path, "clip", acting)
    assert row(compare(read_study(tmp_path), parse_margin("1pp")), "clip")["margin"] == alone
    for name in ("noise", "zero"):
        studies.paired(tmp_path, name, [0.03, -0.02, 0.01, -0.02, 0.03, -0.03])
    clip = row(compare(read_study(tmp_path), parse_margin("1pp")), "clip")
    assert clip["q"] == pytest.approx(3 * 2 / 64)
    assert clip["margin"] == ("not worse" if sign > 0 else "undecided")


def test_arms_that_equal_their_control_in_each_seed_are_in_no_correction(tmp_path: Path) -> None:
    for seed in range(8):
        control = studies.whole(tmp_path, "none", seed, 0.9 + seed / 100)
        studies.whole(tmp_path, "clip", seed, 0.8 + seed / 110, control)
        for dose in range(6):
            studies.whole(tmp_path, f"idle{dose}", seed, 0.9 + seed / 100, control)
    frame = of_folder(tmp_path)
    clip, idle = row(frame, "clip"), row(frame, "idle0")
    assert (clip["verdict"], clip["q"]) == ("lower", None)
    assert (idle["verdict"], idle["q"]) == ("identical", None)


def test_an_arm_whose_control_is_the_treatment_itself_is_in_no_correction(tmp_path: Path) -> None:
    for seed in range(2):
        for label, cosine in (("scale", 1.0), ("clip", 0.5), ("sign", 0.25)):
            control = studies.whole(tmp_path, f"norm_matched-{label}", seed, 0.8, arm="control")
            place = studies.plan(tmp_path, label, seed, control)
            rows = [studies.effect(label, site, 10, cosine=cosine) for site in studies.SITES]
            place.append("effects.jsonl", rows)
            studies.end(place, label, 0.9 + seed / 100)
    frame = of_folder(tmp_path)
    scale, clip = row(frame, "scale"), row(frame, "clip")
    assert (scale["vacuous"], scale["difference"]) == ("norm-matched", None)
    assert scale["not_compared"] == "2 with a vacuous control"
    assert (clip["vacuous"], clip["against"], clip["q"]) == ("", "norm-matched", 0.5)


def test_two_arms_are_compared_with_each_other_seed_by_seed(tmp_path: Path) -> None:
    study = read_study(studies.mixed(tmp_path / "first"))
    frame = compare_pairs(study, ["clip", "zero"])
    pair = row(frame, "clip - zero")
    assert (pair["against"], pair["n"]) == ("zero", 2)
    assert pair["differences"] == pytest.approx([0.1, 0.13])
    assert pair["not_compared"] == "1 run of that seed diverged"
    for names, words in ((["clip"], "at least two"), (["clip", "clap"], "no arm is named 'clap'")):
        with pytest.raises(LookupError, match=f"{words}.*'clip'; 'noise'; 'zero'"):
            compare_pairs(study, names)


def test_an_arm_beside_another_has_its_whole_name(tmp_path: Path) -> None:
    for value in (0.1, 0.2):
        studies.whole(tmp_path, "clip", 0, 0.8, value=value)
    frame = compare_pairs(read_study(tmp_path), ["clip 0.1", "clip 0.2"])
    assert row(frame, "clip 0.1 - clip 0.2")["against"] == "clip 0.2"


def test_a_study_without_a_pair_has_the_columns(tmp_path: Path) -> None:
    studies.whole(tmp_path, "none", 0, 0.9)
    assert dict(of_folder(tmp_path).schema) == SCHEMA


def test_a_links_share_is_the_chain_minus_the_chain_without_it(tmp_path: Path) -> None:
    frame = link_shares(read_study(studies.chain(tmp_path))).filter(metric="test/accuracy")
    assert frame.select("arm", "link", "planned").rows() == [
        ("clip+noise", "clip", 2),
        ("clip+noise", "noise", 2),
    ]
    clip, noise = frame.rows(named=True)
    assert noise["differences"] == pytest.approx([-0.1, -0.14])
    assert (noise["p"], noise["q"]) == (0.5, None)  # one p is no family
    assert clip["differences"] == pytest.approx([0.0])
    assert clip["not_compared"] == "1 shorter chain diverged"


def test_a_chain_without_a_link_has_the_same_rest(tmp_path: Path) -> None:
    for links, more in (
        ("clip+noise+sign", {}),
        ("clip+sign", {}),
        ("noise+sign", {"site": {"name": "outputs"}}),
        ("noise+clip", {}),
    ):
        studies.whole(tmp_path, links, 0, 0.8, **more)
    studies.whole(tmp_path, "clip", 0, 0.8, arm="control")
    found = left_out(read_study(tmp_path))
    pairs = [
        (whole.split("-")[0], link, rest.split("-")[0]) for (whole, link), rest in found.items()
    ]
    assert pairs == [("clip+noise+sign", "noise", "clip+sign")]


def test_a_dotted_path_that_was_edited_in_between_is_another_link(tmp_path: Path) -> None:
    studies.whole(tmp_path, "clip+mine", 0, 0.8, sources={"mine": "0123"})
    studies.whole(tmp_path, "clip", 0, 0.8, sources={})
    studies.whole(tmp_path, "mine", 0, 0.8, sources={"mine": "4567"})
    assert [link for _, link in left_out(read_study(tmp_path))] == ["mine"]


def test_the_cost_is_the_ratio_pair_by_pair(tmp_path: Path) -> None:
    frame = costs(read_study(studies.mixed(tmp_path)))
    assert frame.select("arm", "pairs", "ratio", "low", "high", "measured_ms").rows() == [
        ("clip", 3, 1.5, 1.5, 1.5, 2.0),
        ("zero", 2, 1.5, 1.5, 1.5, 2.0),
    ]


def ended(folder: Path, label: str, seed: int, step: int | str | None, control: str | None) -> str:
    """A run that reached its target at a step, did not (None), or diverged (a state)."""
    place = studies.plan(folder, label, seed, control)
    summary: dict[str, object] = {"state": step if isinstance(step, str) else "finished"}
    summary |= {"until": "test/loss <= 0.5", "until/reached": int(isinstance(step, int))}
    summary |= {"until/step": step} if isinstance(step, int) else {}
    RunDirectory(place.path).write_summary(summary)
    return place.path.name


@pytest.mark.parametrize(
    ("treated", "control", "expected"),
    [
        # sooner in four, later in one, and in one neither got there: p = 2 * (1 + 5) / 2^5
        ([10, 16, 22, 30, None, None], [20, 24, 32, None, 36, None], (4, 1, 0.375, -10.0)),
        ([10, "diverged"], [1210, 20], (1, 1, 1.0, -1200.0)),
        ([10, 20, 30, 40, 50, 60], [None] * 6, (6, 0, 2 / 64, None)),
    ],
)
def test_a_seed_that_never_got_there_counts_as_latest(
    tmp_path: Path, treated: list, control: list, expected: tuple
) -> None:
    for seed, steps in enumerate(zip(treated, control, strict=True)):
        name = ended(tmp_path, "none", seed, steps[1], None)
        ended(tmp_path, "clip", seed, steps[0], name)
    (found,) = times_to_target(read_study(tmp_path)).rows(named=True)
    assert (found["sooner"], found["later"], found["p"], found["median"]) == expected
    assert (found["arm"], found["until"], found["q"]) == ("clip", "test/loss <= 0.5", None)
