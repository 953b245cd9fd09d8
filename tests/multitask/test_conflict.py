"""The numbers of a conflict are the same as the rows' own, also with other aggregators."""

from dataclasses import replace
from math import inf, isnan, log, nan
from weakref import ref

import pytest
import torch
from torch import Tensor

from gradsurg.aggregators.base import AggregatorContext
from gradsurg.multitask.conflict import (
    BATCH,
    EQUIVALENTS,
    MAX_MEANS,
    MAX_UNFETCHED,
    Alternative,
    Conflict,
    Conflicts,
    Measurement,
    _comparable,
    alternatives,
    compute_weights,
    conflict_of,
    numbers,
)
from gradsurg.plugins.registry import names

CONTEXT = AggregatorContext(step=4, group="shared", tasks=("a", "b"))


def made(
    rows: Tensor,
    weights: Tensor | None,
    update: Tensor,
    tasks: str = "ab",
    own: str = "mine",
    context: AggregatorContext = CONTEXT,
) -> Measurement:
    context = replace(context, tasks=tuple(tasks))
    norm = float(update.norm())
    return Measurement("mine", own, context, rows @ rows.T, weights, rows @ update, norm)


def found(rows: Tensor, weights: Tensor | None, update: Tensor, tasks: str = "ab") -> Conflict:
    return conflict_of(made(rows, weights, update, tasks))


def test_each_number_equals_the_hand_computed_one() -> None:
    rows = torch.tensor([[3.0, 0.0], [-3.0, 4.0]], dtype=torch.float64)
    weights = torch.tensor([0.75, 0.25], dtype=torch.float64)
    conflict = found(rows, weights, weights @ rows)  # d = (1.5, 1), the mean is (0, 2)
    assert (conflict.step, conflict.aggregator, conflict.group) == (4, "mine", "shared")
    assert conflict.norms == [3.0, 5.0]
    assert conflict.cosines[0][1] == conflict.cosines[1][0] == pytest.approx(-0.6)
    assert conflict.conflict_rate == 1.0
    assert conflict.norm_spread == pytest.approx(5 / 3)
    assert conflict.condition == pytest.approx(1.6 / 0.4)
    assert conflict.weights == [0.75, 0.25]
    assert conflict.decrease == pytest.approx([4.5, -0.5])
    assert conflict.cosine_to_mean == pytest.approx(2 / (3.25**0.5 * 2))
    assert conflict.norm_to_mean == pytest.approx(3.25**0.5 / 2)
    entropy = -(0.75 * log(0.75) + 0.25 * log(0.25)) / log(2)
    assert conflict.weight_entropy == pytest.approx(entropy)
    paths = numbers([conflict.row()])
    assert paths["conflict/mine/shared/cosine/a~b"] == pytest.approx(-0.6)
    assert paths["conflict/mine/shared/decrease/b"] == pytest.approx(-0.5)
    assert paths["conflict/mine/shared/norm/a"] == 3.0
    assert paths["conflict/mine/shared/weight/a"] == 0.75


def test_means_are_over_the_steps_with_a_finite_number() -> None:
    conflicts = Conflicts()
    for first in (3.0, float("nan"), 5.0):
        rows = torch.tensor([[first, 0.0], [0.0, 2.0]], dtype=torch.float64)
        conflicts.add(made(rows, torch.ones(2, dtype=torch.float64), rows.sum(0)))
    table = conflicts.table()
    assert "3 measured steps, 1 of them with a gradient that is not finite: conf" in table
    assert [line.split()[:2] for line in table.splitlines()[3:]] == [["a", "4"], ["b", "2"]]


def test_the_weights_of_other_aggregators_are_logged() -> None:
    rows = torch.tensor([[3.0, 0.0], [-3.0, 4.0]], dtype=torch.float64)
    conflicts = Conflicts()
    conflicts.add(made(rows, None, rows.sum(0), own="sum"))
    (conflict,) = conflicts.fetch()
    paths = numbers([conflict.row()])
    assert paths["others/mine/shared/mean/weight/b"] == 0.5
    assert paths["conflict/mine/shared/cosine_to/mean"] == pytest.approx(1.0)
    ours = [path for path in paths if path.startswith("others/")]
    assert len(ours) == 2 * len(conflict.others)
    short = numbers([conflict.row()], others=False)
    assert len(short) < 20 < len(paths)
    assert short.items() <= paths.items()
    assert not any(path.startswith("others/") or "cosine_to/" in path for path in short)


