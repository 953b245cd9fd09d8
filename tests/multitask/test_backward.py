"""One update of several losses: the same numbers as by hand."""

import warnings
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator, Weighting
from gradsurg.multitask.shared_parameters import Granularity
from gradsurg.plugins.registry import names
from tests.aggregators.cases import made
from tests.multitask.nets import (
    Grads,
    Net,
    Running,
    Uneven,
    at_shared,
    close,
    each,
    grads_of,
    inputs,
    joint,
    losses_of,
    oracle,
    same,
    still,
)

TRUNK = ["trunk.0.weight", "trunk.0.bias", "trunk.2.weight", "trunk.2.bias"]


def plain(model: nn.Module, losses: Mapping[str, Tensor]) -> Grads:
    model.zero_grad()
    sum(losses.values()).backward()
    return grads_of(model)


# One backward


def test_without_an_aggregator_it_equals_the_backward_of_the_sum_bit_for_bit() -> None:
    model = Net()
    found, _ = joint(model, losses_of(model), gs.Intervention(gs.Identity()))
    assert same(found, plain(model, losses_of(model)))


def test_a_list_and_a_tensor_of_losses_are_taken_too() -> None:
    model = Net()
    expected = plain(model, losses_of(model))
    found, _ = joint(model, list(losses_of(model).values()))
    assert same(found, expected)
    found, _ = joint(model, torch.stack(list(losses_of(model).values())))
    assert same(found, expected)


WEIGHING = {
    "mean": (gs.Mean(), [1 / 3, 1 / 3, 1 / 3]),
    "sum": (gs.Sum(), [1.0, 1.0, 1.0]),
    "fixed": (gs.FixedWeights((0.3, -2.0, 5.0)), [0.3, -2.0, 5.0]),
}


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("name", WEIGHING)
def test_a_loss_weighting_is_one_backward_of_the_weighted_losses_measured_or_not(
    name: str, every: int
) -> None:
    aggregator, weights = WEIGHING[name]
    model = Net()
    found, _ = joint(model, losses_of(model), at_shared(aggregator), effects_every=every)
    weighed = zip(weights, losses_of(model).items(), strict=True)
    expected = plain(model, {task: weight * loss for weight, (task, loss) in weighed})
    assert same(found, expected)


def test_the_conflict_of_a_loss_weighting_has_its_weights() -> None:
    model = Net()
    with gs.Surgery(at_shared(gs.FixedWeights((0.3, -2.0, 5.0)))).attach(model) as live:
        live.backward(losses_of(model))
    (conflict,) = live.conflicts.fetch()
    grads = each(model, losses_of(model))
    rows = torch.stack([torch.cat([grads[t][n].reshape(-1) for n in TRUNK]) for t in "abc"])
    update = torch.tensor([0.3, -2.0, 5.0]) @ rows
    assert conflict.weights == pytest.approx([0.3, -2.0, 5.0])
    assert conflict.norms == pytest.approx(rows.norm(dim=1).tolist())
    assert conflict.decrease == pytest.approx((rows @ update).tolist(), rel=1e-4)
    assert conflict.norm_to_mean == pytest.approx(float(update.norm() / rows.mean(0).norm()))


