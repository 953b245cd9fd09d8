"""Changes of an attached surgery, and of its state, with an aggregator."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator
from tests.multitask.nets import (
    WIDTH,
    Net,
    Running,
    Uneven,
    at_shared,
    close,
    grads_of,
    inputs,
    losses_of,
    oracle,
    same,
    scaled,
    trained,
)

TRUNK = ["trunk.0.weight", "trunk.0.bias", "trunk.2.weight", "trunk.2.bias"]


# While it runs


def test_transforms_are_added_changed_and_removed_beside_an_aggregator() -> None:
    model = Net()
    plain = trained(model, at_shared(gs.TrimmedMean(0.3)))
    with gs.Surgery(at_shared(gs.TrimmedMean(0.3))).attach(model) as live:

        def factor() -> float:
            model.zero_grad()
            live.backward(losses_of(model))
            ratio = model.trunk[0].weight.grad / plain["trunk.0.weight"]
            return round(ratio.mean().item(), 3)

        assert factor() == 1.0
        label = live.add(scaled(2.0, gs.Parameters("*")))
        assert factor() == 2.0
        live.set(label, factor=5.0)
        assert factor() == 5.0
        live.remove(label)
        assert factor() == 1.0


@pytest.mark.parametrize(
    "change", [lambda live: live.set("scale", factor=9.0), lambda live: live.remove("scale")]
)
def test_changes_during_a_backward_of_several_losses_are_refused(
    change: Callable[[gs.Live], None],
) -> None:
    model = Net()
    with gs.Surgery(scaled(2.0, gs.Parameters("*")), at_shared(Uneven())).attach(model) as live:
        live.backward(losses_of(model))
        expected = grads_of(model)
        model.zero_grad()
        losses = losses_of(model)
        losses["a"].register_hook(lambda grad: change(live))
        with pytest.raises(RuntimeError, match="inside a backward pass: add, remove and change"):
            live.backward(losses)
        model.zero_grad()
        live.backward(losses_of(model))
        assert same(grads_of(model), expected)


@pytest.mark.parametrize("action", ["remove", "set"])
def test_an_aggregator_cannot_be_changed_while_attached(action: str) -> None:
    with gs.Surgery(at_shared(Uneven())).attach(Net()) as live:
        call: Callable[[], object] = {
            "remove": lambda: live.remove("uneven"),
            "set": lambda: live.set("uneven", when=gs.Steps(stop=3)),
        }[action]
        with pytest.raises(ValueError, match="aggregator 'uneven' is fixed"):
            call()
        with pytest.raises(TypeError, match="it cannot be added in the block"):
            live.add(at_shared(Running()))
        live.backward(losses_of(Net()) | losses_of(live.attachment.model))


def test_the_switch_of_an_aggregator_is_flipped() -> None:
    model = Net()
    item = gs.Intervention(Uneven(), at=gs.SharedParameters(), when=gs.Flag("surgery"))
    with gs.Surgery(item).attach(model) as live:
        found = []
        for on in (True, False, True):
            live.switch("surgery", on=on)
            model.zero_grad()
            live.backward(losses_of(model))
            found.append(grads_of(model))
    close(found[0], oracle(model, losses_of(model), [(Uneven(), TRUNK)]))
    close(found[1], oracle(model, losses_of(model), []))
    assert same(found[2], found[0])


def test_the_plan_lists_the_parameters_of_an_aggregator() -> None:
    said = gs.Surgery(at_shared(Uneven())).plan(Net())
    assert "uneven: Uneven() for those of" in said
    assert "trunk.0.weight" in said
    assert "engine full, granularity whole" in said
    gs.Surgery(at_shared(Uneven())).plan(Net(), inputs())
    said = gs.Surgery(at_shared(Uneven(), granularity=("trunk.0.*", "trunk.*"))).plan(Net())
    assert "granularity 2 groups, when" in said
    assert "  trunk.0.*:\n    trunk.0.weight\n    trunk.0.bias\n  trunk.*:\n" in said
    assert "heads" not in said


class Blocks(nn.Module):
    """Three blocks, each with a list of two more, between two other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(deepcopy(block) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)


def test_layers_are_the_blocks_of_the_outermost_list() -> None:
    at, model = gs.SharedParameters(granularity="layer"), Blocks()
    groups = at.groups(model)
    names = list(dict.fromkeys(groups.values()))
    assert names == ["first", "last", "blocks.0", "blocks.1", "blocks.2"]
    assert groups["blocks.1.0.weight"] == groups["blocks.1.1.bias"] == "blocks.1"
    plan = gs.Surgery(at_shared(gs.PCGrad(), granularity="layer")).plan(model)
    assert "granularity 5 layers" in plan
    assert "  blocks.2:\n    blocks.2.0.weight\n" in plan
    with gs.Surgery(at_shared(gs.PCGrad(), granularity="layer")).attach(model) as live:
        live.backward(list(model(inputs()).square().mean(0)[:2]))
        assert [one.group for one in live.conflicts.fetch()] == names
    with pytest.raises(LookupError, match="granularity: use 'module': found no ModuleList"):
        at.groups(nn.Linear(2, 2))


