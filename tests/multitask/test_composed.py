"""An aggregator with transforms before and after it, and with all that changes a live surgery."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator
from gradsurg.plugins.fields import validated
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty
from tests.multitask.nets import (
    ENGINES,
    Net,
    Running,
    Uneven,
    at_shared,
    close,
    each,
    grads_of,
    joint,
    losses_of,
    oracle,
    same,
    scaled,
    still,
    trained,
)

TRUNK = ["trunk.0.weight", "trunk.0.bias", "trunk.2.weight", "trunk.2.bias"]
SEEN: list[tuple[str, str, int]] = []


@validated
class Notes(Stateless):
    """Notes the task of each gradient, its site and its call; linear if `known`."""

    known: bool = True

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"linear", "deterministic"}) if self.known else frozenset()

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        SEEN.append((context.task, context.site, context.call))
        return grad


def seen(model: nn.Module, at: Selector, *more: gs.Intervention) -> list[tuple]:
    SEEN.clear()
    with gs.Surgery(gs.Intervention(Notes(), at=at), *more).attach(model) as live:
        live.backward(losses_of(model))
    return list(SEEN)


# Before the aggregator: the gradient of each task

BEFORE = {
    "Parameters": (gs.Parameters("trunk.0.weight"), "trunk.0.weight"),
    "Outputs": (gs.Outputs("trunk.1"), "trunk.1#0"),
    "Inputs": (gs.Inputs("trunk.1"), "trunk.1#0.in"),
    "Nodes": (gs.Nodes("Tanh", module="trunk.1"), ""),
    "ModuleGradients": (gs.ModuleGradients("trunk.1"), ""),
    "Uses": (gs.Uses("trunk.0"), ""),
}


@pytest.mark.parametrize("name", BEFORE)
def test_before_the_aggregator_a_transform_sees_each_task_by_name(name: str) -> None:
    found = seen(Net(), BEFORE[name][0], at_shared(Uneven()))
    assert [task for task, _, _ in found] == ["a", "b", "c"]
    assert [call for _, _, call in found] == [0, 1, 2]


@pytest.mark.parametrize("name", BEFORE)
def test_a_transform_of_one_task_changes_only_its_row(name: str) -> None:
    model, (at, _) = Net(), BEFORE[name]
    found = trained(model, scaled(0.0, at, "b"), at_shared(Uneven(), granularity="tensor"))
    grads = each(model, losses_of(model))
    first = "trunk.0.weight"
    rows = torch.stack([grads[task][first].reshape(-1) for task in "abc"])
    rows[1] = 0.0
    close({first: found[first].reshape(-1)}, {first: Uneven()(rows)})
    last = "trunk.2.weight"
    rows = torch.stack([grads[task][last].reshape(-1) for task in "abc"])
    close({last: found[last].reshape(-1)}, {last: Uneven()(rows)})


def test_a_transform_of_one_task_works_without_an_aggregator() -> None:
    model = Net()
    found = trained(model, scaled(0.0, gs.Parameters("trunk.*"), "b"))
    grads = each(model, losses_of(model))
    expected = {name: grads["a"][name] + grads["c"][name] for name in TRUNK}
    close({name: found[name] for name in TRUNK}, expected)
    assert torch.equal(found["heads.b.weight"], grads["b"]["heads.b.weight"])


def test_a_transform_of_one_task_works_with_a_loss_weighting() -> None:
    model = Net()
    weighs = at_shared(gs.FixedWeights((1.0, 10.0, 0.5)))
    found = trained(model, scaled(3.0, gs.Parameters("*.weight"), "b"), weighs)
    grads = each(model, losses_of(model))
    first, head = "trunk.0.weight", "heads.b.weight"
    expected = {
        first: grads["a"][first] + 30 * grads["b"][first] + 0.5 * grads["c"][first],
        head: 30 * grads["b"][head],
    }
    close({name: found[name] for name in expected}, expected)


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    model = Net()
    rule = r"scale: ForTask\(task='d'\): there is no loss 'd'"
    with pytest.raises(LookupError, match=rule):
        trained(model, scaled(2.0, gs.Parameters("*"), "d"))


def test_a_known_task_may_be_absent_from_a_step() -> None:
    model = Net()
    with gs.Surgery(scaled(2.0, gs.Parameters("*"), "b")).attach(model) as live:
        live.backward(losses_of(model))
        model.zero_grad()
        live.backward({"a": losses_of(model)["a"]})
    close(grads_of(model), each(model, {"a": losses_of(model)["a"]})["a"])


WEIGHS = {
    "mean": gs.Mean(),
    "sum": gs.Sum(),
    "fixed": gs.FixedWeights((0.3, 2.0, 5.0)),
    "random": gs.Random(),
    "famo": gs.FAMO(),
    "uncertainty": gs.UncertaintyWeighting(),
}
CLAMP = gs.Clamp(low=-0.05, high=0.05)


def clamped(grads: dict[str, Any], weights: Sequence[float]) -> dict[str, Any]:
    """The weighted sum of the clamped gradients of the tasks."""
    parts = list(zip(weights, grads.values(), strict=True))
    return {n: sum(w * own[n].clamp(-0.05, 0.05) for w, own in parts) for n in TRUNK}


@pytest.mark.parametrize("name", WEIGHS)
def test_before_a_loss_weighting_a_transform_sees_each_task_too(name: str) -> None:
    model, seen_by = Net(), {}
    for every in (0, 1):
        model.zero_grad()
        items = gs.Intervention(CLAMP, at=gs.Parameters("*")), at_shared(WEIGHS[name])
        with gs.Surgery(*items).attach(model, still(model), effects_every=every) as live:
            live.backward(losses_of(model))
            seen_by[every] = grads_of(model), live.conflicts.fetch()
    assert same(seen_by[0][0], seen_by[1][0])
    found, (conflict,) = seen_by[1]
    expected = clamped(each(model, losses_of(model)), conflict.weights)
    close({n: found[n] for n in TRUNK}, expected)
    head = each(model, losses_of(model))["b"]["heads.b.weight"].clamp(-0.05, 0.05)
    close({"": found["heads.b.weight"]}, {"": conflict.weights[1] * head})


@pytest.mark.parametrize("name", BEFORE)
def test_at_every_stage_before_a_loss_weighting_a_transform_sees_each_task(name: str) -> None:
    SEEN.clear()
    trained(Net(), gs.Intervention(Notes(known=False), at=BEFORE[name][0]), at_shared(gs.Mean()))
    assert [task for task, _, _ in SEEN] == ["a", "b", "c"]


def test_a_loss_weighting_is_one_backward_if_all_transforms_are_linear() -> None:
    model = Net()
    plain = trained(model, at_shared(gs.Mean()))
    items = [
        gs.Intervention(CLAMP, at=gs.Parameters("*"), when=gs.Steps(start=1)),
        gs.Intervention(Notes(), at=gs.Parameters("trunk.0.weight")),
        gs.Intervention(gs.Clamp(-9.0, 9.0), at=gs.Parameters("*", stage="step")),
    ]
    SEEN.clear()
    model.zero_grad()
    optimizer = still(model)
    with gs.Surgery(*items, at_shared(gs.Mean())).attach(model, optimizer) as live:
        live.backward(losses_of(model))
        assert same(grads_of(model), plain)
        optimizer.step()
        live.backward(losses_of(model))
        optimizer.step()
    assert [task for task, _, _ in SEEN] == ["", "a", "b", "c"]


def test_a_transform_sees_each_task_of_each_batch() -> None:
    model = Net()
    items = gs.Intervention(CLAMP, at=gs.Parameters("*")), at_shared(gs.Sum())
    with gs.Surgery(*items).attach(model) as live:
        live.backward(losses_of(model, 0), aggregate=False)
        live.remove("clamp")
        live.backward(losses_of(model, 1))
    found, ones = grads_of(model), [1.0] * 3
    first = clamped(each(model, losses_of(model, 0)), ones)
    second = each(model, losses_of(model, 1)).values()
    expected = {n: first[n] + sum(grads[n] for grads in second) for n in TRUNK}
    close({n: found[n] for n in TRUNK}, expected)


# After it: what was made of them

AFTER = {
    "accumulated": gs.Parameters("trunk.*", stage="accumulated"),
    "step": gs.Parameters("trunk.*", stage="step"),
    "Parameters backward_end": gs.Parameters("trunk.*", stage="backward_end"),
}


@pytest.mark.parametrize("name", AFTER)
def test_after_the_aggregator_a_transform_sees_the_combined_gradient_once(name: str) -> None:
    model = Net()
    plain = trained(model, at_shared(Uneven()))
    SEEN.clear()
    items = [gs.Intervention(Notes(), at=AFTER[name]), scaled(3.0, AFTER[name])]
    found = trained(model, *items, at_shared(Uneven()))
    expected = {key: 3 * own if key in TRUNK else own for key, own in plain.items()}
    assert same(found, expected)
    assert [(task, call) for task, _, call in SEEN] == [("", 0)] * len(TRUNK)


def test_a_transform_at_a_leaf_does_not_act_on_the_combined_gradient() -> None:
    model = Net()
    found = trained(model, scaled(3.0, gs.Parameters("*")), at_shared(gs.TrimmedMean(0.3)))
    expected = oracle(model, losses_of(model), [(gs.TrimmedMean(0.3), TRUNK)])
    close(found, {name: 3 * own for name, own in expected.items()})


@pytest.mark.parametrize("how", ["one task", "after"])
def test_a_stateful_transform_may_act_on_one_task_or_after_the_aggregator(how: str) -> None:
    model, stage = Net(), "backward" if how == "one task" else "step"
    when = gs.ForTask("b") if how == "one task" else gs.Always()
    item = gs.Intervention(gs.GrokfastEMA(), at=gs.Parameters("trunk.*", stage=stage), when=when)
    optimizer = still(model)
    with gs.Surgery(item, at_shared(Uneven())).attach(model, optimizer) as live:
        for step in range(2):
            live.backward(losses_of(model, step))
            optimizer.step()
        with pytest.raises(ValueError, match="grokfast_ema_2: .* has one state for each site"):
            live.add(gs.Intervention(gs.GrokfastEMA(), at=gs.Outputs("trunk.1")))
            live.backward(losses_of(model))
        live.remove("grokfast_ema_2")


def test_calls_and_effects_are_counted_for_each_task() -> None:
    model = Net()
    items = [
        scaled(2.0, gs.Parameters("trunk.0.weight")),
        scaled(3.0, gs.Parameters("trunk.0.weight", stage="backward_end")),
    ]
    items.append(scaled(5.0, gs.Parameters("trunk.2.weight"), "c"))
    with gs.Surgery(*items, at_shared(Uneven())).attach(model) as live:
        live.backward(losses_of(model))
    calls = {entry.intervention: (entry.all_calls, entry.all_fired) for entry in live.ledger}
    assert calls == {"scale": (3, 3), "scale_2": (1, 1), "scale_3": (3, 1), "uneven": (1, 1)}
    rows = {row["transform"]: row for row in live.effects.rows()}
    grads = each(model, losses_of(model))
    norms = [grads[task]["trunk.0.weight"].norm().item() for task in "abc"]
    assert rows["scale"]["norm_before"] == pytest.approx(sum(norms) / 3, rel=1e-5)
    norm = grads["c"]["trunk.2.weight"].norm().item()
    assert rows["scale_3"]["norm_after"] == pytest.approx(5 * norm, rel=1e-5)


def test_foreign_hooks_see_each_task_and_then_the_combined_gradient() -> None:
    model, met = Net(), []
    param = model.trunk[0].weight
    param.register_hook(lambda grad: met.append(grad.clone()) or None)
    found, _ = joint(model, losses_of(model), at_shared(Uneven()))
    grads = each(model, losses_of(model))
    expected = [grads[task]["trunk.0.weight"] for task in "abc"] + [found["trunk.0.weight"]]
    assert all(torch.equal(own, other) for own, other in zip(met[:4], expected, strict=True))
    assert len(param._backward_hooks) == 1


# Measuring only


SHADOWED = [(Uneven(), "full"), (Uneven(), "feature"), (gs.Mean(), "full"), (Running(), "full")]


@pytest.mark.parametrize(("aggregator", "engine"), SHADOWED)
def test_a_shadow_leaves_the_gradients_of_the_plain_sum(
    aggregator: Aggregator, engine: str
) -> None:
    model = Net()
    items = [scaled(2.0, gs.Parameters("*")), scaled(3.0, gs.Outputs("trunk.1"), "b")]
    losses = losses_of(model)
    sum(losses.values()).backward()
    plain = grads_of(model)
    model.zero_grad()
    surgery = gs.Surgery(*items, at_shared(aggregator, **ENGINES[engine]))
    with surgery.attach(model, shadow=True) as live:
        live.backward(losses_of(model))
    assert same(grads_of(model), plain)
    assert len(live.conflicts.fetch()) == 1
    rows: dict[object, Any] = {row["transform"]: row for row in live.effects.rows()}
    assert rows["scale_2"]["norm_after"] == pytest.approx(3 * rows["scale_2"]["norm_before"])


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("aggregator", [Uneven(), Running(), gs.Mean(), gs.GradDrop()])
def test_measuring_changes_no_bit(aggregator: Aggregator, every: int) -> None:
    def train(every: int) -> list[Tensor]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        surgery = gs.Surgery(scaled(0.5, gs.Outputs("trunk.1")), at_shared(aggregator))
        with surgery.attach(model, optimizer, effects_every=every) as live:
            for step in range(4):
                optimizer.zero_grad()
                live.backward(losses_of(model, step))
                optimizer.step()
            assert len(live.conflicts.fetch()) == (4 // every if every else 0)
        return [own.detach().clone() for own in model.parameters()]

    pairs = zip(train(0), train(every), strict=True)
    assert all(torch.equal(own, other) for own, other in pairs)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_at_which_an_aggregator_does_not_act_is_measured_too(engine: str) -> None:
    model = Net()
    optimizer = still(model)
    at = at_shared(Uneven(), **ENGINES[engine]).at
    item = gs.Intervention(Uneven(), at=at, when=gs.Steps(start=2))
    with gs.Surgery(item).attach(model, optimizer) as live:
        for _ in range(3):
            optimizer.zero_grad()
            live.backward(losses_of(model))
            optimizer.step()
        found = live.conflicts.fetch()
    assert [conflict.step for conflict in found] == [0, 1, 2]
    assert [conflict.weights == [1.0, 1.0, 1.0] for conflict in found] == [True, True, False]
    assert found[0].norms == found[2].norms
    assert found[0].norm_to_mean == pytest.approx(3.0)