@pytest.mark.parametrize(("effects_every", "steps"), [(1, [0, 3]), (2, [0]), (0, [])])
def test_conflicts_are_measured_at_measured_steps_that_their_interval_divides(
    effects_every: int, steps: list[int]
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    surgery = gs.Surgery(at_shared(gs.Sum()))
    every = {"effects_every": effects_every, "conflict_every": 3}
    with surgery.attach(model, optimizer, **every) as live:
        for _ in range(5):
            live.backward(losses_of(model))
            optimizer.step()
    assert [conflict.step for conflict in live.conflicts.fetch()] == steps


class Reusing(Weighting):
    """One that gives the same tensor each time, with other numbers in it."""

    def __init__(self) -> None:
        self.given = torch.zeros(3, dtype=torch.float64)

    def weights(self, gramian: Tensor) -> Tensor:
        return self.given.add_(1)


def test_logged_weights_are_those_of_their_step() -> None:
    model = Net()
    with gs.Surgery(at_shared(Reusing())).attach(model) as live:
        for _ in range(2):
            live.backward(losses_of(model))
    assert [one.weights for one in live.conflicts.fetch()] == [[1.0] * 3, [2.0] * 3]


# One backward a task


GRANULARITIES = {
    "whole": [TRUNK],
    "module": [TRUNK[:2], TRUNK[2:]],
    "tensor": [[name] for name in TRUNK],
    ("trunk.2.weight", "*"): [TRUNK[2:3], TRUNK[:2] + TRUNK[3:]],
    ("trunk.2.*",): [TRUNK[2:]],
}
AGGREGATORS = {
    "uneven": Uneven(),
    "running": Running(),
    "entrywise": gs.TrimmedMean(beta=0.3),
    "of losses": gs.GradNorm(),
}


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("name", AGGREGATORS)
def test_combined_gradients_equal_those_computed_by_hand(
    name: str, granularity: Granularity
) -> None:
    model, aggregator = Net(), AGGREGATORS[name]
    found, _ = joint(model, losses_of(model), at_shared(aggregator, granularity=granularity))
    groups = [(aggregator, names) for names in GRANULARITIES[granularity]]
    close(found, oracle(model, losses_of(model), groups))


def test_pattern_groups_have_one_conflict_each_and_match_every_name() -> None:
    model = Net()
    model.other = model.trunk[0]
    item = at_shared(gs.UPGrad(), granularity=("other.*", "trunk.*"))
    with gs.Surgery(item).attach(model) as live:
        live.backward(losses_of(model))
        conflicts = live.conflicts.fetch()
    assert [one.group for one in conflicts] == ["other.*", "trunk.*"]
    assert all("mgda" in one.others for one in conflicts)
    item = at_shared(gs.UPGrad(), granularity="tensor")  # may be hundreds: not asked of each
    with gs.Surgery(item).attach(model) as live:
        live.backward(losses_of(model))
        assert not any(one.others for one in live.conflicts.fetch())


@pytest.mark.parametrize(
    ("granularity", "fault"),
    [
        (("trnk.*", "*"), r"did you mean 'trunk\.\*'\? Nothing matches 'trnk\.\*'"),
        (
            ("trunk.*", "trunk.0.*"),
            r"all parameters that match 'trunk\.0\.\*' belong to an earlier",
        ),
    ],
)
def test_a_pattern_without_parameters_is_refused(granularity: Granularity, fault: str) -> None:
    with pytest.raises(LookupError, match=f"SharedParameters.granularity: {fault}"):
        gs.Surgery(at_shared(gs.UPGrad(), granularity=granularity)).attach(Net()).__enter__()


def test_invalid_groups_are_refused() -> None:
    for wrong in ((), "trunk.*", ("re:(",), ("*", "*"), {"trunk.*", "*"}):
        with pytest.raises(ValueError, match="granularity"):
            at_shared(gs.UPGrad(), granularity=wrong)


def test_a_group_that_is_frozen_for_some_steps_is_left_out_of_them() -> None:
    model = Net()
    with gs.Surgery(at_shared(gs.UPGrad(), granularity=("trunk.0.*", "*"))).attach(model) as live:
        for frozen in (True, False):
            model.trunk[0].requires_grad_(not frozen)
            live.backward(losses_of(model))
            assert ("trunk.0.*" in live.conflicts.table()) != frozen


def test_an_aggregator_that_never_acted_warns_once_and_not_for_each_group() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gs.Surgery(at_shared(gs.UPGrad(), granularity=("trunk.0.*", "*"))).attach(Net()):
            pass
    (told,) = caught
    assert "upgrad: attached, but live.backward(losses) was never called" in str(told.message)


def test_a_group_without_shared_gradients_warns() -> None:
    item = at_shared(gs.UPGrad(), granularity=("heads.*", "*"))
    fault = r"^upgrad: no two tasks reached a parameter of its group 'heads\.\*'$"
    model = Net()
    with pytest.warns(gs.SurgeryWarning, match=fault), gs.Surgery(item).attach(model) as live:
        live.backward(losses_of(model))


def test_a_parameter_unfrozen_later_can_have_one_aggregator_only() -> None:
    model = Net()
    model.trunk[0].requires_grad_(False)
    first = gs.Intervention(gs.MGDA(), at=gs.SharedParameters("re:.*weight"))
    second = gs.Intervention(gs.UPGrad(), at=gs.SharedParameters("re:trunk.0.*|.*bias"))
    with gs.Surgery(first, second).attach(model) as live:
        model.trunk[0].requires_grad_(True)
        fault = "upgrad: 'mgda' already acts on trunk.0.weight"
        with pytest.raises(ValueError, match=fault):
            live.backward(losses_of(model))
        model.trunk[0].requires_grad_(False)
        live.backward(losses_of(model))


def test_two_aggregators_act_on_their_own_selections() -> None:
    model = Net()
    first = gs.Intervention(Uneven(), at=gs.SharedParameters("trunk.0.*"))
    second = gs.Intervention(gs.TrimmedMean(0.3), at=gs.SharedParameters("trunk.2.*"))
    found, surgery = joint(model, losses_of(model), first, second)
    assert surgery.labels == (("uneven",), ("trimmed_mean",))
    groups = [(Uneven(), TRUNK[:2]), (gs.TrimmedMean(0.3), TRUNK[2:])]
    close(found, oracle(model, losses_of(model), groups))


def test_a_parameter_has_one_aggregator() -> None:
    surgery = gs.Surgery(
        gs.Intervention(Uneven(), at=gs.SharedParameters("trunk.*")),
        gs.Intervention(Running(), at=gs.SharedParameters("*.weight")),
    )
    with (
        pytest.raises(
            ValueError, match="running: 'uneven' already acts on trunk.0.weight, trunk.2.weight"
        ),
        surgery.attach(Net()),
    ):
        pass


class Partly(Net):
    """Tasks a and b share a layer that c does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(x).tanh()
        more = self.extra(features).tanh()
        given = {"a": more, "b": more, "c": features}
        return {task: head(given[task]) for task, head in self.heads.items()}


@pytest.mark.parametrize("granularity", ["whole", "module"])
def test_a_parameter_that_two_of_three_tasks_reach(granularity: str) -> None:
    model, extra = Partly(), ["extra.weight", "extra.bias"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gs.SurgeryWarning)
        found, _ = joint(model, losses_of(model), at_shared(Uneven(), granularity=granularity))
    whole = granularity == "whole"
    groups = [TRUNK + extra] if whole else [TRUNK[:2], TRUNK[2:], extra]
    close(found, oracle(model, losses_of(model), [(Uneven(), names) for names in groups]))


def test_a_task_that_does_not_reach_a_group_warns() -> None:
    model = Partly()
    with pytest.warns(gs.SurgeryWarning, match="uneven: c does not reach .* 'extra'"):
        joint(model, losses_of(model), at_shared(Uneven(), granularity="module"))


def test_a_frozen_parameter_gets_no_gradient_until_it_is_unfrozen() -> None:
    model = Net()
    model.trunk[0].weight.requires_grad_(False)
    with gs.Surgery(at_shared(Uneven())).attach(model) as live:
        live.backward(losses_of(model))
        assert model.trunk[0].weight.grad is None
        close(grads_of(model), oracle(model, losses_of(model), [(Uneven(), TRUNK[1:])]))
        model.trunk[0].weight.requires_grad_(True)
        model.zero_grad()
        live.backward(losses_of(model))
        close(grads_of(model), oracle(model, losses_of(model), [(Uneven(), TRUNK)]))


class Tied(nn.Module):
    """One matrix is in the trunk and in a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.trunk = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.trunk.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(self.first(x).tanh()).tanh()
        return {"a": self.head(features), "b": features.square()}


def test_a_tied_parameter_is_aggregated_once_with_all_its_gradients() -> None:
    model = Tied()
    found, _ = joint(model, losses_of(model), at_shared(Uneven()))
    names = ["first.weight", "first.bias", "trunk.weight", "trunk.bias"]
    close(found, oracle(model, losses_of(model), [(Uneven(), names)]))


def test_gradients_accumulate_in_grad() -> None:
    model = Net()
    first, _ = joint(model, losses_of(model), at_shared(Uneven()))
    with gs.Surgery(at_shared(Uneven())).attach(model) as live:
        live.backward(losses_of(model))
    close(grads_of(model), {name: 2 * grad for name, grad in first.items()})


def test_while_its_trigger_does_not_fire_the_shared_parameters_get_the_sum() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    item = gs.Intervention(Uneven(), at=gs.SharedParameters(), when=gs.Steps(start=1))
    with gs.Surgery(item).attach(model, optimizer) as live:
        live.backward(losses_of(model))
        close(grads_of(model), oracle(model, losses_of(model), []))
        optimizer.step()
        live.backward(losses_of(model))
        close(grads_of(model), oracle(model, losses_of(model), [(Uneven(), TRUNK)]))
    assert [(entry.all_calls, entry.all_fired) for entry in live.ledger] == [(2, 1)]


def test_an_aggregator_of_parameters_of_one_task_warns_that_it_did_nothing() -> None:
    items = at_shared(Uneven(), pattern="trunk.*"), at_shared(gs.MGDA(), pattern="heads.a.*")
    with pytest.warns(gs.SurgeryWarning, match="mgda: attached, but no two tasks reached"):
        joint(model := Net(), losses_of(model), *items)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("items", [(), (at_shared(gs.Mean()),)])
def test_a_leaf_outside_the_model_gets_its_gradient_measured_or_not(
    items: tuple[gs.Intervention, ...], every: int
) -> None:
    model, outside = Net(), nn.Parameter(torch.tensor(3.0))
    losses = {**losses_of(model), "d": outside.square()}
    found, _ = joint(model, losses, *items, effects_every=every)
    assert outside.grad is not None
    weight = 0.25 if items else 1.0
    assert outside.grad.item() == pytest.approx(6 * weight)
    expected = plain(model, {name: weight * loss for name, loss in losses_of(model).items()})
    assert same(found, expected)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("aggregator", [Uneven(), gs.Mean()], ids=repr)
@pytest.mark.parametrize("item", [None, gs.Clip(0.1)], ids=repr)
def test_a_leaf_outside_the_model_gets_the_sum_of_its_gradients(
    item: gs.Clip | None, aggregator: Aggregator, every: int
) -> None:
    model, outside = Net(), nn.Parameter(torch.tensor([3.0, 2.0]))
    values = [losses_of(model)[task].item() for task in "ab"]
    items = [gs.Intervention(item, at=gs.Parameters("trunk.*"))] if item else []
    for _ in range(2):
        losses = {task: losses_of(model)[task] * outside.prod() for task in "ab"}
        joint(model, losses, at_shared(aggregator), *items, effects_every=every)
    weight = 0.5 if isinstance(aggregator, gs.Mean) else 1.0
    expected = 2 * weight * sum(values) * torch.tensor([2.0, 3.0])
    torch.testing.assert_close(outside.grad, expected)


def test_a_loss_that_reaches_no_parameter_of_the_model_is_refused() -> None:
    model, outside = Net(), nn.Parameter(torch.tensor(3.0))
    with pytest.raises(ValueError, match=r"losses\['d'\]: leave it out: it depends on no param"):
        joint(model, {**losses_of(model), "d": outside.square()}, at_shared(Uneven()))


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("frozen", ["all", "between two batches"])
def test_frozen_parameters_stop_no_backward_measured_or_not(frozen: str, every: int) -> None:
    model, outside = Net(), nn.Parameter(torch.tensor(3.0))
    with (
        warnings.catch_warnings(),
        gs.Surgery(at_shared(gs.Mean())).attach(model, effects_every=every) as live,
    ):
        warnings.simplefilter("ignore", gs.SurgeryWarning)
        if frozen == "all":
            model.requires_grad_(False)
        else:
            live.backward(losses_of(model), aggregate=False)
            model.trunk[0].weight.requires_grad_(False)
        live.backward({task: loss * outside for task, loss in losses_of(model).items()})
    assert outside.grad is not None


def test_a_fully_frozen_selection_warns_that_nothing_is_measured() -> None:
    model, outside = Net(), nn.Parameter(torch.tensor(3.0))
    with gs.Surgery(at_shared(gs.Mean())).attach(model) as live:
        model.requires_grad_(False)
        with pytest.warns(gs.SurgeryWarning, match="frozen ones: .* are not measured"):
            live.backward({task: loss * outside for task, loss in losses_of(model).items()})


# Dynamic graphs


class Sometimes(Net):
    """A layer of the trunk that some steps leave out, or that task c alone reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 6)
        self.mode = "shared"

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(x).tanh()
        more = self.extra(features).tanh() if self.mode != "absent" else features
        if self.mode == "shared":
            features = more
        given = {"a": features, "b": features, "c": more}
        return {task: head(given[task]) for task, head in self.heads.items()}


@pytest.mark.parametrize("every", [0, 1])
def test_shared_parameters_are_found_at_every_step(every: int) -> None:
    model = Sometimes()
    extra = ["extra.weight", "extra.bias"]
    with gs.Surgery(at_shared(Uneven())).attach(model, effects_every=every) as live:
        for step, mode in enumerate(["shared", "alone", "absent", "shared", "absent", "alone"]):
            model.mode = mode
            model.zero_grad()
            live.backward(losses_of(model, step))
            names = TRUNK + extra if mode == "shared" else TRUNK
            close(grads_of(model), oracle(model, losses_of(model, step), [(Uneven(), names)]))
            model.zero_grad()
            live.backward(losses_of(model, step))
            assert (model.extra.weight.grad is None) == (mode == "absent")


def test_earlier_shared_parameters_do_not_change_the_result() -> None:
    model = Sometimes()
    model.mode = "absent"
    draws = at_shared(gs.GradDrop())
    expected, _ = joint(model, losses_of(model), draws)
    model.mode = "shared"
    whole, _ = joint(model, losses_of(model), draws)
    # With an optimizer, which makes no step here, all of them draw alike.
    with gs.Surgery(draws).attach(model, still(model)) as live:
        for mode, wanted in (("absent", expected), ("shared", whole), ("absent", expected)):
            model.mode = mode
            model.zero_grad()
            live.backward(losses_of(model))
            assert same(grads_of(model), wanted)


def test_tasks_may_change_from_step_to_step() -> None:
    model = Net()
    with gs.Surgery(at_shared(Uneven())).attach(model) as live:
        for tasks in ("abc", "ab", "bca", "c", "abc"):
            losses = {task: losses_of(model)[task] for task in tasks}
            model.zero_grad()
            if len(tasks) > 1:
                live.backward({task: losses_of(model)[task] for task in tasks})
                close(grads_of(model), oracle(model, losses, [(Uneven(), TRUNK)]))
                continue
            live.backward({"c": losses_of(model)["c"]})
            assert model.heads["a"].weight.grad is None


# Several dtypes and shapes of memory


def test_parameters_of_two_dtypes_are_one_group() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.low, self.high = nn.Linear(4, 6), nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.high(self.low(x).tanh().double())
            return {"a": y[:, :3], "b": y[:, 3:]}

    def losses(model: nn.Module) -> dict[str, Tensor]:
        return losses_of(model)

    mixed, wide = Two(), Two()
    wide.double()
    wide.low.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    found, _ = joint(mixed, losses(mixed), at_shared(Uneven()))
    names = ["low.weight", "low.bias", "high.weight", "high.bias"]
    expected = oracle(wide, losses(wide), [(Uneven(), names)])
    assert found["low.weight"].dtype == torch.float32
    close({name: grad.double() for name, grad in found.items()}, expected, rtol=1e-4)


def test_random_numbers_per_entry_differ_between_dtypes() -> None:
    low, high = nn.Parameter(torch.zeros(4000)), nn.Parameter(torch.zeros(4000).double())
    model = nn.ParameterList([low, high])
    losses = {"a": low.sum() + high.sum().float(), "b": -low.sum() - high.sum().float()}
    found, _ = joint(model, losses, at_shared(gs.GradDrop()))
    agree = (found["0"].double() == found["1"]).double().mean()
    assert 0.4 < agree < 0.6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_are_aggregated(dtype: torch.dtype) -> None:
    model, wide = Net().to(dtype), Net()
    wide.load_state_dict(model.state_dict())

    def losses(net: nn.Module) -> dict[str, Tensor]:
        outputs = net(inputs().to(next(net.parameters()).dtype))
        return {task: output.float().square().mean() for task, output in outputs.items()}

    found, _ = joint(model, losses(model), at_shared(Uneven()))
    assert found["trunk.0.weight"].dtype == dtype
    expected = oracle(wide, losses(wide), [(Uneven(), TRUNK)])
    close({name: grad.float() for name, grad in found.items()}, expected, rtol=0.1)


def test_a_channels_last_parameter_keeps_its_layout() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.conv(x[:, :, None, None].expand(8, 4, 3, 3)[:, :2])
            return {"a": y[:, 0], "b": y[:, 1:].square()}

    model = Conv()
    found, _ = joint(model, losses_of(model), at_shared(Uneven()))
    names = ["conv.weight", "conv.bias"]
    close(found, oracle(model, losses_of(model), [(Uneven(), names)]))
    assert found["conv.weight"].is_contiguous(memory_format=torch.channels_last)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x + self.table(torch.arange(8)))


def test_sparse_gradients_are_refused_by_name_where_they_are_shared() -> None:
    model = Sparse()
    rule = r"parameter 'table.weight': leave it out, .* take dense real gradients, found .*sparse"
    with pytest.raises(TypeError, match=rule):
        joint(model, losses_of(model), at_shared(Uneven()))


def test_sparse_gradients_that_are_not_selected_get_the_sum() -> None:
    model = Sparse()
    item = gs.Intervention(Uneven(), at=gs.SharedParameters("trunk.*"))
    found, _ = joint(model, losses_of(model), item)
    expected = oracle(model, losses_of(model), [(Uneven(), TRUNK)])
    assert found["table.weight"].is_sparse
    for grads in (found, expected):
        grads["table.weight"] = grads["table.weight"].to_dense()
    close(found, expected)


def test_sparse_gradients_are_left_out_of_the_conflicts_of_weighted_losses() -> None:
    model = Sparse()
    expected = plain(model, losses_of(model))["trunk.0.weight"]
    with pytest.warns(gs.SurgeryWarning, match="gradients of table.weight are not dense"):
        found, _ = joint(model, losses_of(model), at_shared(gs.Sum()))
    assert torch.equal(found["trunk.0.weight"], expected)


@pytest.mark.filterwarnings("ignore:.*by their order. To choose by name")
def test_every_aggregator_equals_its_result_by_hand() -> None:
    checked = 0
    for stem in names("aggregators"):
        fields = {"weights": [1.0, 2.0, 3.0]} if stem == "fixed_weights" else {}
        aggregator = made(stem, **fields)
        if "deterministic" not in aggregator.properties:
            continue  # they draw for the name of the group, which a bare matrix has not
        if aggregator.num_tasks not in (None, 3):
            continue
        if aggregator.memories(["a", "b", "c"]):
            continue  # they combine the heads of memories too: see test_memory.py
        model = Net()
        found, _ = joint(model, losses_of(model), at_shared(aggregator), effects_every=0)
        expected = oracle(model, losses_of(model), [(aggregator, TRUNK)])
        shared = [{name: grads[name] for name in TRUNK} for grads in (found, expected)]
        close(*shared, rtol=1e-4)
        checked += 1
    assert checked >= 15


@pytest.mark.parametrize("aggregator", [gs.Sum(), gs.Mean(), gs.PCGrad()])
@pytest.mark.parametrize("shadow", [False, True])
def test_the_conflict_of_several_batches_is_that_of_their_sum(aggregator, shadow) -> None:
    model = Net()
    surgery = gs.Surgery(at_shared(aggregator))
    with surgery.attach(model, shadow=shadow) as live:
        live.backward(losses_of(model, 1), aggregate=False)
        live.backward(losses_of(model, 2))
        (conflict,) = live.conflicts.fetch()
        model.zero_grad()
        first, second = losses_of(model, 1), losses_of(model, 2)
        live.backward({name: first[name] + second[name] for name in first})
        (together,) = live.conflicts.fetch()
    assert conflict.norms == pytest.approx(together.norms, rel=1e-5)
    assert conflict.tasks == together.tasks
