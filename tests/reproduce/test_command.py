"""The command of a reproduction: verdicts, records, errors and exit codes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import gradsurg
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.report.arms import group
from gradsurg.report.load import LoadedRun
from gradsurg.report.study import Study
from gradsurg.reproduce import command, studies
from gradsurg.reproduce.expected import Drawing, WrongExperiment, papers, read_expected
from gradsurg.reproduce.figures import draw
from gradsurg.reproduce.judge import Judgement, judge, mean_with_interval
from gradsurg.reproduce.record import (
    BEGIN,
    filled,
    make_record,
    read_record,
    recorded_verdict,
    tables,
    write_record,
)
from gradsurg.reproduce.studies import FinishedStudy, PlannedRun, StudyPlan
from tests.conftest import Ended

ROOT = Path(__file__).parents[2]
BAND = {"name": "low_enough", "says": "It is low.", "runs": {"label": "clip"}, "high": 0.5}
MINI = {
    "claim": "Clipping helps.",
    "source": "Nobody 2000",
    "published": "0.4",
    "quick": ["simple_transforms"],
    "bands": [{**BAND, "metric": "test/loss"}],
}
TIMES = {"time/train_s": 60, "time/step_ms": 2.5, "hardware": "a small machine"}
LOSSES = {("clip", 0): 0.25, ("clip", 1): 0.5, ("none", 0): 2.0}
Reproduce = Callable[..., Ended]


def found(label: str, seed: int, summary: Mapping[str, object] | None, folder: Path) -> LoadedRun:
    return LoadedRun(
        path=folder / f"{label}-seed{seed}-0",
        state="finished" if summary else "failed",
        arm="control" if label == "none" else "treated",
        label=label,
        seed=seed,
        config={"seed": seed, "task": {"start": [1, 2]}, "transform": {label: {}}},
        summary=dict(summary) if summary else None,
    )


def study_of(runs: Sequence[LoadedRun], folder: Path) -> Study:
    return Study(folder, group(runs))


def foreseen(label: str, seed: int) -> PlannedRun:
    known = {"label": label, "seed": seed, "task.start": [1, 2]}
    return PlannedRun(known, 10, ("test/loss", "test/other-loss"), {"train/loss": 5})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with one experiment."""
    studies = tmp_path / "conf" / "experiment"
    studies.mkdir(parents=True)
    (studies / "simple_transforms.yaml").touch()
    expect(tmp_path, MINI)
    return tmp_path


def expect(root: Path, told: object, paper: str = "mini") -> None:
    folder = root / "experiments" / paper
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "expected.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")


@pytest.fixture
def losses() -> dict[tuple[str, int], float | None]:
    """What the runs of the study come to; None has failed."""
    return dict(LOSSES)


