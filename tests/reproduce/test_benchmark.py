"""The benchmark: its numbers by hand-made cells, and what its command measures again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from gradsurg.experiment.run_directory import TUNING
from gradsurg.report.arms import Arm
from gradsurg.report.study import Study
from gradsurg.reproduce import benchmark_command
from gradsurg.reproduce.benchmark import Cell, Level, hypervolume, with_tuned_sum
from gradsurg.reproduce.benchmark_command import (
    Measurement,
    _chosen,
    admission,
    comparisons,
    main,
    powers,
    read_benchmark,
    summary,
)
from gradsurg.reproduce.expected import WrongExperiment
from gradsurg.reproduce.studies import FinishedStudy
from gradsurg.stats import power

TOY = {"losses": {"a": 2.0, "b": 4.0}, "key": "task.rho", "levels": [0.5, 0.25]}
QUICK = {"levels": 1, "splits": 1, "seeds": 2, "tune_seeds": 1}
SPEC = {"margin": 0.02, "larger": 5.0, "tune": "lr=[0.1,1]", "tasks": {"toy": TOY}}
SPEC |= {"forms": {"quick": QUICK}}
Rows = Sequence[Sequence[float]]
EVERY = ["alone_0", "alone_1", "larger_0", "larger_1", "mgda", "sum"]


def cell(method: str, rows: Rows, score: float = 1, lost: float | None = 0.5) -> Cell:
    outcomes = tuple(map(tuple, rows))
    return Cell("toy", 0.5, method, (), "", {}, False, score, outcomes, 0, 1.0, lost)


def level(by_method: Mapping[str, Rows], lost: float | None = 0.5) -> Level:
    """A level with constant predictions of 2 and 4, and 0 and 2 where each is trained alone."""
    splits = dict.fromkeys(row[0] for rows in by_method.values() for row in rows)
    cells = {"alone_0": [(k, 0, 0, 9) for k in splits], "alone_1": [(k, 0, 9, 2) for k in splits]}
    every = {**cells, **by_method}
    return Level({name: cell(name, rows, lost=lost) for name, rows in every.items()}, [2, 4], 0.02)


def test_a_hypervolume_is_the_union_of_the_boxes_below_the_reference() -> None:
    assert hypervolume([(1, 2), (2, 1), (2, 2), (5, 0)], (3, 3)) == 2 + 2 - 1
    assert hypervolume([(3, 1)], (3, 3)) == 0
    # three boxes of 2 x 2 x 1; each two meet in 2 x 1 x 1, all in 1
    assert hypervolume([(1, 1, 2), (1, 2, 1), (2, 1, 1)], (3, 3, 3)) == 12 - 3 * 2 + 1
    assert hypervolume([(1, 1, 2), (0, 2, 1)], (3, 3, 3)) == 4 + 6 - 2
    assert hypervolume([], (3, 3, 3)) == 0


def test_an_excess_is_a_share_of_what_is_learned_alone() -> None:
    one = level({"sum": [(1, 0, 1, 2), (1, 1, 0, 4), (2, 0, -1, 2)]})
    assert one.excess("sum") == {(1, 0): 0.25, (1, 1): 0.5, (2, 0): -0.25}
    # that of split 1 is subtracted in split 1 only: here 1 is reached alone, of 2 for a constant
    own = replace(one.cells["alone_0"], rows=((1, 0, 1, 9), (2, 0, 0, 9)))
    other = Level({**one.cells, "alone_0": own}, [2, 4], 0.02)
    assert other.excess("sum") == {(1, 0): 0, (1, 1): 0, (2, 0): -0.25}


def test_splits_are_the_unit_of_a_difference_from_three_on() -> None:
    own = [(1, 0, 1, 2), (1, 1, 0, 2), (2, 0, 0, 3), (2, 1, 0, 2), (3, 0, 0, 2), (3, 1, 2, 2)]
    plain = [(k, seed, 0, 2) for k, seed, *_ in own]
    two, three = ({"sum": plain[:n], "mgda": own[:n]} for n in (4, 6))
    assert level(two).difference("mgda").differences == (0.25, 0, 0.25, 0)  # of each seed
    assert level(three).difference("mgda").differences == (0.125, 0.125, 0.25)  # of each split
    assert level(three).difference("sum", "mgda").differences == (-0.125, -0.125, -0.25)


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        # the t interval of three is the mean -+ 4.303 sd / sqrt(3); an excess is a quarter
        ((0.6, 0.62, 0.64), "better"),
        ((0.99, 1.0, 1.01), "equivalent"),  # 0.0025 * 2.48 = 0.006 each side of 0
        ((1.04, 1.05, 1.06), "equivalent"),  # 0.0125 -+ 0.006, above 0 and within the margin
        ((1.06, 1.07, 1.08), "worse"),  # 0.0175 -+ 0.006
        ((0.9, 1.0, 1.1), "undecided"),  # -+ 0.062
        ((1.0, 1.0), "undecided"),
    ],
)
def test_a_verdict_is_that_of_the_whole_interval(losses: Sequence[float], verdict: str) -> None:
    plain = [(1, seed, 1, 2) for seed in range(len(losses))]
    one = level({"sum": plain, "mgda": [(1, seed, loss, 2) for seed, loss in enumerate(losses)]})
    assert one.verdict("mgda") == verdict


def test_an_excess_is_at_most_one_and_a_loss_must_be_learned_alone(root: Path) -> None:
    one = level({"sum": [(1, 0, 9, 3)], "mgda": [(1, 0, 2, 4)]})
    assert one.excesses("sum") == {(1, 0): (1.0, 0.5)}
    assert one.excesses("mgda") == {(1, 0): (1.0, 1.0)}
    measured = Measurement(read_benchmark(root), "quick", root, ())
    words = measured._words("toy", 0.5)
    measured.cells = [
        replace(cell(name, [(1, 0, 9, 2)]), words=own, digest=measured._digest("toy", name))
        for name, own in words.items()
    ]
    fault = "toy 0.5, split 1: a trained alone must be below 2, found 9"
    with pytest.raises(WrongExperiment, match=fault):
        measured.level("toy", 0.5)


def with_alone(first: Sequence[float], lost: float | None, splits: Sequence[int]) -> Level:
    """Three runs of sums, with these losses of the first task where it is trained alone."""
    keys = [(split, seed) for seed, split in enumerate(splits)]
    rows = {
        "tuned_sum": [(*key, 1 + seed / 10, 3 + seed / 10) for seed, key in enumerate(keys)],
        "sum": [(*key, 0, 9) for key in keys],
        "alone_0": [(*key, loss, 9) for key, loss in zip(keys, first, strict=True)],
        "alone_1": [(*key, 9, 2) for key in keys],
    }
    return level(rows, lost)


@pytest.mark.parametrize("splits", [(1, 1, 1), (1, 2, 3)])
def test_a_level_enters_if_each_loss_is_lower_alone_and_the_sum_raises_one(
    splits: Sequence[int],
) -> None:
    alone = (0.5, 0.5, 0.5)
    first, second = with_alone(alone, 0.1, splits).gaps  # of the tuned sum
    assert first.differences == pytest.approx((0.5, 0.6, 0.7))
    assert second.differences == pytest.approx((1.0, 1.1, 1.2))
    assert with_alone(alone, 0.1, splits).is_admitted
    assert not with_alone(alone, 0.09, splits).is_admitted
    assert not with_alone(alone, None, splits).is_admitted
    # gaps 0.5, 0.6, -0.3: reach below 0
    assert not with_alone((0.5, 0.5, 1.5), 0.5, splits).is_admitted


def test_a_gap_of_three_splits_is_that_of_their_means() -> None:
    one = with_alone((0.5, 0.5, 0.5, 0.5), 0.1, (1, 2, 3, 3))
    assert one.gaps[0].differences == pytest.approx((0.5, 0.6, 0.75))


def test_a_method_beyond_the_front_extends_its_hypervolume() -> None:
    # alone 0 and 2, constants 2 and 4: excesses (0.5, 0.5), (0.25, 0.8), (0.8, 0.25)
    sums = {"sum": [(1, 0, 1, 3)], "larger_0": [(1, 0, 0.5, 3.6)], "larger_1": [(1, 0, 1.6, 2.5)]}
    own = {"mgda": [(1, 0, 0.8, 2.8)], "inside": [(1, 0, 1.2, 3.2)]}
    one = level(sums | own)
    assert one.front_gain("inside") == 0
    # from 0.4 to 0.5 below 0.8, and from 0.5 to 0.8 below 0.5: both from 0.4
    assert one.front_gain("mgda") == pytest.approx(0.1 * 0.4 + 0.3 * 0.1)


def test_chances_are_those_of_the_median_spread_of_methods_without_sums() -> None:
    plain = [(1, seed, 1, 3) for seed in range(4)]
    spreads = {"larger_0": 9, "tuned_sum": 9, "mgda": 0.01, "pcgrad": 0.1, "upgrad": 0.4}
    rows = {
        name: [(1, seed, 1 + spread * (-1) ** seed, 3) for seed in range(4)]
        for name, spread in spreads.items()
    }
    one = level({"sum": plain, **rows})
    sd = 0.025 * (4 / 3) ** 0.5  # an excess is a quarter
    *powers, same = one.chances()
    assert powers == pytest.approx([power(4, sd, 0.02), power(4, sd, 0.05)])
    # an interval of 3.18 sd / 2 on each side of 0, for a margin of 0.7 sd
    assert same < 0.05
    exact = level({"sum": plain, "mgda": plain})
    assert exact.chances() == [1.0, 1.0, 1.0]


def test_the_tuned_sum_has_the_least_validation_loss() -> None:
    scores = {"sum": 3.0, "larger_0": 2.0, "larger_1": 2.5, "alone_0": 1.0, "mgda": 0.5}
    found = with_tuned_sum([cell(name, [], score) for name, score in scores.items()])
    assert [one.method for one in found] == [*scores, "tuned_sum"]
    assert replace(found[-1], method="larger_0") == found[1]


@pytest.mark.parametrize(
    ("chosen", "at_edge"), [((0.1, 0.0), False), ((0.01, 0.0), True), ((0.1, 0.5), True)]
)
def test_a_choice_at_the_end_of_its_range_is_told(
    tmp_path: Path, chosen: tuple[float, float], at_edge: bool
) -> None:
    axes = [{"key": "lr", "values": [0.01, 0.1, 1]}, {"key": "decay", "values": [0.0, 0.5]}]
    values = dict(zip(("lr", "decay"), chosen, strict=True))
    rows = [{"values": values, "score": 1}, {"values": values, "score": 2}]
    rows += [{"values": {"lr": 1, "decay": 0.5}, "score": 9}]
    tuned = {"axes": axes, "chosen": values, "rows": rows, "runs": ["mine"]}
    (tmp_path / TUNING).mkdir()
    for name, content in (("a", {"runs": ["another"]}), ("b", tuned)):
        (tmp_path / TUNING / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    study = Study(tmp_path, (Arm("mine", (SimpleNamespace(name="mine"),), {}),))
    assert _chosen(FinishedStudy(study)) == (values, at_edge, 1.5)


def test_tables_have_each_level_and_what_is_told_of_a_method(root: Path) -> None:
    losses = {"sum": (1.0, 3.0), "larger_0": (0.8, 3.0), "larger_1": (1.6, 3.0), "mgda": (0.6, 3.0)}
    losses |= {"alone_0": (0.0, 9.0), "alone_1": (9.0, 2.0)}
    measured = Measurement(read_benchmark(root), "quick", root, ())
    words = measured._words("toy", 0.5)
    for name, (a, b) in losses.items():
        one = cell(name, [(1, seed, a + seed / 1000, b) for seed in range(3)], a, lost=0.25)
        own = {"words": words[name], "digest": measured._digest("toy", name)}
        measured.cells.append(replace(one, **own, diverged=2, at_edge=name == "mgda"))
    levels = measured.titled()
    assert admission(levels) == [
        ["task", "each loss: tuned sum minus alone", "conflict", "enters"],
        ["toy 0.5", "0.800 \u00b10.000; 1.000 \u00b10.000", "25%", "yes"],
    ]
    assert powers(levels) == [
        ["task", "power at 0.02", "power at 0.05", "equivalent at 0"],
        ["toy 0.5", "100%", "100%", "100%"],
    ]
    assert comparisons(levels) == [
        [
            ["toy 0.5", "excess", "minus sum's", "minus tuned_sum's"],
            ["mgda", "0.400", "better -0.100 \u00b10.000", "better -0.050 \u00b10.000"],
            ["tuned_sum", "0.450", "better -0.050 \u00b10.000", "same"],
            ["sum", "0.500", "same", "worse 0.050 \u00b10.000"],
        ]
    ]
    assert summary(levels) == [
        ["method", "mean rank", "front", "time", "diverged", "at an edge"],
        ["mgda", "1.0", "+0.050", "1.00", "2 of 3", "1 of 1"],
        ["tuned_sum", "2.0", "+0.000", "1.00", "2 of 3", "0 of 1"],
        ["sum", "3.0", "+0.000", "1.00", "2 of 3", "0 of 1"],
    ]


def write(root: Path, change: Mapping[str, object]) -> None:
    path = root / "experiments/conflict/benchmark.yaml"
    path.write_text(yaml.safe_dump({**SPEC, **change}), encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    methods = tmp_path / "experiments/conflict/conf/method"
    methods.mkdir(parents=True)
    for name in ("sum", "mgda"):
        (methods / f"{name}.yaml").touch()
    write(tmp_path, {})
    return tmp_path


def test_a_wrong_form_is_refused_with_one_line_and_forms_are_listed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["fast"], [], ["quick", "full"]):
        assert main(words, root) == 2
        assert capsys.readouterr() == ("", "name one form of quick, or --list\n")
    assert main(["--list"], root) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"toy a, b task.rho=0.5, 0.25", "quick 1 1 x 2 1 mgda, sum"} <= {*lines}


def test_only_cells_whose_words_have_changed_are_measured_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[list[str]] = []
    runs = [
        SimpleNamespace(name="x", state=state, seed=seed, summary=end, number=lambda _: 0.5)
        for seed, (state, end) in enumerate(
            [("finished", {"test/a": 0.5, "test/b": 0.25}), ("diverged", {})]
        )
    ]
    lost = SimpleNamespace(is_empty=lambda: True)
    study = SimpleNamespace(study=SimpleNamespace(all_runs=runs, conflicts=lost))
    monkeypatch.setattr(benchmark_command, "train", trained.append)
    monkeypatch.setattr(benchmark_command, "plan_study", lambda words: None)
    monkeypatch.setattr(benchmark_command, "read_study", lambda words, plan: study)
    monkeypatch.setattr(benchmark_command, "_chosen", lambda ended: ({"lr": 0.1}, True, 0.5))
    monkeypatch.setattr(benchmark_command, "split_of", lambda run: 1)

    def measured(*overrides: str, **change: object) -> list[str]:
        """Measure anew with a changed spec; return the methods that were lacking."""
        write(root, change)
        trained.clear()
        one = Measurement(read_benchmark(root), "quick", root, overrides)
        before = one.known("toy", 0.5)
        one.measure("toy", 0.5)
        stored = json.loads(one.path.read_text(encoding="utf-8"))
        assert sorted(row["method"] for row in stored) == EVERY
        diverged = [1, 1, 2.0, 4.0]  # as a constant prediction
        assert all(row["rows"] == [[1, 0, 0.5, 0.25], diverged] for row in stored)
        assert all((row["diverged"], row["at_edge"]) == (1, True) for row in stored)
        return sorted(set(EVERY) - {*before})

    assert measured() == EVERY
    assert len(trained) == 6 + 6  # the tuning of each, then what it chose
    assert all("seeds=1" in words for words in trained[:6])
    assert any("+method=mgda" in words for words in trained)
    final = {"lr=0.1", "task.split_seed=1", "tune=null"}
    assert all(final <= {*words} for words in trained[6:])
    # each loss alone is tuned by itself, the rest by the sum of all
    metrics = [word for words in trained[:6] for word in words if word.startswith("metric=")]
    assert metrics == ["metric=test/a", "metric=test/b"]
    assert measured() == []
    assert trained == []
    assert measured(tune="lr=[1]") == ["alone_0", "alone_1", "larger_0", "larger_1"]
    assert len(trained) == 4 + 4
    assert measured(larger=2.0, tune="lr=[1]") == ["larger_0", "larger_1"]
    assert measured("steps=5", larger=2.0, tune="lr=[1]") == EVERY
    method = root / "experiments/conflict/conf/method/mgda.yaml"
    method.write_text("tune: lr=[1]", encoding="utf-8")
    assert measured("steps=5", larger=2.0, tune="lr=[1]") == ["mgda"]
    (root / "experiments/conflict/task.py").touch()
    assert measured("steps=5", larger=2.0, tune="lr=[1]") == []
    (root / "experiments/conflict/task.py").write_text("pass", encoding="utf-8")
    assert measured("steps=5", larger=2.0, tune="lr=[1]") == EVERY
    runs[1].state = "failed"
    with pytest.raises(WrongExperiment, match=r"toy, .*: the run x is failed"):
        measured("steps=6")
