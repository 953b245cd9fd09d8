"""The engine that combines the gradients at the output of a named module."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator, AggregatorContext
from gradsurg.multitask.features import are_disjoint
from tests.multitask.nets import (
    Grads,
    Net,
    Running,
    Uneven,
    close,
    each,
    grads_of,
    inputs,
    joint,
    losses_of,
)
from tests.nets import num_hooks


def feature(aggregator: Aggregator, features: str = "cut") -> gs.Intervention:
    return gs.Intervention(aggregator, at=gs.SharedParameters(engine="feature", features=features))


class Passed(nn.Module):
    """Returns its arguments: a name for the representation."""

    def forward(self, *values: Tensor) -> Sequence[Tensor]:
        return values


class Split(nn.Module):
    """`below` makes the representation, a tuple of tensors, of which `above` makes the losses."""

    def __init__(
        self,
        below: Callable[[nn.Module, Tensor], Sequence[Tensor]],
        above: Callable[[nn.Module, Sequence[Tensor]], dict[str, Tensor]],
        **layers: nn.Module,
    ) -> None:
        super().__init__()
        self.below, self.above, self.cut = below, above, Passed()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.above(self, self.cut(*self.below(self, x)))


def oracle(model: Split, aggregator: Aggregator) -> Grads:
    """The losses from a representation that was cut off, and one backward below it."""
    model.zero_grad()
    values = model.below(model, inputs())
    cut = [value.detach().requires_grad_() for value in values]
    losses = model.above(model, cut)
    rows = []
    for loss in losses.values():
        grads = torch.autograd.grad(loss, cut, retain_graph=True, allow_unused=True)
        pairs = zip(cut, grads, strict=True)
        rows.append(
            torch.cat([(torch.zeros_like(v) if g is None else g).reshape(-1) for v, g in pairs])
        )
    numbers = torch.stack([loss.detach() for loss in losses.values()]).double()
    flat = aggregator(torch.stack(rows), AggregatorContext(losses=numbers))
    sum(losses.values()).backward(inputs=_heads(model, losses))
    pieces = flat.split([value.numel() for value in values])
    shaped = [piece.view_as(value) for piece, value in zip(pieces, values, strict=True)]
    # A representation that is made of another one is cut off from it only above.
    torch.autograd.backward(list(values), shaped)
    return grads_of(model)


def _heads(model: nn.Module, losses: Mapping[str, Tensor]) -> list[nn.Parameter]:
    params = [p for p in model.parameters() if p.requires_grad]
    total = sum(losses.values())
    grads = torch.autograd.grad(total, params, retain_graph=True, allow_unused=True)
    return [p for p, g in zip(params, grads, strict=True) if g is not None]


def linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*sizes)


def one() -> Split:
    """A trunk and three heads."""
    torch.manual_seed(0)

    def above(model: nn.Module, values: Sequence[Tensor]) -> dict[str, Tensor]:
        (h,) = values
        return {
            "a": model.a(h).square().mean(),
            "b": (model.b(h) - 1).square().mean(),
            "c": 3 * model.c(h.sin()).mean(),
        }

    def below(model: nn.Module, x: Tensor) -> Sequence[Tensor]:
        return (model.trunk(x),)

    trunk = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    return Split(below, above, trunk=trunk, a=linear(6, 1), b=linear(6, 1), c=linear(6, 1))


def scales() -> Split:
    """Two representations of which one is made of the other, and every task uses both."""
    torch.manual_seed(0)

    def below(model: nn.Module, x: Tensor) -> Sequence[Tensor]:
        fine = model.low(x).tanh()
        return fine, model.high(fine).tanh()

    def above(model: nn.Module, values: Sequence[Tensor]) -> dict[str, Tensor]:
        fine, coarse = values
        return {
            "a": (model.a(fine) + model.a2(coarse)).square().mean(),
            "b": (model.b(coarse) * model.b2(fine) - 1).square().mean(),
        }

    heads = {name: linear(6, 1) for name in ("a", "a2", "b", "b2")}
    return Split(below, above, low=linear(4, 6), high=linear(6, 6), **heads)


def partly() -> Split:
    """A layer that a and b share, above one that all share."""
    torch.manual_seed(0)

    def below(model: nn.Module, x: Tensor) -> Sequence[Tensor]:
        h = model.low(x).tanh()
        return h, model.high(h).tanh()

    def above(model: nn.Module, values: Sequence[Tensor]) -> dict[str, Tensor]:
        h, more = values
        return {
            "a": model.a(more).square().mean(),
            "b": (model.b(more) - 1).square().mean(),
            "c": (model.c(h) + 2).square().mean(),
        }

    heads = {name: linear(6, 1) for name in "abc"}
    return Split(below, above, low=linear(4, 6), high=linear(6, 6), **heads)


def unrolled() -> Split:
    """An RNN by hand: every state is used by both tasks, and is made of the one before."""
    torch.manual_seed(0)

    def below(model: nn.Module, x: Tensor) -> Sequence[Tensor]:
        states, h = [], torch.zeros(8, 6)
        for column in x.T:
            h = model.cell(column[:, None], h)
            states.append(h)
        return states

    def above(model: nn.Module, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            "a": torch.stack([model.a(h).square().mean() for h in values]).sum(),
            "b": torch.stack([(model.b(h) - 1).square().mean() for h in values]).sum(),
        }

    return Split(below, above, cell=nn.RNNCell(1, 6), a=linear(6, 1), b=linear(6, 1))


def shared_leaf() -> Split:
    """A number that both heads use belongs to the representation too."""
    torch.manual_seed(0)

    def below(model: nn.Module, x: Tensor) -> Sequence[Any]:
        return model.trunk(x).tanh(), model.bias.weight

    def above(model: nn.Module, values: Sequence[Tensor]) -> dict[str, Tensor]:
        h, bias = values
        return {
            "a": (model.a(h) * bias).square().mean(),
            "b": (model.b(h) - bias).square().mean(),
        }

    bias = nn.Embedding(1, 1)
    return Split(below, above, trunk=linear(4, 6), bias=bias, a=linear(6, 1), b=linear(6, 1))


MODELS = {
    "one": one,
    "scales": scales,
    "partly": partly,
    "unrolled": unrolled,
    "shared leaf": shared_leaf,
}
AGGREGATORS = {"uneven": Uneven(), "entrywise": gs.TrimmedMean(0.3), "running": Running()}


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("name", MODELS)
def test_the_cut_equals_one_by_hand(name: str, aggregator: str) -> None:
    model = MODELS[name]()
    found, _ = joint_of(model, feature(AGGREGATORS[aggregator]))
    close(found, oracle(model, AGGREGATORS[aggregator]))


@pytest.mark.parametrize("features", ["trunk", "trunk.1"])
def test_a_module_may_be_named_by_any_path(features: str) -> None:
    model = one()
    found, _ = joint_of(model, feature(Uneven(), features))
    close(found, oracle(model, Uneven()))


def test_every_call_of_the_named_module_belongs_to_the_representation() -> None:
    model = unrolled()
    found, _ = joint_of(model, feature(Uneven(), "cell"))
    close(found, oracle(model, Uneven()))


def joint_of(model: nn.Module, *items: gs.Intervention) -> tuple[Grads, gs.Live]:
    """As `joint`, with the forward in the block."""
    model.zero_grad()
    with gs.Surgery(*items).attach(model) as live:
        live.backward(model(inputs()))
    return grads_of(model), live


def test_forwards_without_a_backward_keep_no_graph() -> None:
    model = one()
    with gs.Surgery(feature(Uneven(), "trunk")).attach(model) as live:
        kept = []
        for step in range(3):
            x = inputs(step)
            kept.append(weakref.ref(x))  # the graph has it, for the gradient of the weight
            model(x)
            del x
        assert [ref() for ref in kept] == [None] * 3
        live.backward(model(inputs()))
    close(grads_of(model), oracle(model, Uneven()))


def test_two_forwards_can_have_their_backwards_in_turn() -> None:
    model = one()
    with gs.Surgery(feature(Uneven(), "trunk")).attach(model) as live:
        first, second = model(inputs()), model(inputs(1))
        live.backward(second)
        model.zero_grad()
        live.backward(first)
    close(grads_of(model), oracle(model, Uneven()))


@pytest.mark.parametrize(
    ("name", "features", "kind", "rule"),
    [
        (
            "partly",
            "low",
            ValueError,
            "name a later module, .* 'a' and 'b' both depend on .* above 'low'",
        ),
        (
            "partly",
            "high",
            ValueError,
            "name an earlier module, .* 'c' depends on .* through 'high' and past it",
        ),
        ("one", "trnk", LookupError, "did you mean 'trunk'. There is no module 'trnk'"),
    ],
)
def test_a_module_that_does_not_separate_the_tasks_is_refused(
    name: str, features: str, kind: type[Exception], rule: str
) -> None:
    with pytest.raises(kind, match=rule):
        joint_of(MODELS[name](), feature(Uneven(), features))


def test_a_named_module_that_was_not_called_in_the_block_is_refused() -> None:
    model = one()
    outputs = model(inputs())
    with pytest.raises(RuntimeError, match="do not depend on an output of 'trunk'"):
        joint(model, outputs, feature(Uneven(), "trunk"))


def test_stacked_losses_are_refused() -> None:
    model = one()
    with gs.Surgery(feature(Uneven())).attach(model) as live:
        losses = torch.stack(list(model(inputs()).values()))
        with pytest.raises(
            ValueError, match="name a later module, .* compute each loss from its own head"
        ):
            live.backward(losses)
        live.backward(model(inputs()))


def test_tasks_that_share_no_entry_of_the_representation_warn() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with (
        pytest.warns(
            gs.SurgeryWarning,
            match="name in features= a module below.* none of 16 entries has gradients of two",
        ),
        gs.Surgery(feature(Uneven(), "0")).attach(model) as live,
    ):
        first, second = model(inputs()).unbind(1)
        live.backward({"a": first.mean(), "b": second.square().mean()})


def with_a_task_of_its_own() -> Split:
    """As `one`, where task d uses what no other does."""
    model = one()
    above = model.above
    model.own = linear(4, 1)
    model.above = lambda own, values: above(own, values) | {"d": own.own(inputs()).square().mean()}
    return model


def test_a_task_that_does_not_reach_the_representation_does_not_contribute() -> None:
    model = with_a_task_of_its_own()
    with pytest.warns(gs.SurgeryWarning, match=r"uneven: d does not reach the representation"):
        found, live = joint_of(model, feature(Uneven()))
    close(
        {name: grad for name, grad in found.items() if "own" not in name}, oracle(one(), Uneven())
    )
    (conflict,) = live.conflicts.fetch()
    assert conflict.tasks == ["a", "b", "c"]
    model.zero_grad()
    model(inputs())["d"].backward()
    assert torch.equal(found["own.weight"], model.own.weight.grad)


def test_a_representation_of_one_task_is_refused() -> None:
    model = with_a_task_of_its_own()
    with gs.Surgery(feature(Uneven(), "trunk")).attach(model) as live:
        outputs = model(inputs())
        with pytest.raises(ValueError, match="of a, d only a depends on the output of 'trunk'"):
            live.backward({task: outputs[task] for task in "ad"})
        outputs = model(inputs())
        live.backward({task: outputs[task] for task in "ab"})
    assert model.own.weight.grad is None


def test_a_task_with_zero_gradients_does_not_count_as_disjoint() -> None:
    model = one()

    def losses() -> dict[str, Tensor]:
        outputs = model(inputs())
        return {"a": outputs["a"], "zero": torch.relu(outputs["b"] - 1e6)}

    with gs.Surgery(feature(gs.PCGrad())).attach(model) as live:  # a warning would be an error
        live.backward(losses())
    found = grads_of(model)
    model.zero_grad()
    sum(losses().values()).backward()
    close(found, grads_of(model))


def spectral() -> Split:
    """A complex representation beside a real one, of an odd number of entries."""
    torch.manual_seed(0)

    def below(model: nn.Module, x: Tensor) -> Sequence[Tensor]:
        h = model.low(x).tanh()
        return model.odd(h).tanh(), torch.fft.rfft(h)

    def above(model: nn.Module, values: Sequence[Tensor]) -> dict[str, Tensor]:
        odd, waves = values
        return {
            "a": model.a(odd).square().mean() + waves.abs().mean(),
            "b": (model.b(waves.imag) - 1).square().mean() - waves.real.mean(),
            "c": (odd.mean() * waves.conj() * (2 + 1j)).sum().real,
        }

    layers = {"low": linear(4, 6), "odd": linear(6, 3), "a": linear(3, 1), "b": linear(4, 1)}
    return Split(below, above, **layers)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_complex_and_real_representations_are_combined_together(aggregator: str) -> None:
    model = spectral()
    found, _ = joint_of(model, feature(AGGREGATORS[aggregator]))
    close(found, by_parts(model, AGGREGATORS[aggregator]))


def by_parts(model: Split, aggregator: Aggregator) -> Grads:
    """The oracle, of real and imaginary parts in place of complex numbers."""
    below, above = model.below, model.above
    real = Split(
        lambda own, x: [*(odd := below(own, x))[:1], odd[1].real, odd[1].imag],
        lambda own, values: above(own, [values[0], torch.complex(values[1], values[2])]),
        **dict(model.named_children()),
    )
    return oracle(real, aggregator)


def test_the_named_module_may_return_complex_numbers() -> None:
    class Waves(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch.fft.rfft(super().forward(input))

    torch.manual_seed(0)

    def above(model: nn.Module, values: Sequence[Tensor]) -> dict[str, Tensor]:
        (waves,) = values
        return {"a": model.a(waves.real).mean(), "b": model.b(waves.abs()).square().mean()}

    layers = {"low": Waves(4, 6), "a": linear(4, 1), "b": linear(4, 1)}
    model = Split(lambda own, x: [own.low(x)], above, **layers)
    found, _ = joint_of(model, feature(Uneven(), "low"))
    real = Split(
        lambda own, x: [torch.view_as_real(own.low(x))],
        lambda own, values: above(own, [torch.view_as_complex(values[0])]),
        **layers,
    )
    close(found, oracle(real, Uneven()))


def test_a_sparse_gradient_at_the_representation_is_refused_by_name() -> None:
    def above(model: nn.Module, values: Sequence[Tensor]) -> dict[str, Tensor]:
        rows = [
            nn.functional.embedding(torch.tensor([k, k + 1]), values[0], sparse=True)
            for k in range(2)
        ]
        return {"a": rows[0].sum(), "b": rows[1].square().sum()}

    model = Split(lambda own, x: [own.words.weight], above, words=nn.Embedding(5, 2))
    rule = "features: an aggregator takes dense gradients, found at 'cut' .*layout torch.sparse"
    with pytest.raises(TypeError, match=rule):
        joint_of(model, feature(gs.PCGrad()))
    assert model.words.weight.grad is None


def test_sparse_gradients_above_or_below_the_representation_stay_sparse() -> None:
    def below(model: nn.Module, x: Tensor) -> Sequence[Tensor]:
        return [model.words(torch.tensor([0, 1])).tanh()]

    def above(model: nn.Module, values: Sequence[Tensor]) -> dict[str, Tensor]:
        (h,) = values
        return {"a": (h * model.own(torch.tensor([2, 3]))).sum(), "b": h.square().sum()}

    words, own = (nn.Embedding(5, 2, sparse=True) for _ in range(2))
    model = Split(below, above, words=words, own=own)
    found, _ = joint_of(model, feature(gs.PCGrad()))
    assert found["words.weight"].is_sparse
    assert found["own.weight"].is_sparse
    model.zero_grad()
    model(inputs())["a"].backward()
    expected = grads_of(model)["own.weight"]
    assert torch.equal(found["own.weight"].to_dense(), expected.to_dense())


def test_several_batches_a_step_are_refused() -> None:
    model = one()
    with gs.Surgery(feature(Uneven())).attach(model) as live:
        with pytest.raises(ValueError, match="leave out aggregate=False, or use engine='full'"):
            live.backward(model(inputs()), aggregate=False)
        live.backward(model(inputs()))


@pytest.mark.parametrize(
    ("own", "apart"),
    [
        pytest.param([[0, 1], [2, 3]], True, id="none"),
        pytest.param([[0, 1], [1, 2]], False, id="one of the first"),
        pytest.param([[0, 998], [1, 998]], False, id="a late one"),
        pytest.param([[0, 1], []], True, id="one task alone in a piece"),
    ],
)
def test_tasks_are_disjoint_if_they_share_no_entry(own: list[list[int]], apart: bool) -> None:
    rows = torch.zeros(2, 999)
    for task, places in enumerate(own):
        rows[task, places] = 1.0
    other = torch.tensor([1.0, 0.0, 0.0])
    assert are_disjoint([[rows[0], None], [rows[1], other]]) == apart
    assert not are_disjoint([[rows[0], None]])  # a task alone is apart from nothing


def test_fields_without_effect_with_this_engine_are_refused() -> None:
    with pytest.raises(ValueError, match="needs engine='feature'"):
        gs.SharedParameters(features="trunk")
    with pytest.raises(ValueError, match="must be 'whole' with engine='feature'"):
        gs.SharedParameters(engine="feature", features="trunk", granularity="module")
    with pytest.raises(ValueError, match="pattern: leave it out: engine='feature'"):
        gs.SharedParameters("trunk.*", engine="feature", features="trunk")


def test_the_engine_needs_the_name_of_a_module() -> None:
    with pytest.raises(ValueError, match=r"features: name the module .* features='trunk'"):
        gs.SharedParameters(engine="feature")


# Transforms above, at and below the cut

SITES = {
    "below": (gs.Outputs("trunk.0"), ""),
    "at the tensor": (gs.Outputs("trunk"), ""),
    "at the node": (gs.Nodes("Tanh"), ""),
    "below, a parameter": (gs.Parameters("trunk.0.weight"), ""),
}


@pytest.mark.parametrize("name", SITES)
def test_at_the_cut_and_below_a_transform_sees_the_combined_gradient_once(name: str) -> None:
    model, (at, _) = one(), SITES[name]
    found, live = joint_of(model, gs.Intervention(gs.Scale(3.0), at=at), feature(Uneven()))
    expected = oracle(model, Uneven())
    for key in expected:
        tripled = key == "trunk.0.weight" or (key == "trunk.0.bias" and "param" not in name)
        factor = 3.0 if tripled else 1.0
        expected[key] = factor * expected[key]
    close(found, expected)
    assert [entry.all_calls for entry in live.ledger if entry.intervention == "scale"] == [1]


PICKED = {"b": gs.ForTask("b"), "ac": ~gs.ForTask("b")}


@pytest.mark.parametrize("picked", PICKED)
def test_at_the_cut_a_transform_of_one_task_sees_its_gradient(picked: str) -> None:
    model = one()
    item = gs.Intervention(gs.Scale(3.0), at=gs.Outputs("trunk"), when=PICKED[picked])
    found, live = joint_of(model, item, feature(Uneven()))
    h = model.trunk(inputs())
    cut = h.detach().requires_grad_()
    losses = model.above(model, [cut])
    rows = [
        torch.autograd.grad(loss, cut)[0].flatten() * (3.0 if task in picked else 1.0)
        for task, loss in losses.items()
    ]
    weight = model.get_parameter("trunk.0.weight")
    (expected,) = torch.autograd.grad(h, weight, Uneven()(torch.stack(rows)).view_as(h))
    close({"": found["trunk.0.weight"]}, {"": expected})
    (entry,) = [entry for entry in live.ledger if entry.intervention == "scale"]
    assert (entry.all_calls, entry.all_fired) == (3, len(picked))


def test_above_the_cut_a_transform_sees_the_gradient_of_its_task() -> None:
    model = one()
    items = [
        gs.Intervention(gs.Scale(3.0), at=gs.Outputs("a")),
        gs.Intervention(gs.Scale(5.0), at=gs.Outputs("b"), when=gs.ForTask("b")),
        gs.Intervention(gs.Scale(7.0), at=gs.Parameters("c.bias")),
    ]
    found, live = joint_of(model, *items, feature(Uneven()))
    above, factors = model.above, {"a": 3.0, "b": 5.0, "c": 1.0}
    model.above = lambda own, values: {
        task: factors[task] * loss for task, loss in above(own, values).items()
    }
    expected = oracle(model, Uneven())
    expected["c.bias"] = 7 * expected["c.bias"]
    close(found, expected)
    calls = {entry.intervention: entry.all_calls for entry in live.ledger}
    assert calls == {"scale": 1, "scale_2": 1, "scale_3": 1, "uneven": 1}


class Late(nn.Module):
    """Tasks meet again above the representation that is named, at `act`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.act = nn.Linear(4, 6), nn.Tanh()
        self.heads = nn.ModuleDict({task: nn.Linear(6, 1) for task in "ab"})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.act(self.trunk(x))
        return {task: head(features).square().mean() for task, head in self.heads.items()}