@pytest.fixture
def reproduce(
    root: Path,
    losses: dict[tuple[str, int], float | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Reproduce:
    """The command, with a runner that trains nothing."""

    def run_study(name: str, words: list[str], planned: StudyPlan) -> FinishedStudy:
        folder = root / "runs" / name
        runs = [
            found(*who, None if loss is None else {"test/loss": loss, **TIMES}, folder)
            for who, loss in losses.items()
        ]
        return FinishedStudy(study_of(runs, folder))

    planned = StudyPlan(
        root, {f"{label}-{seed}": foreseen(label, seed) for label, seed in losses}, 10
    )
    monkeypatch.setattr(studies, "run_study", run_study)
    monkeypatch.setattr(studies, "plan_study", lambda name, words: planned)

    def reproduced(*words: str) -> Ended:
        code = command.main(words, root)
        return Ended(code, *capsys.readouterr())

    return reproduced


def test_a_claim_whose_bands_hold_gives_exit_code_0(reproduce: Reproduce) -> None:
    ended = reproduce("mini")
    assert ended.code == 0
    assert "low_enough  <= 0.5  0.25 to 0.5     2  holds" in ended.out
    assert "mini, quick form: holds\n" in ended.out


def test_a_band_that_does_not_hold_gives_exit_code_1_and_is_named(
    reproduce: Reproduce, losses: dict[tuple[str, int], float | None]
) -> None:
    losses["clip", 1] = 0.51
    ended = reproduce("mini")
    assert ended.code == 1
    assert "mini, quick form: does not hold" in ended.out
    assert "low_enough does not hold: It is low. Found: 0.25 to 0.51." in ended.out


def test_a_band_about_the_mean_is_held_against_the_mean(root: Path, reproduce: Reproduce) -> None:
    expect(root, {**MINI, "bands": [{**MINI["bands"][0], "high": 0.4, "of": "mean"}]})
    ended = reproduce("mini")
    assert ended.code == 0
    # of two seeds, which have no interval
    assert "0.375     2  in the mean; interval undecided" in ended.out
    assert "mini, quick form: in the mean; interval undecided\n" in ended.out


@pytest.mark.parametrize(
    ("values", "bounds", "result"),
    [
        ([0.1, 0.2, 0.3], {"high": 0.5}, "holds"),
        ([0.1, 0.2, 0.3], {"high": 0.4}, "in the mean; interval undecided"),
        ([0.1, 0.2, 0.3], {"high": 0.1}, "does not hold"),
        # half of the 95 % interval is 0.248, of the 90 % interval 0.169
        ([0.1, 0.2, 0.3], {"low": 0.0, "high": 0.4}, "holds"),
        ([0.1, 0.2, 0.3], {"low": 0.1, "high": 0.4}, "in the mean; interval undecided"),
        ([0.1, 0.2, 0.3], {"low": 0.0}, "in the mean; interval undecided"),
        ([0.25, 0.25, 0.25], {"high": 0.25}, "holds"),
    ],
)
def test_a_mean_whose_interval_reaches_over_a_bound_is_undecided(
    root: Path, values: list[float], bounds: dict[str, float], result: str
) -> None:
    runs = [found("clip", seed, {"test/loss": loss}, root) for seed, loss in enumerate(values)]
    band = {"high": None, **bounds}
    assert judged_with(root, runs, of="mean", **band).result == result


def test_the_verdict_is_that_of_the_weakest_band(root: Path, reproduce: Reproduce) -> None:
    weak = {**MINI["bands"][0], "name": "weak", "high": 0.4, "of": "mean"}
    expect(root, {**MINI, "bands": [*MINI["bands"], weak], "conditions": "fewer steps"})
    ended = reproduce("mini", "--write")
    assert "quick form: in the mean; interval undecided (fewer steps)" in ended.out
    text = (root / "experiments" / "mini" / "README.md").read_text(encoding="utf-8")
    start = "Verdict of the quick form: **in the mean; interval undecided**."
    assert f"{start} Conditions: fewer steps." in text
    # a band that was added since, and one whose bound was moved, have not been measured
    for added in ({**MINI["bands"][0], "name": "new"}, {**weak, "high": 0.45}):
        kept = [band for band in (*MINI["bands"], weak) if band["name"] != added["name"]]
        expect(root, {**MINI, "bands": [*kept, added]})
        assert "| not measured | 2 |" not in reproduce("--table").out
        assert "mini   not measured" in reproduce("--list").out


def test_bands_hold_again_by_chance(root: Path) -> None:
    # 7 of 8 or more, of 8 seeds that all have it: 1 plug-in; with Jeffreys' prior 0.897 (scipy
    # 1.17: betabinom.sf(6, 8, 8.5, 0.5)); at most 3 of 8, where 1 has it: 0.9887 binomial
    for k, low, high, wanted in ((8, 7, None, (1.0, 0.897)), (1, None, 3, (0.9887, 0.919))):
        runs = [found("clip", s, {"until/reached": int(s < k)}, root) for s in range(8)]
        band = {"metric": "until/reached", "of": "total", "count": 8, "low": low, "high": high}
        assert judged_with(root, runs, **band).chances == pytest.approx(wanted, abs=1e-3)
    runs = [found("clip", s, {"test/loss": 0.1 * s}, root) for s in range(1, 4)]
    # three of three below 0.3 where mean 0.2 and deviation 0.1: Phi(1)^3, and less of new ones
    plug_in, predicted = judged_with(root, runs, high=0.3).chances or (0, 0)
    assert plug_in == pytest.approx(0.8413**3, abs=1e-3)
    assert predicted < plug_in
    # the mean of three below 0.3: Phi(sqrt(3)); predicted t_2 at sqrt(3 / 2)
    chances = judged_with(root, runs, of="mean", high=0.3).chances
    assert chances == pytest.approx((0.9584, 0.8273), abs=0.01)
    one = [found("clip", 0, {"test/loss": 0.1}, root)]
    assert judged_with(root, one).chances is None
    assert judged_with(root, [*one, *one]).chances is None  # not two seeds


def test_diverged_runs_are_counted_in_the_table_of_arms(root: Path) -> None:
    runs = [found("clip", seed, {"test/loss": 0.25}, root) for seed in range(3)]
    runs[1:] = [replace(run, state="diverged") for run in runs[1:]]
    expected = read_expected(root, "mini")
    for chosen, mean in ((runs, "0.25, diverged 2/3"), (runs[1:], "diverged 2/2")):
        studies = {"simple_transforms": study_of(chosen, root)}
        record = make_record(expected, "quick", judge(expected, studies), studies, 1.0, {})
        assert [row["mean"] for row in record["arms"]] == [mean]
    assert judged_with(root, runs, metric="diverged", of="total", count=3, low=2, high=None).holds
    few = judged_with(root, runs, metric="diverged", of="total", count=3, low=3, high=None)
    assert (few.measured, few.holds) == ("2 of 3", False)


def test_a_band_about_a_missing_number_is_refused_before_training(
    root: Path, reproduce: Reproduce
) -> None:
    expect(root, {**MINI, "bands": [{**MINI["bands"][0], "runs": {"label": "clp"}}]})
    fault = "has no run of label: clp. There are: clip, none. Did you mean 'clip'?"
    ended = reproduce("mini")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"mini: low_enough: simple_transforms {fault}\n"
    other = reproduce("mini", "seeds=1")  # then there can be other runs
    assert (other.code, other.err) == (1, "")
    assert "does not hold, with seeds=1, which is not what the claim is about" in other.out


def test_a_diverged_run_has_not_reached_its_goal(root: Path) -> None:
    runs = [found("clip", seed, {"until/reached": 1, "test/loss": 1.0}, root) for seed in (0, 1)]
    diverged = found("clip", 2, {"until/reached": 0, "test/loss": 1.0}, root)
    runs.append(replace(diverged, state="diverged"))
    change = {"metric": "until/reached", "of": "total", "count": 3, "high": 2}
    assert judged_with(root, runs, **change).measured == "2 of 3"
    assert judged_with(root, runs).measured == "1 of 3 runs: diverged"


def test_runs_that_failed_are_not_left_out_of_a_band(
    reproduce: Reproduce, losses: dict[tuple[str, int], float | None]
) -> None:
    losses["clip", 1] = None
    ended = reproduce("mini")
    assert ended.code == 1
    assert "Found: 1 of 2 runs: failed." in ended.out


def judged_with(root: Path, runs: list[LoadedRun], /, **change: object) -> Judgement:
    expect(root, {**MINI, "bands": [{**BAND, "metric": "test/loss", **change}]})
    (judged,) = judge(read_expected(root, "mini"), {"simple_transforms": study_of(runs, root)})
    return judged


def test_the_value_of_the_same_seed_is_taken_off(root: Path) -> None:
    own = {("clip", 0): 1.0, ("clip", 1): 2.0, ("none", 1): 1.75, ("none", 0): 0.5}
    runs = [found(*who, {"test/loss": loss}, root) for who, loss in own.items()]
    judged = judged_with(root, runs, minus={"label": "none"})
    assert (judged.values, judged.holds) == ((0.5, 0.25), True)
    assert not judged_with(root, runs, minus={"label": "none"}, high=0.4).holds
    alone = judged_with(root, runs[:3], minus={"label": "none"})
    assert alone.measured == "runs and minus must be one run each of the same seeds"
    assert not alone.holds
    assert judged_with(root, runs, minus={"label": "sign"}).measured == "no run has these keys"
    same = judged_with(root, runs, minus={"label": "clip"})
    assert (same.measured, same.holds) == ("runs and minus are the same runs", False)
    failed = [*runs[:3], found("none", 0, None, root)]
    assert judged_with(root, failed, minus={"label": "none"}).measured == "1 of 4 runs: failed"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.876, 0.889, 0.892], "0.886 (0.865 to 0.907)"),
        ([-0.021, 0.002, -0.004], "-0.008 (-0.037 to 0.022)"),
        ([1240.0, 960.0, 1680.0], "1290 (390 to 2190)"),
        ([0.12, 0.13, 0.14], "0.130 (0.105 to 0.155)"),
        ([-0.001, 0.0, 0.001], "0.0000 (-0.0025 to 0.0025)"),
        ([0.12, 0.14], "0.13"),
        ([0.25, 0.25], "0.25"),
        ([1e-9, 2e-9, 3e-9], "2e-09 (-4.8e-10 to 4.5e-09)"),
        ([0.123456], "0.1235"),
    ],
)
def test_a_mean_has_as_many_digits_as_its_interval_allows(values: list[float], said: str) -> None:
    assert mean_with_interval(values) == said


