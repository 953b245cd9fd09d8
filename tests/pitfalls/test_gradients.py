"""Pitfalls of hooks on tensors and nodes: PyTorch's behaviour and that of gradsurg."""

import gc
import re

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import gradsurg as gs
from tests.nets import attached, backward, gradients, small
from tests.pitfalls.nets import Reused, Saved, leaf


def test_p01_a_tensor_hook_gets_the_sum_and_uses_gets_each_use() -> None:
    seen: list[float] = []
    x = leaf()
    x.register_hook(lambda grad: seen.append(grad.item()))
    (2 * x + 3 * x + 5 * x).sum().backward()
    assert seen == [10.0]
    for site, calls in ((gs.Outputs("part"), [1]), (gs.Uses("part"), [1, 1, 1])):
        with attached(model := Reused(), gs.Scale(2.0), site) as live:
            model(leaf()).sum().backward()
        assert [entry.calls for entry in live.ledger] == calls
        assert gradients(model)["part.weight"].item() == 20.0


def test_p05_an_in_place_operation_after_a_hooked_output_works() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    handle = model[0].register_full_backward_hook(lambda *_: None)
    with handle, pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        model(torch.ones(1, 2))
    with attached(model, gs.Scale(2.0), gs.Outputs("0")) as live:
        model(torch.ones(1, 2)).sum().backward()
    assert [entry.calls for entry in live.ledger] == [1]


def test_p09_effects_measure_the_gradient_before_later_modifications() -> None:
    x, grads = leaf(), []
    x.register_post_accumulate_grad_hook(lambda x: grads.append(x.grad))
    for factor in (2.0, 4.0):
        (factor * x).sum().backward()
    assert [grad.item() for grad in grads] == [6.0, 6.0]  # the running sum, twice the same tensor
    with attached(model := Reused(), gs.Identity(), gs.Parameters(stage="accumulated")) as live:
        for factor in (2.0, 4.0):
            (factor * model(leaf())).sum().backward()
            live.tick()
    (row,) = live.effects.rows()
    assert row["norm_before"] == (20.0 + 60.0) / 2


def test_p10_a_gradient_of_none_is_passed_on() -> None:
    class OneOfTwo(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x.unbind()

    x, seen = leaf(1.0, 2.0), []
    first, second = x.unbind()
    second.register_hook(seen.append)
    first.backward()
    assert seen == [None]
    model = nn.Sequential(OneOfTwo())
    with (
        pytest.warns(gs.SurgeryWarning, match=re.escape("0#0.1")),
        attached(model, gs.Scale(2.0), gs.Outputs("0")) as live,
    ):
        model(x)[0].backward()
    assert {entry.site: entry.calls for entry in live.ledger} == {"0#0.0": 1, "0#0.1": 0}


def test_p11_captured_acts_for_any_inputs_of_autograd_grad() -> None:
    a = leaf()
    x = 3 * a
    x.register_hook(lambda grad: 2 * grad)
    y = (5 * x).sum()
    assert torch.autograd.grad(y, x, retain_graph=True)[0].item() == 10.0
    assert torch.autograd.grad(y, (x, a))[0].item() == 5.0
    model = Reused()
    held: list[Tensor] = []
    model.part.register_forward_hook(lambda module, args, output: held.append(output))
    with attached(model, gs.Scale(2.0), gs.Captured("part")):
        y = model(leaf()).sum()
        (alone,) = torch.autograd.grad(y, held[0], retain_graph=True)
        beside, _ = torch.autograd.grad(y, (held[0], model.part.weight))
    assert alone.item() == beside.item() == 20.0


def test_p12_the_accumulate_grad_node_is_not_what_a_hook_depends_on() -> None:
    x, calls = leaf(), []
    get_gradient_edge(x).node.register_prehook(calls.append)
    gc.collect()
    x.sum().backward()
    assert calls == []  # nothing held the node, and its hooks went with it
    with attached(model := small(), gs.Scale(2.0), gs.Parameters(stage="accumulated")) as live:
        gc.collect()
        backward(model)
        model.zero_grad()
        backward(model)
    assert {entry.calls for entry in live.ledger} == {2}


def test_p13_an_output_whose_base_is_modified_is_reported_as_never_fired() -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:1]

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.view = View()

        def forward(self, x: Tensor) -> Tensor:
            base = 2 * x
            part = self.view(base)
            base.mul_(3)
            return part.sum()

    with (
        pytest.warns(gs.SurgeryWarning, match="no gradient ever passed at: view#0"),
        attached(model := Written(), gs.Scale(10.0), gs.Outputs("view")),
    ):
        x = leaf(1.0, 2.0)
        model(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 0.0]


def test_p15_a_leaf_input_is_hooked_once_and_not_once_a_call() -> None:
    x = leaf()

    def forward() -> Tensor:
        x.register_hook(lambda grad: 10 * grad)
        return 2 * x

    forward().sum().backward()
    assert x.grad is not None
    assert x.grad.item() == 20.0
    x.grad = None
    forward().sum().backward()
    assert x.grad is not None
    assert x.grad.item() == 200.0
    model, x = Reused(), leaf()
    with attached(model, gs.Scale(2.0), gs.Inputs("part", path="total")):
        for _ in range(3):
            x.grad = None
            model(x).sum().backward()
            assert x.grad is not None
            assert x.grad.item() == 20.0


def test_p17_a_module_that_returns_its_input_has_an_output_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Identity(), nn.Dropout(0.5)).eval()
    with attached(model, gs.Scale(2.0), gs.Outputs()) as live:
        model(torch.ones(1, 1)).sum().backward()
    assert gradients(model)["0.weight"].item() == 2.0 * 2 * 2
    assert [(entry.site, entry.aliases) for entry in live.ledger] == [
        ("0#0", []),
        ("1#0", []),
        ("2#0", []),
    ]


@pytest.mark.slow
def test_p19_hooks_that_a_compiled_model_ignores_are_reported() -> None:
    model = small()
    compiled = torch.compile(model, backend="eager")
    backward(compiled)
    with (
        pytest.warns(gs.SurgeryWarning, match="no gradient ever passed at: first#0"),
        attached(compiled, gs.Scale(2.0), gs.Outputs("first")),
    ):
        backward(compiled)
    with attached(compiled, gs.Scale(2.0)) as live:  # hooks on parameters are always seen
        backward(compiled)
    assert {entry.calls for entry in live.ledger} == {1}


def test_p20_calls_are_counted_correctly_with_early_stopping_checkpoints() -> None:
    with attached(model := Saved(), gs.Identity(), gs.Nodes("Tanh")) as live:
        for _ in range(3):
            model(torch.ones(1, 2)).backward()
    assert {entry.site: entry.calls for entry in live.ledger} == {
        "block.1#0/TanhBackward[0]": 3,
    }


def test_p21_a_random_transform_of_values_is_refused_under_a_checkpoint() -> None:
    model, noise = Saved(), gs.AddNoise(sigma=1.0)
    with attached(model, noise, gs.Activations("block.0")):
        loss = model(torch.ones(1, 2))
        with pytest.raises(RuntimeError, match=r"block\.0#0.* recomputed by a checkpoint"):
            loss.backward()
