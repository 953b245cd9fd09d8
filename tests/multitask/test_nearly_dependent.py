"""Training with gradients that are nearly dependent, and with a solver that does not converge."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.aggregators import rows as row_algebra
from gradsurg.aggregators.rows import SolvedOnRows
from gradsurg.aggregators.solvers import NotConverged
from gradsurg.multitask.conflict import numbers
from tests.multitask.nets import ENGINES, Net, at_shared, losses_of


class Pulled(nn.Module):
    """A trunk with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.heads = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(self.trunk(x))


def pulled_losses(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Two losses that pull one output apart, for a single example, and one on another output."""
    generator = torch.Generator().manual_seed(step)
    first, second = model(torch.randn(1, 4, generator=generator))[0]
    return {
        "up": (first - 1.7).square(),
        "down": (first + 2.9).square(),
        "other": (second - 0.3).square(),
    }


def length_over_bound(name: str, grads: list[list[Tensor]], update: list[Tensor]) -> float:
    rows = torch.stack([torch.cat([grad.flatten() for grad in row]) for row in grads]).double()
    norm = torch.cat([grad.flatten() for grad in update]).double().norm()
    match name:
        case "UPGrad":
            longest = rows.norm(dim=1).mean()
        case "DualProj":
            longest = rows.mean(0).norm()
        case _:
            longest = 1.5 * rows.mean(0).norm()
    return float(norm / longest)


@pytest.mark.parametrize("name", ["UPGrad", "DualProj", "CAGrad"])
@pytest.mark.parametrize("steps", [60, pytest.param(2400, marks=pytest.mark.full)])
def test_no_update_of_opposite_losses_is_too_long(name: str, steps: int) -> None:
    model = Pulled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    params = list(model.parameters())
    longest = 0.0
    with gs.Surgery(at_shared(getattr(gs, name)())).attach(model, optimizer) as live:
        for step in range(steps):
            optimizer.zero_grad()
            losses = pulled_losses(model, step)
            grads = [
                [
                    torch.zeros_like(param) if grad is None else grad
                    for param, grad in zip(
                        params,
                        torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True),
                        strict=True,
                    )
                ]
                for loss in losses.values()
            ]
            live.backward(losses)
            update = [param.grad for param in params if param.grad is not None]
            assert len(update) == len(params)
            longest = max(longest, length_over_bound(name, grads, update))
            optimizer.step()
    assert longest <= 1 + 1e-3


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All gradients count as nearly dependent, and no solver converges."""

    def fails(
        self: SolvedOnRows, rows: Tensor, order: Tensor, ridge: float, least: float
    ) -> Tensor:
        raise NotConverged("a test", 1.0)

    monkeypatch.setattr(gs.UPGrad, "weights_of_rows", fails)
    monkeypatch.setattr("gradsurg.aggregators.base.is_nearly_dependent", lambda gramian: True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("failing")
def test_a_step_without_a_solution_is_skipped_and_told(engine: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trunk = [param.clone() for param in model.trunk.parameters()]
    head = model.heads["a"].weight.clone()
    surgery = gs.Surgery(at_shared(gs.UPGrad(), **ENGINES[engine]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with surgery.attach(model, optimizer) as live:
            for step in range(3):
                optimizer.zero_grad()
                live.backward(losses_of(model, step))
                assert all(param.grad is None for param in model.trunk.parameters())
                optimizer.step()
    texts = [str(warning.message) for warning in caught]
    assert any("the parameters of the group get no gradient" in text for text in texts)
    assert any("0 updates are less exact" in text and "3 were skipped" in text for text in texts)
    for before, after in zip(trunk, model.trunk.parameters(), strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(head, model.heads["a"].weight)


@pytest.mark.usefixtures("failing")
@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
def test_a_scaler_steps_though_no_parameter_has_a_gradient() -> None:
    model = SolverModule()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [param.clone() for param in model.parameters()]
    with gs.Surgery(at_shared(gs.UPGrad())).attach(model, optimizer, scaler=scaler) as live:
        for step in range(2):
            optimizer.zero_grad()
            first, second = model(torch.ones(1, 3))[0]
            live.backward({"first": scaler.scale(first), "second": scaler.scale(second.square())})
            scaler.step(optimizer)
            scaler.update()
            assert live.step == step + 1
            assert all(param.grad is None for param in model.parameters())
    assert scaler.get_scale() == 8.0
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer._optimizer_step_pre_hooks


class SolverModule(nn.Module):
    """A model with a module of the name `solver`."""

    def __init__(self) -> None:
        super().__init__()
        self.solver = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.solver(x)


def test_a_group_with_a_state_may_have_the_name_solver() -> None:
    model = SolverModule()
    surgery = gs.Surgery(at_shared(gs.GradVac(), granularity="module"))
    with surgery.attach(model) as live:
        first, second = model(torch.ones(1, 3))[0]
        live.backward({"first": first.square(), "second": (first + second).square()})
        assert {key.partition("/")[2] for key in live.attachment.states} >= {"solver"}


def test_fallbacks_are_counted_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Pulled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    of_rows = gs.UPGrad.weights_of_rows

    def first_fails(
        self: gs.UPGrad, rows: Tensor, order: Tensor, ridge: float, least: float
    ) -> Tensor:
        if ridge == row_algebra.RIDGES[0]:
            raise NotConverged("a test", 1.0)
        return of_rows(self, rows, order, ridge, least)

    monkeypatch.setattr(gs.UPGrad, "weights_of_rows", first_fails)
    surgery = gs.Surgery(at_shared(gs.UPGrad()))
    with (
        pytest.warns(gs.SurgeryWarning, match="4 updates are less exact.* 0 were skipped"),
        surgery.attach(model, optimizer, effects_every=2) as live,
    ):
        for step in range(4):
            optimizer.zero_grad()
            live.backward(pulled_losses(model, step))
            optimizer.step()
        conflicts = live.conflicts.fetch()
    assert [conflict.fallbacks for conflict in conflicts] == [1, 3]
    state = surgery.state_dict()
    resumed = gs.Surgery(at_shared(gs.UPGrad()))
    resumed.load_state_dict(state)
    with (
        pytest.warns(gs.SurgeryWarning, match="5 updates are less exact"),
        resumed.attach(model, optimizer) as live,
    ):
        live.backward(pulled_losses(model, 0))
    logged = numbers([conflicts[-1].row()])
    assert next(value for key, value in logged.items() if key.endswith("/fallbacks")) == 3


def test_measured_norms_are_those_of_the_update() -> None:
    """Products of huge weights with the Gramian are rounding."""
    model = Pulled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gs.Surgery(at_shared(gs.DualProj())).attach(model, optimizer, effects_every=1) as live:
        for step in range(20):
            optimizer.zero_grad()
            live.backward(pulled_losses(model, step))
            [conflict] = live.conflicts.fetch()
            norms = torch.tensor(conflict.norms, dtype=torch.float64)
            cosines = torch.tensor(conflict.cosines, dtype=torch.float64)
            mean = float((norms @ cosines @ norms).sqrt()) / 3
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            length = float(torch.cat([grad.flatten() for grad in grads]).norm())
            assert conflict.norm_to_mean == pytest.approx(length / mean, rel=1e-4)
            optimizer.step()