def test_a_total_is_held_against_the_band(root: Path) -> None:
    runs = [found("clip", seed, {"test/loss": 1}, root) for seed in range(3)]
    judged = judged_with(root, runs, of="total", low=3, high=3, count=3)
    assert (judged.measured, judged.holds) == ("3", True)
    assert not judged_with(root, runs, of="total", low=4, high=None, count=3).holds
    few = judged_with(root, runs, of="total", high=8, count=8)
    assert (few.measured, few.holds) == ("3 runs, and the band is of 8", False)


def losses_of(arms: Mapping[str, Sequence[Sequence[float]]], root: Path) -> list[LoadedRun]:
    """Three runs of each arm, with two losses in each seed."""
    return [
        found(label, seed, {"test/a": a, "test/b": b}, root)
        for label, losses in arms.items()
        for seed, (a, b) in enumerate(losses)
    ]


FRONT = {
    "metric": "test/a + test/b",
    "of": "dominating",
    "runs": {"task.start": [1, 2]},
    "minus": {"arm.sum": True},
    "high": 0,
}


@pytest.mark.parametrize(
    ("own", "dominates"),
    [
        ([(0.9, 2.9), (1.9, 3.9), (2.95, 4.9)], True),  # paired by seed: apart, each loss spreads
        ([(0.9, 3.0), (1.9, 4.0), (2.95, 5.0)], False),  # lower in one loss, equal in the other
        ([(0.9, 2.9), (1.9, 3.9), (3.50, 4.9)], False),  # one interval reaches over 0
        ([(8.9, 8.9), (8.9, 8.9), (8.95, 8.9)], False),  # below a sum that is not on the front
        ([(0.5, 9.0), (0.4, 9.0), (0.45, 9.0)], False),  # beside the front
    ],
)
def test_an_arm_dominates_the_front_by_every_interval_against_one_arm_on_it(
    root: Path, own: list[tuple[float, float]], dominates: bool
) -> None:
    sums = {
        "even": [(1.0, 3.0), (2.0, 4.0), (3.0, 5.0)],
        "lean": [(2.0, 1.0), (3.0, 2.0), (4.0, 3.0)],
        "worse": [(9.0, 9.0), (9.1, 9.1), (9.2, 9.2)],
    }
    runs = [
        replace(run, config={**(run.config or {}), "arm": {"sum": True}})
        for run in losses_of(sums, root)
    ]
    runs += losses_of({"mine": own}, root)
    judged = judged_with(root, runs, **FRONT)
    assert judged.measured == ("1 of 1 (mine)" if dominates else "0 of 1")
    assert (judged.holds, judged.chances) == (not dominates, None)
    few = judged_with(root, runs[:-1], **FRONT)
    assert few.measured == "runs and minus must have the same seeds in every arm"
    assert not few.holds


