"""Uses: the gradient of each use of a tensor, which no hook on the tensor itself ever sees."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, func, nn

import gradsurg as gs
from gradsurg.sites.places import Selector
from tests.nets import attached, backward, small
from tests.sites.points import TEN, Made, met, passed, point


def _using(function: Callable[[Tensor], Tensor]) -> Made:
    """A model that makes something of what its part has returned."""

    def forward(self: Made, x: Tensor) -> Tensor:
        self.kept = self.part(x)
        return function(self.kept)

    return Made(forward, part=Made(lambda self, x: x * 1))


def _reused() -> Made:
    return _using(lambda y: (y * 2 + y * 3 + y * 5).sum())


def _viewed(y: Tensor) -> Tensor:
    view = y.view(1, 1)
    return (view * 2 + view * 3).sum() + (y * 5).sum()


def _changed_in_place(y: Tensor) -> Tensor:
    z = y * 2
    y.mul_(3)
    return (z + y * 5 + y * 7).sum()


PART = gs.Uses("part")


@pytest.mark.parametrize(
    ("model", "at", "grad"),
    [
        (_reused(), gs.Uses("part", use=0), 28.0),
        (_reused(), gs.Uses("part", use=0) | gs.Uses("part", use=2), 73.0),
        (_reused(), PART & ~gs.Uses("part", use=1), 73.0),
        (_reused(), PART.first(2), 55.0),
        (_reused(), PART.where(lambda place: place.occurrence == 1), 37.0),
        (_reused(), PART.expect(3), 100.0),
        # An operation that takes a tensor twice is two uses, a view is one.
        (_using(lambda y: torch.mul(y, y).sum()), gs.Uses("part", use=1), 11.0),
        (_using(_viewed), gs.Uses("part", use=0), 55.0),
        (_using(_viewed), gs.Uses("part", use=1), 55.0),
        # A change in place is the last use of a tensor: what follows uses another one.
        (_using(_changed_in_place), gs.Uses("part", use=0), 56.0),
        (_using(_changed_in_place), gs.Uses("part", use=1), 362.0),
    ],
)
def test_uses_are_chosen_in_the_order_of_the_operations(
    model: Made, at: Selector, grad: float
) -> None:
    assert passed(model, TEN, at)[0] == [grad]


@pytest.mark.parametrize("function", [_viewed, _changed_in_place])
def test_there_are_as_many_sites_as_uses(function: Callable[[Tensor], Tensor]) -> None:
    sites = {"part#0/use[0]": 1, "part#0/use[1]": 1}
    assert passed(_using(function), gs.Identity(), PART)[1] == sites
    with pytest.raises(LookupError, match="3 sites were expected, found 2"):
        passed(_using(function), gs.Identity(), PART.expect(3))


def test_a_single_use_is_a_site_and_the_last_output_has_no_use_in_the_model() -> None:
    model = nn.Sequential(nn.Flatten(), *small())
    with attached(model, gs.Identity(), gs.Uses("*")) as live:
        backward(model)
    names = ["1#0", "2#0", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert set(met(live)) == {f"{name}/use[0]" for name in names}
    assert {entry.site: entry.skipped for entry in live.ledger if entry.skipped} == {
        "0#0/use[0]": "needs no gradient",
        "3#0/use[0]": "no use of it inside the model's call",
    }


def _tied() -> Made:
    """One weight, read by an embedding and by the output, like in language models."""
    torch.manual_seed(0)
    embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embed.weight
    return Made(lambda self, x: self.head(self.embed(x)).square().sum(), embed=embed, head=head)


def test_the_uses_of_a_tied_weight_are_numbered_under_all_its_names() -> None:
    plain, parts = _tied(), []
    plain(torch.tensor([0, 1])).backward()
    for use in range(2):
        model = _tied()
        with attached(model, gs.Zero(), gs.Uses("head.weight", use=use)) as live:
            model(torch.tensor([0, 1])).backward()
        assert model.embed.weight.grad is not None
        parts.append(model.embed.weight.grad)
        (entry,) = live.ledger
        assert entry.site == f"embed.weight/use[{use}]"
        assert entry.aliases == [f"head.weight/use[{use}]"]
    assert plain.embed.weight.grad is not None
    torch.testing.assert_close(parts[0] + parts[1], plain.embed.weight.grad)
    # Without the embedding's use, only the output's is left, and that reaches every row.
    assert parts[0].any(dim=1).all()
    assert parts[1].any(dim=1).tolist() == [True, True, False, False, False]


def test_several_tensors_of_one_call_have_paths() -> None:
    pair = Made(lambda self, x: {"a": x * 1, "b": x * 2})
    model = nn.Sequential(pair, Made(lambda self, out: out["a"] * out["b"] + out["a"]))
    _, sites = passed(model, gs.Identity(), gs.Uses("0"))
    assert set(sites) == {"0#0.a/use[0]", "0#0.a/use[1]", "0#0.b/use[0]"}


def test_autograd_grad_returns_the_changed_gradient_whichever_inputs_are_asked_for() -> None:
    # 1c: a tensor hook is not in the value when the input is asked for as well; this is.
    for also in (False, True):
        model, x = _reused(), point()
        with attached(model, TEN, gs.Uses("part", use=1)):
            loss = model(x)
            grads = torch.autograd.grad(loss, (model.kept, x) if also else (model.kept,))
        assert {grad.item() for grad in grads} == {37.0}


def _squared() -> Made:
    """One weight, used twice: the gradient of the second use is that of `y * w` by `w`."""
    weight = nn.Parameter(torch.tensor([2.0]))
    return Made(lambda self, x: ((x * self.weight) * self.weight).sum(), weight=weight)


def _by_grad(model: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    return func.grad(lambda params: func.functional_call(model, params, (x,)))(params)["weight"]


def _by_vmap(model: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    grad_of = func.grad(lambda params, x: func.functional_call(model, params, (x,)))
    return func.vmap(grad_of, in_dims=(None, 0))(params, x)["weight"].sum(0)


def _by_tensors(model: nn.Module, params: dict[str, Tensor], x: Tensor, factor: float) -> Tensor:
    weight = params["weight"].clone().requires_grad_()
    given = weight if factor == 0 else weight * factor  # a leaf, or fast weights
    func.functional_call(model, {"weight": given}, (x,)).backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize(
    "way", [_by_grad, _by_vmap, partial(_by_tensors, factor=0.0), partial(_by_tensors, factor=1.0)]
)
def test_a_tensor_in_place_of_a_parameter_in_a_functional_call_has_its_name(way) -> None:
    model, x = _squared(), torch.tensor([3.0, 5.0])
    params = {"weight": model.weight.detach()}
    assert way(model, params, x).tolist() == [32.0]  # 2 * (3 + 5) by each of two uses
    with attached(model, gs.Scale(10.0), gs.Uses("weight", use=1)) as live:
        assert way(model, params, x).tolist() == [16.0 + 160.0]
    assert met(live) == {"weight/use[1]": 1}


def test_a_parameter_not_passed_to_torch_func_is_reported_as_a_constant() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(2)
    with attached(model, gs.Scale(10.0), gs.Uses("*")) as live:
        func.jacrev(model)(x)
    skipped = {entry.site: entry.skipped for entry in live.ledger if not entry.calls}
    assert "a constant to torch.func" in skipped["0.weight/use[0]"]
    with (
        pytest.raises(LookupError, match="torch.func was not given are constants there"),
        attached(model, gs.Scale(10.0), gs.Uses("0.weight")),
    ):
        func.jacrev(model)(x)


def test_a_module_inside_code_compiled_before_is_refused() -> None:
    # Its hooks are not called, and the uses of its output are in one node.
    model, x = _using(lambda y: y * 2), point()
    compiled = torch.compile(model, backend="aot_eager")
    try:
        compiled(x)
        with (
            pytest.raises(LookupError, match=r"0 of part#0\. .*compiled code are not found"),
            attached(compiled, gs.Zero(), gs.Uses("part")),
        ):
            compiled(x)
    finally:
        torch.compiler.reset()