def test_of_many_groups_the_means_are_logged() -> None:
    rows = [
        replace(
            found(torch.tensor([[3.0, 4.0], [k, 0.0]]), None, torch.ones(2)), group=f"{k}"
        ).row()
        for k in range(1, 14)
    ]
    assert numbers(rows)["conflict/mine/mean/norm/b"] == 7
    assert {path.split("/")[2] for path in numbers(rows)} == {"mean"}
    for each in (numbers(rows, log="sites"), numbers(rows[:12])):
        assert each["conflict/mine/12/norm/b"] == 12
        assert "conflict/mine/mean/norm/b" not in each


def test_undefined_numbers_are_nan_and_not_logged() -> None:
    rows = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    conflict = found(rows, None, torch.zeros(2, dtype=torch.float64))
    assert conflict.cosines == [[1.0, 0.0], [0.0, 0.0]]
    assert conflict.conflict_rate == 0.0
    assert conflict.norm_spread == 1.0  # of those that are not zero
    assert conflict.condition == inf
    assert conflict.weights == []
    assert isnan(conflict.cosine_to_mean)
    assert isnan(conflict.weight_entropy)
    said = numbers([conflict.row()])
    assert "conflict/mine/shared/cosine_to_mean" not in said
    assert not any("weight" in path for path in said)


def asked(
    own: str, context: AggregatorContext, gramian: Tensor, products: Tensor, norm: float
) -> dict[str, Alternative]:
    (others,) = alternatives([Measurement("mine", own, context, gramian, None, products, norm)])
    return others


def test_other_aggregators_have_the_weights_and_cosine_of_their_updates() -> None:
    rows = torch.randn(3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    context = AggregatorContext(2, 0, "shared", ("a", "b", "c"), losses)
    update = rows[0] + 2 * rows[1]
    others = asked("mgda", context, rows @ rows.T, rows @ update, float(update.norm()))
    asks = {name: own for name, own, _ in _comparable(3)}
    assert set(others) == set(asks) - {"mgda"}
    assert "agem" not in asks  # which is for two tasks
    assert set(asks) < set(names("aggregators"))
    for name, other in others.items():
        theirs = asks[name](rows, context)
        cosine = torch.cosine_similarity(theirs, update, dim=0).item()
        assert other.cosine == pytest.approx(cosine, abs=1e-9), name
        weights = torch.tensor(other.weights, dtype=torch.float64)
        torch.testing.assert_close(weights @ rows, theirs)


def test_an_aggregator_that_refuses_two_tasks_is_left_out() -> None:
    rows = torch.eye(2, dtype=torch.float64)
    losses = torch.ones(2, dtype=torch.float64)
    context = AggregatorContext(0, 0, "shared", ("a", "b"), losses)
    others = asked("sum", context, rows, rows.sum(0), 2**0.5)
    assert "krum" not in others
    assert {"pcgrad", "agem"} < set(others)
    assert asked("sum", context, rows * torch.nan, rows.sum(0), 2**0.5) == {}


def awkward(count: int, seed: int) -> Tensor:
    """Rows that are independent, or dependent, or opposite to others, or zero."""
    rows = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed)).double()
    match seed % 4:
        case 1:
            rows[-1] = rows[:-1].mean(0)
        case 2:
            rows[-1] = -2 * rows[0]
        case 3:
            rows[-1] = 0
    return rows


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("scale", [1e-6, 0.01, 0.1, 1.0, 1e3])
def test_equivalent_aggregators_have_their_own_weights(count: int, scale: float) -> None:
    asks = {name: (own, state) for name, own, state in _comparable(count)}
    for seed in range(8):
        rows = awkward(count, seed) * scale
        context = AggregatorContext(
            seed, 0, "shared", losses=torch.ones(count, dtype=torch.float64)
        )
        update = rows.mean(0)
        others = asked("mean", context, rows @ rows.T, rows @ update, float(update.norm()))
        for name, other in EQUIVALENTS.items():
            if scale >= 1:
                assert others[name] is others[other]  # or nothing is saved
            own = compute_weights(*asks[name], rows @ rows.T, context)
            theirs = torch.tensor(others[name].weights, dtype=torch.float64)
            torch.testing.assert_close(theirs, own)
            result = own @ rows
            if result.norm() > 1e-9 * scale:
                cosine = torch.cosine_similarity(result, update, dim=0).item()
                assert others[name].cosine == pytest.approx(cosine, abs=1e-6)