def test_arms_without_a_loss_or_without_rivals_dominate_nothing(root: Path) -> None:
    runs = losses_of({"mine": [(1.0, 1.0)], "even": [(2.0, 2.0)]}, root)
    front = {**FRONT, "minus": {"label": "even"}}
    assert judged_with(root, runs, **front).measured == "0 of 1"  # one seed has no interval
    missing = judged_with(root, runs, **{**front, "metric": "test/a + test/c"})
    assert missing.measured == "no test/a + test/c in even"
    with pytest.raises(WrongExperiment, match="minus: is required with of=dominating"):
        judged_with(root, runs, **{**front, "minus": {}})


def test_without_bounds_a_number_is_reported_and_does_not_count_as_a_band(
    root: Path, reproduce: Reproduce
) -> None:
    told = {**MINI["bands"][0], "name": "told", "high": None}
    expect(root, {**MINI, "bands": [*MINI["bands"], told], "front": "{told}"})
    ended = reproduce("mini", "--write")
    assert ended.code == 0
    (row,) = [line for line in ended.out.splitlines() if line.startswith("told ")]
    assert row.split() == ["told", "-", "0.25", "to", "0.5", "2", "reported"]
    assert "| 0.375; 1 of 1 bands hold |" in reproduce("--table").out


def test_a_study_with_other_overrides_is_not_recorded(root: Path, reproduce: Reproduce) -> None:
    ended = reproduce("mini", "seeds=1", "--write", "out=there")
    said = "--write records the study as it is configured: leave out seeds=1, or --write\n"
    assert (ended.code, ended.err) == (2, said)
    assert not (root / "experiments" / "mini" / "measured.json").exists()


