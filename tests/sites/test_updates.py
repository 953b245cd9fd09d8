"""Updates: the optimizer's change of each parameter is transformed, its state is not."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

import gradsurg as gs
from gradsurg.transforms.base import Stateless
from tests.nets import attached, small, train, weights
from tests.sites.points import Acts, Noted, calls_of


def _trained(transform: Stateless | None, make, steps: int = 5) -> tuple[nn.Module, object]:
    model = small()
    optimizer = make(model.parameters())
    if transform is None:
        train(model, optimizer, steps)
    else:
        with attached(model, transform, gs.Updates(), optimizer):
            train(model, optimizer, steps)
    return model, optimizer


OPTIMIZERS = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: Adam(params, lr=0.1),
    "foreach": lambda params: Adam(params, lr=0.1, foreach=True),
    "fused": lambda params: AdamW(params, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unchanged_updates_leave_the_bits_of_the_optimizer(name: str) -> None:
    plain, _ = _trained(None, OPTIMIZERS[name])
    for transform in (gs.Identity(), Acts(Tensor.clone), gs.Clip(1e6)):
        treated, _ = _trained(transform, OPTIMIZERS[name])
        assert all(map(torch.equal, weights(plain), weights(treated))), transform


def test_the_transform_gets_the_update_the_value_before_it_and_the_gradient() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.5)
    noted = Noted("value", "gradient")
    with attached(model, noted, gs.Updates(), optimizer) as live:
        for _ in range(2):
            optimizer.zero_grad()
            (3 * model.weight).sum().backward()
            optimizer.step()
    first, second = ([tensor[0, 0].item() for tensor in each] for each in noted.tensors)
    assert first == [-1.5, 1.0, 3.0]
    assert second == [-2.25, -0.5, 3.0]  # 0.5 * (0.5 * 3 + 3)
    assert calls_of(live) == {"weight": 2}


@pytest.mark.parametrize("at", [gs.Updates(), gs.Weights()], ids=repr)
def test_a_step_that_a_fused_optimizer_skips_changes_nothing(at: gs.Updates) -> None:
    model = small()
    optimizer = Adam(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    surgery = gs.Surgery(gs.Intervention(gs.AddNoise(sigma=1.0), at=at))
    with surgery.attach(model, optimizer, scaler=scaler):
        train(model, optimizer, 1)
        before = weights(model)
        scaler.scale(model(torch.full((2, 6), torch.inf)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, weights(model), before))


def test_a_closure_is_allowed() -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model.weight**2).sum()
        loss.backward()
        return loss

    before = model.weight.detach().clone()
    with attached(model, gs.Scale(2.0), gs.Updates("weight"), optimizer):
        optimizer.step(closure)
    torch.testing.assert_close(model.weight, before * (1 - 2 * 0.2))


def test_the_plan_has_the_size_of_the_copies() -> None:
    model = small()
    surgery = gs.Surgery(gs.Intervention(gs.GrokfastEMA(), at=gs.Updates("first.weight")))
    assert "121 bytes of state, 120 bytes of copied parameters in each step" in surgery.plan(model)
    assert "copied" not in gs.Surgery(gs.Intervention(gs.Scale(2.0))).plan(model)