@pytest.mark.parametrize("losses", [(1.0, 0.0), (1.0, nan), (1.0, -0.1), None])
def test_an_aggregator_that_refuses_the_losses_is_left_out(losses: tuple[float] | None) -> None:
    rows = torch.eye(2, dtype=torch.float64)
    values = None if losses is None else torch.tensor(losses, dtype=torch.float64)
    others = asked("mean", replace(CONTEXT, losses=values), rows, rows.sum(0), 2**0.5)
    refuses = losses is None or min(losses) < 0
    assert ("uncertainty_weighting" not in others) == refuses
    assert ("grad_norm" not in others) == refuses


def test_conflicts_fetched_together_have_separate_alternatives() -> None:
    conflicts, alone = Conflicts(), []
    for number in range(21):
        count = 2 + number % 3
        rows = awkward(count, number)
        own, context = ("mean", "mgda")[number % 2], AggregatorContext(number, 0, "shared")
        one = made(rows, None, rows.mean(0), "abcd"[:count], own, context)
        conflicts.add(one, compare=bool(number % 5))
        alone.append(alternatives([one])[0] if number % 5 else {})
    fetched = conflicts.fetch()
    assert [one.others for one in fetched] == alone
    assert [len(one.tasks) for one in fetched] == [2 + number % 3 for number in range(len(alone))]
    assert all("mean" not in one and "mgda" in one for one in alone[2::10])


def test_the_newest_conflicts_are_kept_until_fetched_and_the_means_are_of_all() -> None:
    conflicts = Conflicts()
    assert conflicts.table() == "no conflict was measured"
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    first, count = made(rows, None, rows[0]), MAX_UNFETCHED + BATCH + 2
    oldest = ref(first)
    conflicts.add(first)
    del first
    for number in range(1, count):
        conflicts.add(made(rows * (1 + number % 2), None, rows[0]))
    assert oldest() is None
    fetched = conflicts.fetch()
    assert len(fetched) == MAX_UNFETCHED
    assert conflicts.fetch() == []
    said = conflicts.table()
    assert f"mine at shared, {count} measured steps: conflict rate 0" in said
    assert "1.5" in said.splitlines()[3].split()  # the mean norm


def test_the_conflict_rate_is_over_the_pairs_with_a_cosine() -> None:
    rows = torch.tensor([[1.0, 0.0], [-1.0, 1.0], [torch.nan, 0.0]], dtype=torch.float64)
    assert repr(found(rows, None, rows[0], "abc").conflict_rate) == "1.0"
    assert isnan(found(rows[1:], None, rows[0]).conflict_rate)
    assert found(rows[:1], None, rows[0], "a").conflict_rate == 0.0


def test_further_sets_of_tasks_have_no_means_and_are_counted() -> None:
    rows = torch.eye(2, dtype=torch.float64)
    conflicts = Conflicts()
    for number in range(MAX_MEANS + 3):
        for _ in range(2):
            conflicts.add(made(rows, None, rows[0], "a" + chr(ord("b") + number)))
    said = conflicts.table()
    assert said.count("2 measured steps") == MAX_MEANS
    assert said.endswith("\n\n6 conflicts of further tasks are not in these means")


def test_the_table_averages_weights_over_the_steps_that_have_them() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    conflicts, without = Conflicts(), Conflicts()
    without.add(made(rows, None, rows[0]))
    for first in (None, 1.0, 2.0, None):
        weights = None if first is None else torch.tensor([first, 2.0], dtype=torch.float64)
        conflicts.add(made(rows, weights, rows[0]))
    _, head, _, first_row, _ = map(str.split, conflicts.table().splitlines())
    assert head[:4] == ["task", "norm", "weight", "decrease"]
    assert first_row[1:4] == ["1", "1.5", "1"]
    assert "weight" not in without.table()