@pytest.mark.parametrize(
    ("at", "expected", "quantity"),
    [
        ("end", 4.0, "test/loss"),
        ("most", 3.0, "test/loss, most"),
        ("least", 1.0, "test/loss, least"),
        (10, 3.0, "test/loss at step 10"),
        (15, None, "test/loss at step 15"),
        (20, 1.0, "test/loss at step 20"),
    ],
)
def test_a_metric_is_taken_at_the_end_or_from_the_rows(
    root: Path, at: object, expected: float | None, quantity: str
) -> None:
    run = found("clip", 0, {"test/loss": 4.0}, root)
    run.path.mkdir()
    rows = [{"step": 10, "test/loss": 3.0}, {"step": 15}, {"step": 20, "test/loss": 1.0}]
    (run.path / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8"
    )
    judged = judged_with(root, [run], at=at, high=10)
    assert judged.band.quantity == quantity
    assert judged.values == (() if expected is None else (expected,))
    if expected is None:
        assert judged.measured == f"no {quantity} in clip-seed0-0"


@pytest.mark.parametrize("kind", ["curves", "outcomes"])
def test_a_figure_shows_each_seed_of_each_arm(root: Path, kind: str) -> None:
    runs = []
    for (label, seed), loss in LOSSES.items():
        runs.append(found(label, seed, {"test/loss": loss}, root))
        runs[-1].path.mkdir()
        rows = [{"step": step, "test/loss": loss / step} for step in (1, 2)]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (runs[-1].path / "metrics.jsonl").write_text(text, encoding="utf-8")
    lone = draw(Drawing(kind, "test/loss"), study_of(runs[:1], root), root / "one")
    every = draw(Drawing(kind, "test/loss"), study_of(runs, root), root / "all")
    assert lone is not None
    assert every is not None
    assert every.name == "figure.png"
    assert lone.read_bytes() != every.read_bytes()
    assert draw(Drawing(kind, "test/accuracy"), study_of(runs, root), root) is None


def test_the_front_figure_has_a_panel_for_each_task(root: Path) -> None:
    runs = losses_of({"clip": [(1.0, 3.0), (2.0, 5.0)], "sign": [(2.0, 1.0)]}, root)
    runs += losses_of({"none": [(4.0, 4.0)], "lean": [(3.0, 5.0)]}, root)
    runs = [
        replace(
            run,
            summary={key.replace("/", "/loss_"): loss for key, loss in (run.summary or {}).items()},
            config={**(run.config or {}), "task": {"name": "own" if place > 2 else "other"}},
        )
        for place, run in enumerate(runs)
    ]
    drawn = draw(Drawing("front", "test/loss_a + test/loss_b"), study_of(runs, root), root)
    assert drawn is not None
    text = drawn.with_suffix(".svg").read_text(encoding="utf-8")
    for told in ("own: test loss of each task", "other: test loss", "loss a", "sign"):
        assert told in text
    assert draw(Drawing("front", "test/loss_a + test/loss_c"), study_of(runs, root), root) is None


