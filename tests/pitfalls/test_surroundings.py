"""Pitfalls of hooks beside those of PyTorch, of other libraries and of replaced parameters."""

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from tests.nets import attached, backward, sgd, small, train


class Reused(nn.Module):
    """One activation that is used three times: 2 h + 3 h + 5 h."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.part.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.part(x)
        return 2 * h + 3 * h + 5 * h


def test_a_full_backward_hooks_wrapper_node_does_not_hide_the_inner_nodes() -> None:
    model = small()
    plain = model(torch.ones(1, 6)).grad_fn.name()
    with model.last.register_full_backward_hook(lambda *_: None):
        assert model(torch.ones(1, 6)).grad_fn.name() != plain
        with attached(model, gs.Scale(2.0), gs.Nodes("Addmm", module="last")) as live:
            backward(model)
    assert [entry.site for entry in live.ledger] == ["last#0/AddmmBackward[0]"]


def test_the_global_random_generator_is_not_used() -> None:
    model = small()
    before = torch.get_rng_state()
    optimizer, chance = sgd(model), gs.Probability(p=1.0)
    with attached(model, gs.AddNoise(sigma=1.0), optimizer=optimizer, when=chance):
        train(model, optimizer, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_leaf_input_is_hooked_once_and_not_once_a_call() -> None:
    model, x = Reused(), torch.ones(1, requires_grad=True)
    with attached(model, gs.Scale(2.0), gs.Inputs("part", path="total")):
        for _ in range(3):
            x.grad = None
            model(x).sum().backward()
            assert x.grad is not None
            assert x.grad.item() == 20.0


def test_attaching_the_same_surgery_twice_is_refused() -> None:
    surgery, model = gs.Surgery(gs.Intervention(gs.Scale(2.0))), Reused()
    with surgery.attach(model):
        with pytest.raises(RuntimeError, match="attached already"):
            surgery.attach(model)
        model(torch.ones(1)).sum().backward()
    assert model.part.weight.grad is not None
    assert model.part.weight.grad.item() == 20.0
