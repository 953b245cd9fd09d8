"""The benchmark: its numbers by hand-made cells, and what its command measures again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from gradsurg.reproduce import benchmark_command
from gradsurg.reproduce.benchmark import Cell, Level, hypervolume, with_tuned_sum
from gradsurg.reproduce.benchmark_command import Measurement, main, read_benchmark
from gradsurg.reproduce.expected import WrongExperiment

TOY = {"losses": {"a": 2.0, "b": 4.0}, "key": "task.rho", "levels": [0.5, 0.25]}
QUICK = {"levels": 1, "splits": 1, "seeds": 2, "tune_seeds": 1}
SPEC = {"margin": 0.02, "larger": 5.0, "tune": "lr=[0.1,1]", "tasks": {"toy": TOY}}
SPEC |= {"forms": {"quick": QUICK}}
Rows = Sequence[Sequence[float]]
EVERY = ["alone_0", "alone_1", "larger_0", "larger_1", "mgda", "sum"]


def cell(method: str, rows: Rows, score: float = 1, lost: float | None = 0.5) -> Cell:
    return Cell("toy", 0.5, method, (), {}, score, tuple(map(tuple, rows)), 1.0, lost)


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


def with_alone(first: Sequence[float], lost: float | None) -> Level:
    """Three seeds of sums, with these losses of the first task where it is trained alone."""
    rows = {
        "sum": [(1, seed, 1 + seed / 10, 3 + seed / 10) for seed in range(3)],
        "larger_0": [(1, seed, 1, 9) for seed in range(3)],
        "alone_0": [(1, seed, loss, 9) for seed, loss in enumerate(first)],
        "alone_1": [(1, seed, 9, 2) for seed in range(3)],
    }
    return level(rows, lost)


def test_a_level_enters_if_each_loss_is_lower_alone_and_the_sum_raises_one() -> None:
    alone = (0.5, 0.5, 0.5)
    first, second = with_alone(alone, 0.1).gaps  # to the plain sum, the better one
    assert first.differences == pytest.approx((0.5, 0.6, 0.7))
    assert second.differences == pytest.approx((1.0, 1.1, 1.2))
    assert with_alone(alone, 0.1).is_admitted
    assert not with_alone(alone, 0.09).is_admitted
    assert not with_alone(alone, None).is_admitted
    assert not with_alone((0.5, 0.5, 1.5), 0.5).is_admitted  # gaps 0.5, 0.6, -0.3: reach below 0


def test_a_method_beyond_the_front_extends_its_hypervolume() -> None:
    sums = {"sum": [(1, 0, 10, 10)], "larger_0": [(1, 0, 5, 20)], "larger_1": [(1, 0, 20, 5)]}
    own = {"mgda": [(1, 0, 8, 8)], "inside": [(1, 0, 12, 12)]}
    one = level(sums | own)
    # The reference is 22, 22; the points alone are (0, 9) and (9, 2). The boxes of the front:
    # from 0 to 9 it is 13 high, from 9 to 22 it is 20.
    whole = 9 * 13 + 13 * 20
    assert one.front_gain("inside") == 0
    assert one.front_gain("mgda") == pytest.approx(1 * 1 / whole)  # from 8 to 9, from 8 to 9


def test_the_tuned_sum_has_the_least_validation_loss() -> None:
    scores = {"sum": 3.0, "larger_0": 2.0, "larger_1": 2.5, "alone_0": 1.0, "mgda": 0.5}
    found = with_tuned_sum([cell(name, [], score) for name, score in scores.items()])
    assert [one.method for one in found] == [*scores, "tuned_sum"]
    assert replace(found[-1], method="larger_0") == found[1]


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
    monkeypatch.setattr(benchmark_command, "_chosen", lambda ended: ({"lr": 0.1}, 0.5))
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
        return sorted(set(EVERY) - {*before})

    assert measured() == EVERY
    assert len(trained) == 6 + 6  # the tuning of each, then what it chose
    assert all("seeds=1" in words for words in trained[:6])
    assert any("+method=mgda" in words for words in trained)
    final = {"lr=0.1", "task.split_seed=1", "tune=null"}
    assert all(final <= {*words} for words in trained[6:])
    assert measured() == []
    assert trained == []
    assert measured(tune="lr=[1]") == ["alone_0", "alone_1", "larger_0", "larger_1"]
    assert len(trained) == 4 + 4
    assert measured(larger=2.0, tune="lr=[1]") == ["larger_0", "larger_1"]
    assert measured("steps=5", larger=2.0, tune="lr=[1]") == EVERY
    runs[1].state = "failed"
    with pytest.raises(WrongExperiment, match=r"toy, .*: the run x is failed"):
        measured("steps=6")