def test_the_alignment_figure_has_an_angle_over_the_steps(root: Path) -> None:
    runs = [found("clip", 0, {"test/loss": 1.0}, root), found("none", 0, {"test/loss": 1.0}, root)]
    turned = (("a#0/Mm[0].1", 0.5), ("b#0", 0.25), ("b#0", None))
    for run in runs:
        run.path.mkdir()
        rows = [
            {"step": step, "site": site, "norm_before": 1.0, "transform": name, "cosine": own}
            for step, (site, cosine) in enumerate(turned, 1)
            for name, own in (("clip", cosine), ("sign", 0.9))
        ]
        (run.path / "effects.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8"
        )
    at = [("a#0/Mm[0].1", "end", 0.5), ("a#0/Mm[0].1", 1, 0.5), ("b#0", "most", 0.25)]
    for site, when, value in at:
        metric = f"effect/clip/{site}/cosine"
        expect(root, {**MINI, "bands": [{**BAND, "metric": metric, "at": when}]})
        (judged,) = judge(read_expected(root, "mini"), {"simple_transforms": study_of(runs, root)})
        assert judged.values == (value,)
    assert draw(Drawing("alignment", "clip"), study_of(runs, root), root) is not None
    assert draw(Drawing("alignment", "sign"), study_of(runs[1:], root), root) is None
    assert draw(Drawing("alignment", "reverse"), study_of(runs, root), root) is None


def test_runs_are_chosen_by_keys_of_their_config_and_metrics_are_added(root: Path) -> None:
    runs = {"task.start": [1, 2], "label": "none"}
    band = {**MINI["bands"][0], "runs": runs, "metric": "test/loss + test/loss"}
    expect(root, {**MINI, "bands": [band]})
    own = [found(*who, {"test/loss": loss}, root) for who, loss in LOSSES.items()]
    (judged,) = judge(read_expected(root, "mini"), {"simple_transforms": study_of(own, root)})
    assert judged.values == (4.0,)
    assert not judged.holds


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("test/loss - test/other-loss", -1.0),
        ("test/loss + test/loss - test/other-loss - test/loss", -1.0),
        ("test/other-loss", 3.0),
    ],
)
def test_metrics_are_subtracted(root: Path, metric: str, expected: float) -> None:
    runs = [found("clip", 0, {"test/loss": 2.0, "test/other-loss": 3.0}, root)]
    assert judged_with(root, runs, metric=metric, high=5).values == (expected,)


def examined(label: str, seed: int, folder: Path, number: float) -> LoadedRun:
    """A run of an examination of two layers, with maps of two images."""
    numbers = {"examined/rank/b": number, "examined/rank/a": 0.5, "examined/ssim/b": 0.25}
    run = found(label, seed, {**numbers, "examined/ssim/a": 0.2, "test/loss": 1.0}, folder)
    one = [[1.0, -0.5], [0.0, number]]
    told = {"images": [one, one], "maps": {name: [one, one] for name in ("trained", "b", "a")}}
    RunDirectory(run.path).write_json("examined.json", told)
    return run


