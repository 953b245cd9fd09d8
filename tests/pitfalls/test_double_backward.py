"""Pitfall 33: double backward through every transform.

The property `differentiable` is tested for all of them by `check_transform`, here with real hooks.
"""

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import Need, Transform
from tests.nets import states_of
from tests.transforms.cases import build, names

RIGHT = [name for name in names() if "differentiable" in build(name).properties]
SITES: dict[Need, Selector] = {
    "examples": gs.Parameters(),
    "product": gs.Nodes("Addmm", side="leave", edge=1, module="2"),
    "entering": gs.Nodes("Relu", side="leave"),
    "layer": gs.Inputs("2"),
    "error": gs.Outputs("0"),
    "value": gs.Outputs("0"),
}
"""Sites that satisfy a need, without which `Parameters` do."""


def is_hookable(transform: Transform) -> bool:
    """Whether a hook on one tensor has all that it needs, and each pass has the same draws."""
    return (
        transform.scope == "tensor"
        and "deterministic" in transform.properties
        and transform.needs <= {"value"}
    )


@pytest.mark.parametrize("name", [name for name in RIGHT if is_hookable(build(name))])
def test_p33_double_backward_differentiates_the_transform(name: str) -> None:
    def gradient(x: Tensor) -> Tensor:
        """Return d/dx of sum(h^3), h = x^3, with the gradient at h transformed."""
        h = x**3
        with gs.hook(h, build(name)):  # removed before the second backward pass
            (grad,) = torch.autograd.grad((h**3).sum(), x, create_graph=True)
        return grad if grad.requires_grad else grad + 0 * x

    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.autograd.gradcheck(gradient, x.requires_grad_(), atol=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, create_graph: bool) -> None:
    """Do one step; `backward(create_graph=True)` would warn."""
    params = [*model.parameters()]
    loss = model(torch.ones(5, 3)).square().mean()
    grads = torch.autograd.grad(loss, params, create_graph=create_graph)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()


@pytest.mark.parametrize("name", sorted({*names()} - {*RIGHT, "update_clip"}))  # at Updates only
def test_p33_a_transform_that_is_not_differentiable_refuses_a_graph(name: str) -> None:
    transform = build(name)
    at = next((SITES[need] for need in SITES if need in transform.needs), gs.Parameters())
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters())
    with gs.Surgery(gs.Intervention(transform, at=at)).attach(model, optimizer):
        if "examples" not in transform.needs:  # those of `backward`
            step(model, optimizer, create_graph=False)
        with pytest.raises(RuntimeError, match=": use no create_graph=True: .* at '"):
            step(model, optimizer, create_graph=True)


def test_p33_a_graph_is_refused_where_the_gradient_itself_has_none() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    refused = pytest.raises(RuntimeError, match=": use no create_graph=True")
    with gs.hook(weight, gs.AddDecayed(0.5)), refused:
        torch.autograd.grad((3 * weight).sum(), weight, create_graph=True)


def test_p33_a_transform_of_your_own_is_not_refused() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    with gs.hook(x, lambda grad: grad * 2):
        (grad,) = torch.autograd.grad(x**3, x, create_graph=True)
    assert torch.autograd.grad(grad, x)[0].item() == pytest.approx(24.0)


@pytest.mark.parametrize("transform", [gs.AdaptiveClip(), gs.ErrorFeedback(gs.ClipGlobalNorm())])
def test_p33_a_state_of_a_group_keeps_no_graph_of_earlier_steps(transform: Transform) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    surgery = gs.Surgery(gs.Intervention(transform, at=gs.Parameters()))
    with surgery.attach(model, optimizer):
        step(model, optimizer, create_graph=True)
        (state,) = states_of(surgery).values()
    assert {tensor.requires_grad for tensor in state.values()} == {False}
