"""check_aggregator: counterexamples of properties and violations of rules."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators.base import (
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    Entrywise,
    LossWeighting,
    Weighting,
)
from gradsurg.testing import Table, Verdict, check_aggregator
from gradsurg.testing.aggregators import PROPERTY_CHECKS, RULES


def mean(rows: Tensor) -> Tensor:
    return rows.mean(0)


def own_random(rows: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(rows) * rows.shape[1])
    return torch.rand(len(rows), generator=generator).to(rows) @ rows


def test_a_plain_function_is_checked_and_its_properties_are_listed() -> None:
    table = check_aggregator(mean)
    assert table.name == "mean"
    assert table.holds == gs.Mean().properties
    assert not any(verdict.declared for verdict in table.verdicts)
    assert all(verdict.holds for verdict in table.rules)


def test_the_table_is_text_with_a_counterexample() -> None:
    lines = str(check_aggregator(mean, declared=["homogeneous"])).splitlines()
    assert lines[0] == "mean"
    assert "  homogeneous               yes" in lines
    assert "  permutation_invariant     holds, not declared" in lines
    (line,) = [line for line in lines if "non_conflicting" in line]
    assert line.split()[1] == "no"
    assert "[[1.0, 0.0], [-3.0, 0.0]]: the cosine of the result and row 0 is -1" in line
    assert hash(Table("a", (), ())) == hash(Table("a", (), ()))
    assert Verdict("a", True, False).broken
    assert not Verdict("a", False, False).broken


BREAKS: dict[AggregatorProperty, Callable[[Tensor], Tensor]] = {
    "non_conflicting": mean,
    "permutation_invariant": lambda rows: rows[0] + 2 * rows[-1],
    "linear_under_scaling": lambda rows: torch.nn.functional.normalize(rows).sum(0),
    "scale_invariant": mean,
    "homogeneous": lambda rows: torch.nn.functional.normalize(rows.mean(0), dim=0),
    "strongly_stationary": lambda rows: rows.median(0).values,
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_property_that_does_not_hold_is_caught_where_it_is_declared(
    name: AggregatorProperty,
) -> None:
    assert name not in check_aggregator(BREAKS[name], count=5).holds
    with pytest.raises(
        AssertionError, match=f"^.* lacks declared properties or breaks rules:\n  {name}: [^\n]*$"
    ):
        check_aggregator(BREAKS[name], declared=[name], count=5)


def test_what_draws_is_not_deterministic() -> None:
    assert "deterministic" not in check_aggregator(gs.Random()).holds
    with pytest.raises(AssertionError, match="\n  deterministic: "):
        check_aggregator(gs.Random(), declared=["deterministic"])
    assert set(BREAKS) | {"deterministic"} == set(PROPERTY_CHECKS)


class Stops(Weighting):
    """An aggregator that returns nothing from the second call on."""

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset({"strongly_stationary"})

    def init(self, num_tasks: int) -> AggregatorState:
        return {"calls": torch.zeros(())}

    def weights(self, gramian: Tensor) -> Tensor:
        return torch.ones(len(gramian), dtype=torch.float64)

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        alive = (state["calls"] == 0).double()
        return alive * self.weights(gramian), {"calls": state["calls"] + 1}


def test_a_property_is_checked_with_a_past() -> None:
    with pytest.raises(AssertionError, match="\n  strongly_stationary: .* zero, but a direction"):
        check_aggregator(Stops())


class Single(Weighting):
    """An aggregator with float32 weights and without value semantics."""

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset()

    def weights(self, gramian: Tensor) -> Tensor:
        return torch.ones(len(gramian))


class Positional(Entrywise):
    """An entrywise aggregator that depends on the position of a column in its block."""

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset()

    def apply(self, rows: Tensor, context: AggregatorContext) -> Tensor:
        return rows.sum(0) * (torch.arange(rows.shape[1]) % 2)


def in_place(rows: Tensor) -> Tensor:
    return rows.mul_(2).sum(0)


def remembering(rows: Tensor) -> Tensor:
    return rows.sum(0) * torch.ones((), dtype=rows.dtype, requires_grad=True)


def narrow(rows: Tensor) -> Tensor:
    if rows.shape[1] > 5000:
        raise MemoryError("too wide")
    return rows.sum(0)


BREAK_RULES = {
    "finite": lambda rows: rows.sum(0) / rows.norm(),
    "result_like_a_row": lambda rows: rows.double().sum(0),
    "pure": in_place,
    "no_autograd_graph": remembering,
    "no_global_rng": lambda rows: torch.rand(len(rows), dtype=rows.dtype) @ rows,
    "any_memory_layout": lambda rows: rows.sum(0) * rows.stride(1),
    "propagates_nan": lambda rows: rows.nan_to_num().sum(0),
    "float64_weights": Single(),
    "any_column_block": Positional(),
    "value_semantics": Single(),
    "wide": narrow,
}


@pytest.mark.parametrize("name", BREAK_RULES)
def test_a_violated_rule_is_named(name: str) -> None:
    with pytest.raises(AssertionError, match=f"\n  {name}: "):
        check_aggregator(BREAK_RULES[name], count=2)


class Keeping(LossWeighting):
    """An aggregator that uses and keeps the losses, with or without their graphs."""

    def __init__(self, weighed: bool, kept: bool) -> None:
        self.weighed, self.kept = weighed, kept

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset()

    def init(self, num_tasks: int) -> AggregatorState:
        return {"last": torch.zeros(num_tasks, dtype=torch.float64)}

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        assert context.losses is not None
        alone = context.losses.detach()
        weights = context.losses if self.weighed else alone
        return weights * 1.0, {"last": (context.losses if self.kept else alone).clone()}


@pytest.mark.parametrize(
    ("aggregator", "fault"),
    [
        (Keeping(weighed=True, kept=False), "the result is part of a graph"),
        (Keeping(weighed=False, kept=True), "'last' of the state is part of a graph"),
    ],
)
def test_the_graph_of_the_losses_must_not_reach_result_or_state(
    aggregator: Keeping, fault: str
) -> None:
    with pytest.raises(AssertionError, match=f"\n  no_autograd_graph: {fault}"):
        check_aggregator(aggregator)


def test_every_rule_has_a_violation_here() -> None:
    assert set(BREAK_RULES) == {*RULES, "wide"}


def test_a_view_of_the_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="pure: the result shares memory with the rows"):
        check_aggregator(lambda rows: rows[0])


def test_all_faults_are_listed_at_once_one_line_each() -> None:
    with pytest.raises(AssertionError) as caught:
        check_aggregator(in_place, declared=["non_conflicting", "scale_invariant"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "in_place lacks declared properties or breaks rules:"
    names = [line.split(":")[0].strip() for line in lines[1:]]
    assert {"pure", "non_conflicting", "scale_invariant"} <= set(names)
    assert len(names) == len(set(names))


def test_an_aggregator_may_use_its_own_generator() -> None:
    assert "homogeneous" in check_aggregator(own_random).holds


def test_the_global_generator_is_restored() -> None:
    before = torch.get_rng_state()
    with pytest.raises(AssertionError, match="no_global_rng: draws from the global"):
        check_aggregator(BREAK_RULES["no_global_rng"], count=1)
    state = torch.get_rng_state()
    check_aggregator(gs.Random(), count=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)


def test_an_exception_is_a_violation() -> None:
    def broken(rows: Tensor) -> Tensor:
        raise ZeroDivisionError("by\nzero")

    with pytest.raises(
        AssertionError,
        match="\n  finite: normal rows 1 x 1 of .*: raises ZeroDivisionError: by zero\n",
    ):
        check_aggregator(broken)


def test_an_aggregator_for_a_fixed_number_of_tasks_is_checked_with_it() -> None:
    table = check_aggregator(gs.FixedWeights((1.0, 1.0, 1.0)))
    assert table.holds >= gs.FixedWeights((1.0, 1.0, 1.0)).properties


class Third(Weighting):
    """An aggregator that needs three tasks."""

    @property
    def least_tasks(self) -> int:
        return 3

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset({"deterministic", "homogeneous"})

    def weights(self, gramian: Tensor) -> Tensor:
        if len(gramian) < 3:
            raise ValueError("too few")
        return torch.eye(len(gramian), dtype=torch.float64)[2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Third)

    def __hash__(self) -> int:
        return 3

    def __repr__(self) -> str:
        return "Third()"


@pytest.mark.parametrize("num_tasks", [(1, 2, 3, 8), (1, 2)])
def test_an_aggregator_is_not_checked_with_fewer_tasks_than_it_needs(
    num_tasks: tuple[int, ...],
) -> None:
    table = check_aggregator(Third(), num_tasks=num_tasks)
    assert "permutation_invariant" not in table.holds


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="takes an aggregator or a function, found 3"):
        check_aggregator(3)
    with pytest.raises(TypeError, match="takes an aggregator or a function, found <class"):
        check_aggregator(gs.Mean)
    with pytest.raises(ValueError, match="^declared: must be of non_conflicting, .* found linear$"):
        check_aggregator(mean, declared=["linear"])