def test_a_figure_of_maps_shows_each_measure_of_each_seed_and_the_maps_of_each_arm(
    root: Path,
) -> None:
    who = [("clip", 0, 0.9), ("clip", 1, 0.8), ("none", 0, 0.1)]
    runs = [examined(label, seed, root, number) for label, seed, number in who]
    drawn = draw(Drawing("maps", "examined"), study_of(runs, root), root / "all")
    fewer = draw(Drawing("maps", "examined"), study_of(runs[:1], root), root / "one")
    assert drawn is not None
    assert fewer is not None
    assert drawn.read_bytes() != fewer.read_bytes()
    text = drawn.with_suffix(".svg").read_text(encoding="utf-8")
    cells = ("rank", "ssim", "image", "trained", "b", "a", "1, clip", "1, control", "2, clip")
    assert all(f">{cell}<" in text for cell in cells)
    assert ">1, control<" not in fewer.with_suffix(".svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mino"], "there is no experiment 'mino'. There are: mini. Did you mean 'mini'?\n"),
        ([], "name a paper. There are: mini.\n"),
        (["mini", "--full"], "mini: there is no full form\n"),
    ],
)
def test_a_wrong_command_line_is_refused_with_exit_code_2(
    reproduce: Reproduce, words: list[str], said: str
) -> None:
    ended = reproduce(*words)
    assert (ended.code, ended.out, ended.err) == (2, "", said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quick": ["nowhere"]}, ": there is no study 'nowhere'. There are: simple_"),
        ({"full": ["simple_transform"]}, "Did you mean 'simple_transforms'?"),
        ({"full": ["one", "two"]}, ": full: must be as many studies as quick, in the same order"),
        ({"claims": "x"}, ": claims: is not a field here."),
        ({"bands": []}, ": bands: must have at least 1 item, found []"),
        ({"bands": [*MINI["bands"], *MINI["bands"]]}, "a name each, found low_enough twice"),
        ({"front": "a loss of {low}"}, ": front: names no band {low}"),
        ({"result": "a loss of {low}"}, ": result: names no band {low}"),
        ({"bands": [{**MINI["bands"][0], "low": 1}]}, "must be <= high, found low=1.0, high=0.5"),
        ({"bands": [{**MINI["bands"][0], "of": "total"}]}, "count: is required with of=total"),
        ({"bands": [{**MINI["bands"][0], "study": "x"}]}, "the band low_enough, found x. There a"),
        (
            {"figure": {"kind": "curves", "metric": "test/loss", "studies": ["simple"]}},
            ": figure: must name studies of quick, found simple. There are: simple_transforms. Did",
        ),
    ],
)
def test_a_wrong_expected_yaml_is_an_error_with_exit_code_2(
    root: Path, reproduce: Reproduce, change: dict[str, object], said: str
) -> None:
    expect(root, {**MINI, **change})
    ended = reproduce("--all")
    assert ended.code == 2
    assert ended.err.startswith("experiments/mini/expected.yaml: ")
    assert said in ended.err
    assert "Traceback" not in ended.err


def spaced(text: str) -> str:
    """Return a text with single spaces."""
    return " ".join(text.split())


def test_measurements_are_recorded_and_appear_in_the_tables(
    root: Path, reproduce: Reproduce
) -> None:
    assert "mini not measured - Clipping helps. -" in spaced(reproduce("--list").out)
    readme = root / "experiments" / "mini" / "README.md"
    readme.write_text("# Mini\n", encoding="utf-8")
    for _ in range(2):  # the second time in the place of the first
        assert reproduce("mini", "--write").code == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("# Mini\n\n<!-- begin")
    assert text.count("| It is low. | <= 0.5 | 0.25 to 0.5 | 2 | holds |") == 1
    assert text.count("| simple_transforms | control | 0 | test/loss | 2 | 2 |") == 1
    assert text.count("| 0, 1 | test/loss | 0.375 | 0.25, 0.5 |") == 1
    assert "Bands. Measured on a small machine, gradsurg " in text
    assert (
        json.loads((readme.parent / "measured.json").read_text(encoding="utf-8"))["verdict"]
        == "holds"
    )
    assert "mini holds 3 Clipping helps. -" in spaced(reproduce("--list").out)
    expect(root, {**MINI, "front": "a loss of {low_enough}"})
    told = "a loss of 0.375; 1 of 1 bands hold"
    row = f"Clipping helps. | 0.4 | {told} | holds | 50 % to 58 % | 3 |"
    assert row in reproduce("--table", "--write").out
    index = (root / "experiments" / "README.md").read_text(encoding="utf-8")
    assert row in index
    assert f"Measured on a small machine, gradsurg {gradsurg.__version__}, Python 3." in index
    expect(root, {**MINI, "conditions": "on a toy"})
    listed = spaced(reproduce("--list").out)
    assert "mini holds under conditions 3 Clipping helps. on a toy" in listed


