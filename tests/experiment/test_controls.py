"""The control `update_norm_matched`: the plain update with the norm of the treated one."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import gradsurg as gs
from gradsurg.experiment.controls import ActingControl, control_interventions
from gradsurg.transforms.base import Transform

Make = Callable[[nn.Module], Optimizer]


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


def trained(
    make: Make, surgery: gs.Surgery, steps: int = 6, linear: bool = False
) -> list[dict[str, Tensor]]:
    """Return the update of each parameter in each step, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = make(model)
    generator = torch.Generator().manual_seed(1)
    shapes = [param.shape for param in model.parameters()]
    slopes = [torch.randn(shape, generator=generator).double() for shape in shapes]
    inputs = torch.randn(8, 4, generator=generator).double()
    rows = []
    with surgery.attach(model, optimizer):
        for step in range(steps):
            before = {name: param.detach().clone() for name, param in model.named_parameters()}
            optimizer.zero_grad()
            if linear:  # its gradient is the same in both arms, wherever they are
                products = zip(model.parameters(), slopes, strict=True)
                loss = (1 + step) * sum((param * slope).sum() for param, slope in products)
            else:
                loss = (model(inputs) - inputs[:, :2]).square().mean()
            assert isinstance(loss, Tensor)
            loss.backward()
            optimizer.step()
            rows.append({n: p.detach() - before[n] for n, p in model.named_parameters()})
    return rows


def control_of(item: gs.Intervention, kind: ActingControl = "update_norm_matched") -> gs.Surgery:
    return gs.Surgery(*control_interventions([item], kind))


def assert_same(rows: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> None:
    for row, other in zip(rows, others, strict=True):
        for name, update in row.items():
            torch.testing.assert_close(update, other[name], rtol=1e-6, atol=1e-12)


def assert_same_norms(rows: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> None:
    def norms(steps: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [{name: update.norm() for name, update in row.items()} for row in steps]

    assert_same(norms(rows), norms(others))


@pytest.mark.parametrize("transform", [gs.Sign(), gs.Clip(0.01), gs.ClipGlobalNorm(0.1)])
def test_under_sgd_it_is_norm_matched(transform: Transform) -> None:
    item = gs.Intervention(transform)
    make = lambda model: SGD(model.parameters(), lr=0.1)  # noqa: E731 (one line a case)
    matched = trained(make, control_of(item))
    assert_same(matched, trained(make, control_of(item, "norm_matched")))
    if not isinstance(transform, gs.ClipGlobalNorm):  # which turns no gradient
        with pytest.raises(AssertionError):
            assert_same(matched, trained(make, gs.Surgery(item)))


@pytest.mark.parametrize(
    "item",
    [
        gs.Intervention(gs.Sign()),
        gs.Intervention(gs.GrokfastEMA()),
        gs.Intervention(gs.Chain(gs.AddNoise(0.5), gs.Clip(0.3))),
        gs.Intervention(gs.Sign(), when=gs.Steps(start=2, stop=4)),
        gs.Intervention(gs.Sign(), gs.Parameters("2.*")),
    ],
)
@pytest.mark.parametrize("make", [adam, lambda m: AdamW(m.parameters(), lr=0.1, fused=True)])
def test_under_adam_each_update_has_the_norm_of_the_treated_arms(
    item: gs.Intervention, make: Make
) -> None:
    treated = trained(make, gs.Surgery(item), linear=True)
    control = trained(make, control_of(item), linear=True)
    plain = trained(make, gs.Surgery(), linear=True)
    if make is adam:  # decay depends on the values, which differ
        assert_same_norms(control, treated)
    for row, other in zip(control, plain, strict=True):
        for name, update in row.items():
            cosine = torch.cosine_similarity(update.flatten(), other[name].flatten(), 0)
            assert cosine > (1 - 1e-9 if make is adam else 0.99)


def test_under_adam_a_scale_changes_norm_matched_and_not_the_update() -> None:
    item = gs.Intervention(gs.Scale(0.1))
    make = lambda model: Adam(model.parameters(), lr=0.01, eps=0.0)  # noqa: E731 (as above)
    plain = trained(make, gs.Surgery())
    assert_same(trained(make, control_of(item)), plain)


@pytest.mark.parametrize("make", [adam, lambda m: SGD(m.parameters(), 0.1, momentum=0.9)])
def test_of_a_transform_that_changes_nothing_it_is_plain_training_bit_for_bit(make: Make) -> None:
    matched = trained(make, control_of(gs.Intervention(gs.Scale(1.0))))
    plain = trained(make, gs.Surgery())
    for row, other in zip(matched, plain, strict=True):
        assert all(torch.equal(update, other[name]) for name, update in row.items())


def test_a_loaded_state_continues_bit_for_bit() -> None:
    item = gs.Intervention(gs.GrokfastEMA())
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def steps(model: nn.Module, optimizer: Optimizer, surgery: gs.Surgery) -> None:
        with surgery.attach(model, optimizer):
            for _ in range(3):
                optimizer.zero_grad()
                model(inputs).square().sum().backward()
                optimizer.step()

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer, surgery = adam(model), control_of(item)
    steps(model, optimizer, surgery)
    resumed = nn.Linear(3, 2)
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer, resumed_surgery = adam(resumed), control_of(item)
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed_surgery.load_state_dict(surgery.state_dict())
    for each in ((model, optimizer, surgery), (resumed, resumed_optimizer, resumed_surgery)):
        steps(*each)
    assert torch.equal(model.weight, resumed.weight)


def test_where_it_cannot_act_it_says_where_it_can() -> None:
    sign = gs.Intervention(gs.Sign(), gs.Outputs("0"))
    with pytest.raises(ValueError, match="needs the gradients that the optimizer uses: Par"):
        control_of(sign)
    twice = [gs.Intervention(gs.Sign()), gs.Intervention(gs.Clip(1.0))]
    with pytest.raises(ValueError, match="update_norm_matched is for one intervention, found 2"):
        control_interventions(twice, "update_norm_matched")
    surgery = control_of(gs.Intervention(gs.Sign()))
    with pytest.raises(ValueError, match="LBFGS .* another optimizer"):
        trained(lambda model: torch.optim.LBFGS(model.parameters()), surgery)


def test_at_updates_it_is_norm_matched_there() -> None:
    item = gs.Intervention(gs.Sign(), gs.Updates())
    assert_same(trained(adam, control_of(item)), trained(adam, control_of(item, "norm_matched")))
