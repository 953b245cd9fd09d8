"""The output of a job and of a study, from run directories made by hand; tuning in sentences."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import gradsurg.report.wording as wording
from gradsurg.experiment.run_directory import FACTS, SUMMARY, RunDirectory
from gradsurg.report import load_study, summary
from gradsurg.report.cautions import by_rule
from gradsurg.report.compare import compare, compare_job
from gradsurg.report.load import NotAStudy
from gradsurg.report.study import read_study
from gradsurg.report.terminal import Runs, failures, job_study, overview, report
from gradsurg.report.tuning import Tuning, read_tunings, tuning_frames, tuning_text
from tests.report import studies


def job(folder: Path, treated: Sequence[float], **more: object) -> list[Runs]:
    """The runs of a job whose control has an accuracy of 0.9; `more` is in treated summaries."""
    runs = []
    for seed, accuracy in enumerate(treated):
        control = studies.plan(folder, "none", seed)
        studies.log(control, "none")
        studies.end(control, "none", 0.9)
        own = studies.plan(folder, "clip", seed, control.path.name)
        studies.log(own, "clip")
        studies.end(own, "clip", accuracy, **more)
        runs.append(Runs(own.path, control.path))
    return runs


def row_of(text: str, title: str) -> list[str]:
    """The cells of a line of a table, which two spaces separate."""
    (line,) = [one for one in text.splitlines() if one.startswith(f"{title}  ")]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def plain(text: str) -> str:
    assert max(map(len, text.splitlines())) <= wording.TEXT_WIDTH, text
    assert text == text.strip()
    assert "\n\n\n" not in text
    return " ".join(text.split())


def test_a_job_prints_the_verdict_both_arms_and_the_effects_of_its_runs_alone(
    tmp_path: Path,
) -> None:
    runs = job(tmp_path, [0.80, 0.81, 0.82, 0.83, 0.84, 0.86])
    studies.whole(tmp_path, "zero", 0, 0.1, runs[0].control and runs[0].control.name)
    text = report(runs)
    said = plain(text)
    assert said.startswith("clip lowers test accuracy by 7.33 pp ")
    cells = "82.67%, 90.00%, -7.33 pp, -10.00 to -4.00 pp, 0.0312, 0/6"
    assert row_of(text, "test accuracy")[1:] == cells.split(", ")
    assert row_of(text, "step time (ms)")[1:] == ["1.5", "1", "+50%", "+50% to +50%"]
    assert "(one in 10, which takes 2 ms with clip); its difference: median and range over" in said
    assert "Gradients at each site, means over 6 runs at one step in 10:" in text
    assert row_of(text, "first.weight")[1:] == ["2", "1", "0.5000", "25.0%", "12.5%", "240"]
    assert text.splitlines()[-1].startswith("12 runs in ")


def test_a_job_with_few_seeds_has_ranges_and_no_p(tmp_path: Path) -> None:
    text = report(job(tmp_path, [0.80, 0.84, 0.91]))
    heads = next(line for line in text.splitlines() if "  difference  " in line).split()
    assert heads == ["clip", "control", "difference", "range", "higher"]
    cells = "85.00%, 90.00%, -5.00 pp, -10.00 to +1.00 pp, 1/3"
    assert row_of(text, "test accuracy")[1:] == cells.split(", ")


def test_a_narrow_table_of_a_job_keeps_both_arms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = job(tmp_path, [0.80, 0.81, 0.82, 0.83, 0.84, 0.86])
    arms, rest = ["clip", "control", "difference"], ["95", "%", "interval"]
    for width, more in ((80, ["p", "higher"]), (79, ["p"]), (72, ["p"]), (71, [])):
        monkeypatch.setattr(wording, "TEXT_WIDTH", width)
        heads = next(line for line in report(runs).splitlines() if "  difference  " in line)
        assert heads.split() == [*arms, *rest, *more], width


def test_effects_measured_at_every_step_are_said_in_one_clause(tmp_path: Path) -> None:
    runs = job(tmp_path, [0.8], effects_every=1)
    for path in tmp_path.glob("none-*"):
        content = json.loads((path / SUMMARY).read_text("utf-8"))
        (path / SUMMARY).write_text(json.dumps({**content, "effects_every": 1}), "utf-8")
    assert "each of which measures the effects on gradients" in plain(report(runs))


def test_a_job_is_compared_with_its_own_control(tmp_path: Path) -> None:
    runs = []
    for seed, one in enumerate(job(tmp_path, [0.8, 0.8])):
        label = "placebo-clip"
        place = studies.plan(tmp_path, label, seed, arm="control")
        studies.end(place, label, 0.7)
        runs.append(Runs(one.treated, place.path))
    text = report(runs)
    assert row_of(text, "test accuracy")[2] == "70.00%"
    said = plain(text)
    assert "+10.00 pp" in said
    assert "The placebo arm turns each gradient as far as clip" in said
    assert "tep time" not in said  # the placebo arm runs a surgery too
    assert {run.label for run in job_study(runs).all_runs} == {"clip", "placebo-clip"}


def test_the_q_of_a_job_is_among_all_arms_of_its_study(tmp_path: Path) -> None:
    runs = job(tmp_path, [0.80, 0.81, 0.82, 0.83, 0.84, 0.86])
    assert job_frame(runs)["family"].null_count() == len(job_frame(runs))
    for seed, one in enumerate(runs):
        for label, sign in (("sign", 1), ("noise", -1)):
            accuracy = 0.9 + sign * (-1) ** seed / 100
            studies.whole(tmp_path, label, seed, accuracy, one.control and one.control.name)
    mine = job_frame(runs).filter(metric="test/accuracy").row(0, named=True)
    page = compare(read_study(tmp_path)).filter(arm="clip", metric="test/accuracy")
    assert mine == page.row(0, named=True)
    assert (mine["q"], mine["family"], mine["verdict"]) == (3 * 2 / 64, 3, "no clear difference")
    text = report(runs)
    assert "p 0.0312, q 0.0938 among the 3 arms of this study" in plain(text)
    assert row_of(text, "test accuracy")[-3:] == ["0.0312", "0.0938", "0/6"]
    assert "needs 7 seeds" in plain(text)
    others = [Runs(one.treated, runs[seed - 1].control) for seed, one in enumerate(runs)]
    assert job_frame(others)["q"].null_count() == len(job_frame(others))  # of no other control


def job_frame(runs: Sequence[Runs]) -> pl.DataFrame:
    """The comparison of a job."""
    folder = next(path.parent for one in runs for path in one.paths)
    return compare_job(job_study(runs), read_study(folder))


def test_a_job_tells_links_and_each_kind_of_note_once(tmp_path: Path) -> None:
    study = read_study(studies.chain(tmp_path))
    runs = []
    for seed in range(2):
        places = {run.label: run.path for run in study.all_runs if run.seed == seed}
        content = json.loads((places["clip+noise"] / SUMMARY).read_text("utf-8"))
        content["notes"] = ["clip changed nothing", f"noise. \x1b[31m. {seed}"]
        content["note_details"] = {"clip changed nothing": f"Quantiles: {seed}"}
        (places["clip+noise"] / SUMMARY).write_text(json.dumps(content), "utf-8")
        without = {"clip": places["noise"], "noise": places["clip"]}
        runs.append(Runs(places["clip+noise"], places["none"], without))
    text = report(runs)
    assert "clip+noise. Each link's share in test accuracy" in text
    assert row_of(text, "noise")[1:3] == ["-12.00 pp", "-14.00 to -10.00 pp"]
    assert [line for line in text.splitlines() if line.startswith("Note")] == [
        "Note (2 runs): clip changed nothing. Quantiles: 0",
        r"Note (1 run): noise. \x1b[31m. 0",
        r"Note (1 run): noise. \x1b[31m. 1",
    ]
    assert "8 runs in" in text


def test_runs_without_a_pair_are_printed_alone(tmp_path: Path) -> None:
    runs = [Runs(one.treated, None) for one in job(tmp_path / "a", [0.8, 0.9])]
    text = report(runs)
    assert "2 of 2 runs finished" in plain(text)
    line = next(one for one in text.splitlines() if one.startswith("clip "))
    assert line.split() == ["clip", "test", "accuracy", "2", "85.00%", "80.00%", "90.00%"]
    controls = [Runs(None, one.control) for one in job(tmp_path / "b", [0.8])]
    alone = report(controls)
    assert "1 of 1 run finished" in plain(alone)
    assert "norm after" not in alone


@pytest.mark.parametrize("config", [{}, {"aggregator": {"name": "pcgrad"}, "transform": {}}])
def test_effects_that_were_not_measured_are_said_so(tmp_path: Path, config: dict[str, Any]) -> None:
    place = studies.plan(tmp_path, "pcgrad" if config else "clip", 0, **config)
    studies.end(place, place.path.name.partition("-")[0], 0.8)
    what = "No conflict was measured: effects_every=0." if config else "No effect was measured: "
    assert what in report([Runs(place.path, None)])


def test_conflicts_of_a_job_are_printed(tmp_path: Path) -> None:
    study = read_study(studies.clashing(tmp_path))
    beside = study.by_name
    runs = [Runs(run.path, beside[run.control].path) for run in study.all_runs if run.control]
    text = report(runs)
    assert "How the tasks conflict, means over 8 measured steps of 2 runs:" in text
    assert "No conflict was measured" not in text


def test_a_job_reads_the_other_controls_of_its_runs(tmp_path: Path) -> None:
    runs = job(tmp_path, [0.80, 0.81, 0.82, 0.83, 0.84, 0.86])
    for seed, one in enumerate(runs):
        assert one.treated
        assert one.control
        place = studies.plan(tmp_path, "norm_matched-clip", seed, arm="control")
        studies.end(place, "norm_matched-clip", 0.81)
        facts = json.loads((one.treated / FACTS).read_text("utf-8"))
        controls = {"plain": one.control.name, "norm_matched": place.path.name}
        (one.treated / FACTS).write_text(json.dumps({**facts, "controls": controls}), "utf-8")
    study = job_study(runs)
    assert {run.label for run in study.all_runs} == {"clip", "none", "norm_matched-clip"}
    said = plain(report(runs))
    for part in ("total -7.33 pp", "direction +1.67 pp", "size -9.00 pp", "(seeds=7)"):
        assert part in said
    assert " 18 runs in " in said


def test_an_overview_has_the_line_of_each_arm_directly_below_the_verdict(tmp_path: Path) -> None:
    parts = overview(read_study(studies.mixed(tmp_path))).split("\n\n")
    assert parts[1].startswith("test accuracy\narm ")
    assert "diverged" in parts[2]


def test_failed_runs_and_transforms_that_made_nan_are_told_first(tmp_path: Path) -> None:
    study = read_study(studies.mixed(tmp_path))
    made = {"transform": "zero", "site": "0.weight", "step": 7}
    (zero,) = [run for run in study.all_runs if run.state == "diverged"]
    studies.end(RunDirectory(zero.path), "zero", float("nan"), "diverged", nonfinite=made)
    told = failures([run.path for run in study.all_runs if run.label != "none"])
    lines = " ".join(told.split())
    assert lines.startswith("FAILED: 1 of 3 runs of noise. The first: ValueError: <b>no</b> room (")
    assert "(the traceback is in " in lines
    assert "zero returned NaN or infinity for a finite gradient at site '0.weight', step 7" in lines
    assert failures([run.path for run in study.all_runs if run.label == "clip"]) == ""


def test_an_overview_has_a_table_for_each_metric_and_the_unfinished_runs(tmp_path: Path) -> None:
    text = overview(read_study(studies.mixed(tmp_path)))
    said = plain(text)
    assert said.startswith("1 of 3 seeds diverged with zero and 0 with control (exact McNemar p 1)")
    assert "13 runs: 8 finished, " in said
    for name in ("test accuracy", "train loss", "train loss AUC"):
        assert f"\n\n{name}\narm " in text
    assert "1 failed, 1 interrupted, 1 planned" in text
    last = text.split("\n\n")[-1]
    assert last.startswith("not finished")
    assert "<b>no</b> room (logged up to step 0 of 40)" in last
    assert row_of(last, "none-seed9-00000000")[1] == "missing"


def test_an_overview_of_many_arms_has_the_first_metric_and_says_how_many_runs_there_are(
    tmp_path: Path,
) -> None:
    control = studies.whole(tmp_path, "none", 0, 0.9)
    for number in range(9):
        studies.whole(tmp_path, f"arm{number}", 0, 0.8, control)
    for seed in range(1, 23):
        studies.plan(tmp_path, "late", seed, control)
    text = overview(read_study(tmp_path))
    assert "\n\ntest accuracy\n" in text
    assert "\n\ntrain loss\n" not in text
    assert "and 2 more: the page lists them" in text


def test_an_overview_tells_conflicts_links_and_arms_alone(tmp_path: Path) -> None:
    chain = overview(read_study(studies.chain(tmp_path / "chain")))
    assert "clip+noise. Each link's share in test accuracy" in chain
    assert "How the tasks conflict" in overview(read_study(studies.clashing(tmp_path / "clash")))
    studies.whole(tmp_path / "alone", "clip", 0, 0.8)
    assert "\n\nnot compared\narm " in overview(read_study(tmp_path / "alone"))


def test_training_time_and_hardware_are_told_with_the_number_of_runs(tmp_path: Path) -> None:
    for seed, place in enumerate("ab"):
        run = studies.plan(tmp_path, "none", seed)
        studies.end(run, "none", 0.9, **{"time/train_s": 30.5, "hardware": place})
    text = overview(read_study(tmp_path))
    assert "Trained for 1 min 1 s in all (2 runs)." in text
    assert "Hardware: a (1 run); b (1 run)." in text


def test_a_summary_is_the_overview_of_some_runs_and_their_controls(tmp_path: Path) -> None:
    folder = studies.mixed(tmp_path)
    text = summary(folder, only=[path.name for path in folder.glob("clip-seed*")])
    assert "6 runs: 6 finished." in text
    assert "zero" not in text
    assert summary(folder) == overview(read_study(folder))
    assert "within 0.50 pp" in summary(
        studies.paired(tmp_path / "b", "clip", [0.0, 0.001] * 4), margin="0.5pp"
    )
    with pytest.raises(NotAStudy, match="has no run clip-seed9$"):
        summary(folder, only=["clip-seed9"])
    assert load_study(folder).runs["run"].len() == 13


def test_an_overview_tells_trends_and_the_best_arms_of_a_swept_rate(tmp_path: Path) -> None:
    for rate, accuracy in ((0.1, 0.7), (1.0, 0.81), (10.0, 0.82)):
        for seed in range(6):
            more = {"optimizer": {"name": "SGD", "lr": rate}}
            control = studies.whole(tmp_path, "none", seed, 0.5 + seed / 1000, **more)
            studies.whole(tmp_path, "clip", seed, accuracy, control, **more)
    said = plain(overview(read_study(tmp_path)))
    assert "rises with optimizer.lr (clip), by 12.00 pp from 0.1 to 10" in said
    assert "best optimizer.lr, chosen on test accuracy" in said


AXIS: dict[str, Any] = {"key": "lr", "values": [0.01, 0.1, 1.0], "by_log": True}


def choice(means: list[float | None], place: int, **more: object) -> dict[str, object]:
    """The file of an arm with two tuning seeds, one of which diverged where the mean is None."""
    rows = [
        {
            "place": number,
            "values": {"lr": lr},
            "seed": 1_000_000 + seed,
            "score": None if mean is None and not seed else (mean or 0.9) + 0.01 * seed,
        }
        for number, (lr, mean) in enumerate(zip(AXIS["values"], means, strict=True))
        for seed in range(2)
    ]
    base = {"label": "clip", "role": "treated", "metric": "validation/accuracy", "lower": False}
    chosen = {"lr": AXIS["values"][place]}
    return {**base, "axes": [AXIS], "rows": rows, "chosen": chosen, "runs": ["clip-1"], **more}


def tunings(folder: Path, *contents: dict[str, object]) -> list[Tuning]:
    (folder / "tuning").mkdir(exist_ok=True)
    for number, one in enumerate(contents):
        (folder / "tuning" / f"{number}.json").write_text(json.dumps(one), encoding="utf-8")
    known, faults = read_tunings(folder)
    assert not faults
    return known


def test_a_choice_is_a_sentence_with_reasons_not_to_trust_it(tmp_path: Path) -> None:
    inside, edge, tie, lost = tunings(
        tmp_path,
        choice([0.5, 0.8, 0.6], 1),
        choice([0.5, 0.6, 0.8], 2),
        choice([0.8, 0.8, None], 0),
        choice([0.8, None, None], 1),
    )
    assert inside.row == ["clip", "lr=0.1", "80.50%", "3", "2", "0", ""]
    assert all(cell in inside.sentence for cell in inside.row)
    assert edge.remarks == ["lr=1 is the largest of the grid: widen it"]
    assert "as good on validation accuracy: 0.1" in tie.sentence
    assert "seeds, 1 diverged)" in tie.sentence
    assert "1 of 2 seeds diverged with it" in lost.remarks
    assert tuning_text([inside], ["a fault"])[1:] == [f"  {inside.sentence}", "a fault"]
    assert tuning_text([]) == []


def test_a_tuned_study_says_that_it_compares_chosen_values(tmp_path: Path) -> None:
    folder = studies.paired(tmp_path, "clip", [0.01, -0.01])
    name = next(folder.glob("clip-*")).name
    tunings(folder, choice([0.5, 0.8, 0.6], 1, runs=[name], label="typed"))
    text = overview(read_study(folder))
    study = read_study(folder)
    frame = compare(study)
    assert not {"tuned values", "edge of a grid"} & by_rule(study, frame).keys()
    clear = frame.with_columns(verdict=pl.lit("higher"))
    assert "tuned values" in by_rule(study, clear)
    at_end = choice([0.5, 0.6, 0.8], 2, runs=[name])
    tunings(folder, at_end, choice([0.5, 0.6, 0.8], 2, label="sign", runs=["sign-1"]))
    told = by_rule(read_study(folder), frame)["edge of a grid"]
    assert "clip: lr=1 is the largest of the grid: widen it" in told
    assert "sign" not in told  # it has no run in this study
    tunings(folder, choice([0.5, 0.8, 0.6], 1, runs=[name], label="typed"))
    (folder / "tuning" / "1.json").unlink()
    assert f"  {study.tunings[0][0].sentence}" in text
    (folder / "tuning" / "0.json").write_text('{"label": "clip"}', "utf-8")
    assert "is not the choice of an arm" in overview(read_study(folder))


def test_scores_are_frames_by_key_at_the_chosen_values_of_the_other_keys(tmp_path: Path) -> None:
    content = choice([0.5, 0.8, 0.6], 1)
    content["axes"] = [AXIS, {"key": "opt", "values": ["SGD", "Adam"], "by_log": False}]
    content["chosen"] = {"lr": 0.1, "opt": "SGD"}
    content["rows"] = [
        {"place": 2 * a + b, "values": {"lr": lr, "opt": opt}, "seed": 1, "score": lr / 10}
        for a, lr in enumerate(AXIS["values"])
        for b, opt in enumerate(["SGD", "Adam"])
    ]
    rates, names = tuning_frames(tunings(tmp_path, content))
    assert rates["value"].to_list() == [0.01, 0.1, 1.0]
    assert rates["is_chosen"].to_list() == [False, True, False]
    assert names.select("value", "score").rows() == [("SGD", 0.01), ("Adam", 0.01)]
    about = names.select("arm", "key", "metric", "seed").row(0)
    assert about == ("clip", "opt", "validation/accuracy", 1)