def test_the_jacobian_has_the_gradient_of_each_loss_and_changes_no_grad() -> None:
    model = Net()
    expected = {}
    for name, loss in losses_of(model).items():
        params = list(model.parameters())
        grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        expected[name] = {
            key: torch.zeros_like(param) if grad is None else grad
            for (key, param), grad in zip(model.named_parameters(), grads, strict=True)
        }
    surgery = gs.Surgery(at_shared(Uneven()), scaled(2.0, gs.Parameters("trunk.0.weight")))
    with surgery.attach(model) as live:
        losses = losses_of(model)
        rows = live.jacobian(losses)
        assert all(param.grad is None for param in model.parameters())
        live.backward(losses)  # the graph is kept
    for key, param in model.named_parameters():
        wanted = torch.stack([of_task[key] for of_task in expected.values()])
        assert rows[key].shape == (len(losses), *param.shape)
        assert torch.equal(rows[key], wanted * 2 if key == "trunk.0.weight" else wanted)


def test_the_plan_shows_the_named_module_of_the_representation() -> None:
    said = gs.Surgery(at_shared(Uneven(), engine="feature", features="trunk.2")).plan(Net())
    assert "engine feature at 'trunk.2', granularity whole" in said
    wrong = gs.Surgery(at_shared(Uneven(), engine="feature", features="trunk.9"))
    with pytest.raises(LookupError, match=r"features: .* There is no module 'trunk\.9'"):
        wrong.plan(Net())


# State


def _train(
    surgery: gs.Surgery, model: nn.Module, optimizer: torch.optim.Adam, steps: range
) -> None:
    with surgery.attach(model, optimizer) as live:
        for step in steps:
            optimizer.zero_grad()
            live.backward(losses_of(model, step))
            optimizer.step()


@pytest.mark.parametrize("aggregator", [Running(), gs.GradNorm(), gs.FAMO(), gs.GradDrop()])
def test_a_resumed_aggregator_continues_bit_for_bit(aggregator: Aggregator) -> None:
    def made() -> tuple[gs.Surgery, Net, torch.optim.Adam]:
        model = Net()
        surgery = gs.Surgery(gs.Intervention(aggregator, at=gs.SharedParameters()), seed=3)
        return surgery, model, torch.optim.Adam(model.parameters(), lr=0.05)

    whole = made()
    _train(*whole, range(6))
    first, second = made(), made()
    _train(*first, range(3))
    for own, other in zip(second, first, strict=True):
        own.load_state_dict(other.state_dict())
    _train(*second, range(3, 6))
    assert same(dict(second[1].named_parameters()), dict(whole[1].named_parameters()))
    again = made()
    _train(*again, range(3))
    _train(*again, range(3, 6))  # attached again it goes on too
    assert same(dict(again[1].named_parameters()), dict(whole[1].named_parameters()))


def test_the_state_is_of_the_earlier_steps() -> None:
    model = Net()
    with gs.Surgery(at_shared(Running())).attach(model) as live:
        for step in range(2):
            live.backward(losses_of(model, step))
        first, second = live.conflicts.fetch()
    norms = torch.tensor([first.norms, second.norms], dtype=torch.float64)
    assert first.weights == pytest.approx((1 / (1 + norms[0])).tolist())
    assert second.weights == pytest.approx((1 / (1 + 0.5 * norms[0] + norms[1])).tolist())


@pytest.mark.parametrize("tasks", ["b, a, c", "a, b, d"])
@pytest.mark.parametrize("how", ["attached again", "loaded", "loaded while attached"])
@pytest.mark.parametrize("aggregator", [Running(), gs.FAMO(), gs.UncertaintyWeighting()], ids=repr)
def test_the_state_belongs_to_tasks_by_name(aggregator: Aggregator, how: str, tasks: str) -> None:
    def some(names: str) -> dict[str, Tensor]:
        return dict(zip(names.split(", "), losses_of(model).values(), strict=True))

    model, surgery = Net(), gs.Surgery(at_shared(aggregator))
    with surgery.attach(model) as live:
        live.backward(some("a, b, c"))
        state = surgery.state_dict()
    if how != "attached again":
        surgery = gs.Surgery(at_shared(aggregator))
    if how == "loaded":
        surgery.load_state_dict(state)
    with surgery.attach(model) as live:
        if how == "loaded while attached":
            live.backward(some(tasks))
            surgery.load_state_dict(state)
        with pytest.raises(ValueError, match=f"at 'shared' was made for a, b, c, found {tasks}"):
            live.backward(some(tasks))
        live.backward(some("a, b, c"))


@pytest.mark.filterwarnings("error")
def test_the_jacobian_of_a_parameter_without_dimensions_has_a_zero_where_it_is_not_reached() -> (
    None
):
    model = Net()
    scale = nn.Parameter(torch.tensor(2.0))
    model.register_parameter("scale", scale)
    losses = losses_of(model)
    losses["a"] = losses["a"] * scale
    with gs.Surgery(at_shared(gs.PCGrad())).attach(model) as live:
        rows = live.jacobian(losses)
    assert rows["scale"].tolist() == [pytest.approx(losses["a"].item() / 2), 0.0, 0.0]


@pytest.mark.filterwarnings("ignore:the gradients of .* were never combined")
def test_a_block_with_a_backward_that_combines_nothing_warns_after_a_jacobian_too() -> None:
    model = Net()
    surgery = gs.Surgery(at_shared(gs.PCGrad()))
    with (
        pytest.warns(gs.SurgeryWarning, match="so no step was combined"),
        surgery.attach(model) as live,
    ):
        live.jacobian(losses_of(model))
        live.backward(losses_of(model), aggregate=False)