def test_the_cost_of_the_full_form_is_estimated_from_measured_steps(
    root: Path, reproduce: Reproduce, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(root, {**MINI, "full": ["simple_transforms"]})
    planned = StudyPlan(root, {"a": foreseen("clip", 0)}, 3_600_000)
    monkeypatch.setattr(studies, "plan_study", lambda name, words: planned)
    said = "mini: 3,600,000 steps; the quick form has not been measured\n"
    assert reproduce("mini", "--cost").out == said
    reproduce("mini", "--write")
    said = "mini: 3,600,000 steps, 2.5 hours of one core at the quick form's pace\n"
    assert reproduce("mini", "--cost").out == said


def test_nothing_is_recorded_without_write(root: Path, reproduce: Reproduce) -> None:
    before = sorted(root.rglob("*"))
    assert reproduce("mini").code == 0
    assert reproduce("--table").code == 0
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("paper", papers(ROOT))
def test_every_experiment_has_bands_and_a_readme(paper: str) -> None:
    assert read_expected(ROOT, paper).full
    text = (ROOT / "experiments" / paper / "README.md").read_text(encoding="utf-8")
    assert f"python scripts/reproduce.py {paper}" in text
    index = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    assert f"[`{paper}`]({paper}/README.md)" in index


@pytest.mark.parametrize("paper", papers(ROOT))
def test_the_tables_of_every_experiment_are_those_of_its_record(paper: str) -> None:
    expected, folder = read_expected(ROOT, paper), ROOT / "experiments" / paper
    record = read_record(folder)
    if record is None:
        pytest.skip("not measured")
    assert tables(expected, record) in (folder / "README.md").read_text(encoding="utf-8")
    if expected.opens:
        opened = (ROOT / expected.opens).read_text(encoding="utf-8")
        assert f"{BEGIN}\n{filled(expected.result, expected, record)}\n" in opened
    index = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in index.splitlines() if f"[`{paper}`]" in line]
    assert f"| {recorded_verdict(expected, record)}" in row


def test_a_full_form_has_files_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "kurin2022"
    folder.mkdir()
    measured = ROOT / "experiments" / "kurin2022"
    record = json.loads((measured / "full.json").read_text(encoding="utf-8"))
    expected = read_expected(ROOT, "kurin2022").of("full")
    write_record(folder, expected, record, measured / "full.png")
    assert sorted(path.name for path in folder.iterdir()) == ["full.json", "full.md", "full.png"]
    for name in ("full.json", "full.md"):
        written = (folder / name).read_text(encoding="utf-8")
        assert written == (measured / name).read_text(encoding="utf-8")
    assert "MNIST" in expected.conditions


@pytest.mark.slow
def test_a_study_is_run_once_and_ignores_other_runs_in_its_folder(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ["transform=clip,sign", "model=mlp", "steps=20", "logger=none", "report=false"]
    small.append(f"out={root / 'runs'}")
    chance = {**MINI["bands"][0], "metric": "test/loss", "high": 10, "runs": {}}
    expect(root, {**MINI, "bands": [chance]})
    assert command.main(["mini", *small, "seed=0"], root) == 0
    assert "3 to train" in capfd.readouterr().err
    assert command.main(["mini", *small, "seed=0"], root) == 0
    assert "3 finished before, skipped" in capfd.readouterr().err
    assert command.main(["mini", *small, "seed=1"], root) == 0
    lines = capfd.readouterr().out.splitlines()
    # those of seed 0 lie in the same folder
    line = next(line for line in lines if line.startswith("low_enough"))
    assert line.split()[-2:] == ["3", "holds"]


@pytest.mark.full
def test_a_tuned_study_has_the_runs_with_the_chosen_values_and_the_time_of_all(root: Path) -> None:
    words = ["transform=clip", "model=mlp", "steps=20", "seed=0", "logger=none", "report=false"]
    words += ["tune='lr=[1e-9,0.1]'", "tune_seeds=1", f"out={root / 'runs'}"]
    planned = studies.plan_study("simple_transforms", words)
    study = studies.run_study("simple_transforms", words, planned)
    assert planned.steps == 6 * 20
    assert len(study.trials) == 4
    rates = {run.label: (run.config or {})["optimizer"]["lr"] for run in study.study.all_runs}
    assert rates == {"clip": 0.1, "none": 0.1}
    times = [(run.summary or {})["time/train_s"] for run in (*study.study.all_runs, *study.trials)]
    assert study.minutes == pytest.approx(sum(times) / 60)


def test_a_wheel_which_has_no_experiments_is_refused_with_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["liu2021"], None) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "needs a checkout" in printed.err


@pytest.mark.slow
def test_a_wrong_override_is_an_error(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["mini", "steps=-1"], root) == 2
    assert "steps: must be >= 0, found -1" in capfd.readouterr().err


@pytest.mark.full
def test_the_counter_examples_of_error_feedback_hold(tmp_path: Path) -> None:
    assert command.main(["karimireddy2019", f"out={tmp_path}"]) == 0
