"""Captured: what `torch.autograd.grad` returns, the same whichever inputs are asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad as grad_by_name
from torch.overrides import TorchFunctionMode

import gradsurg as gs
from tests.nets import attached
from tests.sites.points import TEN, Made, Times, TimesValue, met, names_of_sites


class Chain(Made):
    """a -> x = 3a -> y = 5x, as two modules; a is a parameter."""

    a: nn.Parameter

    def __init__(self) -> None:
        parts = {"three": Times(3.0), "five": Times(5.0), "x": torch.empty(0)}
        super().__init__(Chain.run, a=nn.Parameter(torch.ones(2)), **parts)

    def run(self) -> Tensor:
        self.x = self.three(self.a)
        return self.five(self.x).sum()


def _modes() -> list[object]:
    return vars(torch.overrides)["_get_current_function_mode_stack"]()


def _list(grads: tuple[Tensor | None, ...]) -> list[list[float] | None]:
    return [None if grad is None else grad.tolist() for grad in grads]


def test_autograd_grad_may_be_imported_by_name_and_called_with_any_form_of_inputs() -> None:
    model = Chain()
    with attached(model, TEN, gs.Captured("a")):
        assert _list(grad_by_name(model(), model.a)) == [[150.0] * 2]
        assert _list(grad_by_name([model()], inputs=model.parameters())) == [[150.0] * 2]
        once = torch.autograd.grad(model(), (model.a, model.a))
        assert _list(once) == [[150.0] * 2] * 2
        if torch.__version__ >= "2.13":
            by_key = torch.autograd.grad(model(), {"a": model.a})
            assert {key: grad.tolist() for key, grad in by_key.items()} == {"a": [150.0] * 2}


@pytest.mark.parametrize(
    ("fields", "sites"),
    [
        ({"pattern": "three"}, {"three#0"}),
        ({"pattern": "*", "call": 0}, {"three#0"}),
        ({"pattern": "*", "ndim": 1}, {"a"}),
        ({"pattern": "*", "size": [2, 5]}, {"a"}),
        ({"pattern": "re:a|three"}, {"a", "three#0"}),
        ({"types": "Times"}, {"three#0"}),
        ({"types": "Chain"}, {"a"}),
    ],
)
def test_the_fields_select_parameters_and_outputs(fields: dict[str, Any], sites: set[str]) -> None:
    model = Chain()
    with attached(model, gs.Zero(), gs.Captured(**fields)) as live:
        torch.autograd.grad(model(), (model.x, model.a))
    assert set(met(live)) == sites


def _twice() -> Made:
    def forward(self: Made, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.same(self.twice(x))
        return first, self.twice(first)

    return Made(forward, twice=Times(2.0), same=nn.Identity())


def test_calls_of_a_shared_module_have_their_own_sites_and_one_tensor_has_one() -> None:
    model, x = _twice(), torch.ones(1, requires_grad=True)
    with attached(model, TEN, gs.Captured("re:twice|same")) as live:
        model(x)
        first, second = model(x)
        grads = torch.autograd.grad(second.sum() * 3, (first, second))
    assert _list(grads) == [[60.0], [30.0]]
    assert [names for names in names_of_sites(live) if "twice" in names[0]] == [
        ["twice#0", "same#0"],
        ["twice#1"],
    ]


def test_a_parameter_that_a_module_returns_goes_by_its_own_name() -> None:
    model = nn.Sequential(Made(lambda self: self.prompt, prompt=nn.Parameter(torch.ones(1))))
    with attached(model, TEN, gs.Captured("re:0.*")) as live:
        (prompt,) = [model[0]()]
        assert _list(torch.autograd.grad((prompt * 2).sum(), prompt)) == [[20.0]]
        with torch.no_grad():
            prompt.add_(1.0)  # as an optimizer does
        assert _list(torch.autograd.grad((prompt * 2).sum(), prompt)) == [[20.0]]
    assert names_of_sites(live) == [["0.prompt", "0#0"]]


def test_a_tensor_changed_in_place_is_left_alone_with_a_warning() -> None:
    model = Chain()
    with (
        pytest.warns(gs.SurgeryWarning, match="'three#0' was requested, not changed: it was chan"),
        attached(model, gs.Zero(), gs.Captured("three")),
    ):
        x = model.three(model.a)
        torch.autograd.grad(x.sum(), x)
        x.mul_(2.0)
        assert _list(torch.autograd.grad(x.sum(), x)) == [[1.0, 1.0]]


# What `torch.autograd.grad` can be asked for


def test_create_graph_goes_through_the_transform() -> None:
    w = nn.Parameter(torch.tensor([2.0]))
    model = nn.ParameterDict({"w": w})
    with attached(model, TEN, gs.Captured("w")):
        (first,) = torch.autograd.grad(w**3, w, create_graph=True)
        # 10 * 3 w^2; of that 10 * 6 w, times 10 for being captured again.
        assert first.item() == 120.0
        assert torch.autograd.grad(first, w)[0].item() == 1200.0
    with attached(model, TimesValue(), gs.Captured("w")):
        (bare,) = torch.autograd.grad(w**3, w)
        (first,) = torch.autograd.grad(w**3, w, create_graph=True)
    assert bare.item() == first.item() == 24.0
    assert not bare.requires_grad  # the value has a graph only under create_graph
    # 3 w^2 w; of that 9 w^2.
    assert torch.autograd.grad(first, w)[0].item() == 36.0


def test_an_unused_input_has_no_gradient_and_is_skipped() -> None:
    model = Chain()
    with (
        pytest.warns(gs.SurgeryWarning, match=r"a \(what was differentiated does not depend on it"),
        attached(model, gs.AddNoise(1.0), gs.Captured("a")),
    ):
        other = torch.ones(1, requires_grad=True)
        assert _list(torch.autograd.grad(other * 2, model.a, allow_unused=True)) == [None]
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(other * 2, model.a)
    assert not model.a._backward_hooks


def test_many_gradients_at_once_are_refused_by_name() -> None:
    model = Chain()
    with attached(model, gs.Identity(), gs.Captured("a")):
        y = model.a * 2
        with pytest.raises(RuntimeError, match="site 'a': with is_grads_batched=True there"):
            torch.autograd.grad(y, model.a, torch.eye(2), is_grads_batched=True)
        x = model.three(model.a)  # nobody's
        rows = torch.autograd.grad(x * 2, x, torch.eye(2), is_grads_batched=True)
        assert rows[0].tolist() == [[2.0, 0.0], [0.0, 2.0]]
        torch.autograd.grad(model(), model.a)


# The mode


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_removing_the_mode_leaves_the_modes_above_it_active() -> None:
    model = Chain()
    surgery = gs.Surgery(
        gs.Intervention(TEN, gs.Captured("a"), names=("tens",)),
        gs.Intervention(gs.Identity(), gs.Captured("a")),
    )
    with surgery.attach(model) as live, Counting() as counting:
        assert _list(torch.autograd.grad(model(), model.a)) == [[150.0, 150.0]]
        seen = counting.count
        assert seen > 0
        live.remove("tens")
        assert _modes()[-1] is counting
        assert _list(torch.autograd.grad(model(), model.a)) == [[15.0, 15.0]]
        assert counting.count > seen
    assert _modes() == []


# Contexts


def test_the_search_for_discarded_hooks_is_not_captured() -> None:
    model = Chain()
    surgery = gs.Surgery(
        gs.Intervention(gs.Scale(2.0), at=gs.Captured("a")),
        gs.Intervention(gs.Scale(2.0), at=gs.Parameters("a")),
    )
    with surgery.attach(model) as live:
        torch.autograd.grad(model(), model.a)
        model().backward()
    assert [row["seen"] for row in live.effects.rows() if row["transform"] == "scale"] == [1]