def test_a_stateful_transform_above_the_cut_is_refused_where_tasks_share_nodes() -> None:
    model = Late()
    item = gs.Intervention(gs.GrokfastEMA(), at=gs.Outputs("act"))
    rule = "GrokfastEMA.* has one state for each site, .* 2 tasks"
    surgery = gs.Surgery(item, feature(Uneven(), "trunk"))
    with pytest.raises(ValueError, match=rule), surgery.attach(model) as live:
        live.backward(model(inputs()))
    assert all(grad is None for grad in grads_of(model).values())
    with gs.Surgery(item, feature(Uneven(), "act")).attach(model) as live:
        live.backward(model(inputs()))


def test_no_hook_stays_on_the_graph_or_the_model() -> None:
    model = scales()
    before = num_hooks(model)
    with gs.Surgery(feature(Uneven())).attach(model) as live:
        losses = model(inputs())
        live.backward(losses)
    assert num_hooks(model) == before
    # Where one edge leads to the other the graph is gone back through once, and is free then.
    with pytest.raises(RuntimeError, match="second time"):
        losses["a"].backward()


def test_conflicts_are_those_at_the_representation() -> None:
    model = one()
    _, live = joint_of(model, feature(Uneven()))
    (conflict,) = live.conflicts.fetch()
    h = model.below(model, inputs())[0].detach().requires_grad_()
    losses = model.above(model, [h])
    norms = [torch.autograd.grad(loss, h)[0].norm().item() for loss in losses.values()]
    assert conflict.norms == pytest.approx(norms)
    assert conflict.group == "representation"


def test_a_single_task_gives_its_gradient_times_its_weight() -> None:
    model = Net()
    with (
        pytest.warns(gs.SurgeryWarning, match="had one loss each time"),
        gs.Surgery(feature(gs.TrimmedMean(0.1), "trunk")).attach(model) as live,
    ):
        live.backward({"a": losses_of(model)["a"]})
    found = grads_of(model)
    close(found, each(model, {"a": losses_of(model)["a"]})["a"])
