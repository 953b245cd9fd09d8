"""Aggregators and loss weightings beside those of TorchJD 0.18."""

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators.base import AggregatorContext, LossWeighting
from tests.aggregators.cases import made

pytest.importorskip("torchjd", reason="TorchJD is in the extra 'test'")
from torchjd import aggregation, scalarization


def losses_at(step: int, count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(count, generator=generator, dtype=torch.float64) + 0.1


def slopes(scalarizer: torch.nn.Module, losses: Tensor) -> Tensor:
    """The weights of the losses in a scalarization: its gradient."""
    losses = losses.clone().requires_grad_()
    return torch.autograd.grad(scalarizer(losses), losses)[0]


def weigh(aggregator: LossWeighting, state: dict[str, Tensor], losses: Tensor) -> tuple:
    return aggregator.weigh(len(losses), state, AggregatorContext(losses=losses))


def test_stch() -> None:
    shares, ideal = (0.1, 0.2, 0.3, 0.4), (0.5, -1.0, 0.0, 0.2)
    for mu in (0.01, 0.1, 1.0):
        theirs = scalarization.STCH(
            mu, *(torch.tensor(v, dtype=torch.float64) for v in (shares, ideal))
        )
        for step in range(5):
            losses = losses_at(step)
            found, _ = weigh(gs.STCH(mu, preference=shares, ideal=ideal), {}, losses)
            torch.testing.assert_close(found, slopes(theirs, losses), rtol=1e-9, atol=1e-12)


def test_geometric_mean() -> None:
    for step in range(5):
        losses = losses_at(step)
        found, _ = weigh(gs.GeometricMean(), {}, losses)
        expected = slopes(scalarization.GeometricMean(), losses)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_dwa() -> None:
    ours, theirs = gs.DWA(period=3), scalarization.DWA()
    state = ours.init(4)
    for step in range(20):
        losses = losses_at(step)
        found, state = weigh(ours, state, losses)
        torch.testing.assert_close(found, slopes(theirs, losses), rtol=1e-6, atol=0)
        if step % 3 == 2:
            theirs.step()


def test_imtl_l() -> None:
    ours, theirs = gs.UncertaintyWeighting(lr=0.1, likelihood="laplace"), scalarization.IMTLL(4)
    theirs = theirs.double()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    state = ours.init(4)
    for step in range(20):
        losses = losses_at(step)
        found, state = weigh(ours, state, losses)
        torch.testing.assert_close(found, slopes(theirs, losses), rtol=1e-9, atol=0)
        optimizer.zero_grad()
        theirs(losses).backward()
        optimizer.step()


def gramian_at(step: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return rows @ rows.T


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9])
def test_crmogm(alpha: float) -> None:
    pairs = [
        (gs.IMTLG(), aggregation.IMTLGWeighting()),
        (gs.CAGrad(0.0), aggregation.MeanWeighting()),
    ]
    for inner, their_inner in pairs:
        ours, theirs = gs.CRMOGM(inner, alpha), aggregation.CRMOGMWeighting(their_inner, alpha)
        state = ours.init(4)
        for step in range(10):
            gramian = gramian_at(step, 4)
            found, state = ours.update(gramian, state, AggregatorContext())
            torch.testing.assert_close(found, theirs(gramian), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_sdmgrad_and_modo(count: int) -> None:
    preference = tuple(range(1, count + 1))
    vector = torch.tensor(preference, dtype=torch.float64)
    pairs = [
        (gs.SDMGrad(), aggregation.SDMGradWeighting()),
        (
            gs.SDMGrad(0.7, preference=preference, lr=0.5, momentum=0.9, num_steps=7),
            aggregation.SDMGradWeighting(0.5, 0.9, 7, 0.7, vector),
        ),
        (made("modo"), aggregation.MoDoWeighting(0.1, 0.0)),
        (made("modo", rho=0.3), aggregation.MoDoWeighting(0.1, 0.3)),
    ]
    for ours, theirs in pairs:
        assert isinstance(ours, gs.SDMGrad)
        # They add 1e-8 to the square of the mean norm.
        size = 1e8 if ours.normalize else 1.0
        state = ours.init(count)
        for step in range(10):
            gramian = gramian_at(step, count)
            found, state = ours.update(gramian, state, AggregatorContext())
            torch.testing.assert_close(found, theirs(size * gramian), rtol=0, atol=1e-9)
