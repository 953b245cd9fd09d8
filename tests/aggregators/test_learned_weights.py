"""Aggregators that learn their weights follow the formulas of their papers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator, AggregatorContext, AggregatorState
from gradsurg.aggregators.grad_norm import LEAST_SHARE, GradNorm
from gradsurg.multitask.aggregation import aggregate
from tests.aggregators import inputs

LEARNT = (gs.FAMO(), GradNorm(), gs.UncertaintyWeighting(), gs.DWA(period=1))
every_one = pytest.mark.parametrize("aggregator", LEARNT, ids=lambda one: type(one).__name__)


def some_rows(step: int, num_tasks: int = 3) -> Tensor:
    """Gradients whose Gramian is diagonal, so that the result shows the weights."""
    sizes = torch.tensor([1.0 + step, 10.0, 0.1, 3.0][:num_tasks], dtype=torch.float64)
    return torch.diag(sizes)


def some_losses(step: int, num_tasks: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(num_tasks, generator=generator, dtype=torch.float64) + 0.1


def weights_of(aggregator: Aggregator, steps: int) -> tuple[Tensor, AggregatorState]:
    """The weights of each call, and the state after the last."""
    state = aggregator.init(3)
    found = []
    for step in range(steps):
        rows, context = some_rows(step), AggregatorContext(step=step, losses=some_losses(step))
        result, state = aggregator.merge(rows, state, context)
        found.append(result / rows.diagonal())
    return torch.stack(found), state


def test_famo_equals_autograd_with_torchs_adam() -> None:
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.025, weight_decay=0.01)
    expected = []
    for step in range(30):
        losses = some_losses(step) + 1e-8
        if step:
            before = some_losses(step - 1) + 1e-8
            optimizer.zero_grad()
            (logits.softmax(0) * (before.log() - losses.log())).sum().backward()
            optimizer.step()
        weights = logits.detach().softmax(0) / losses
        expected.append(weights / weights.sum())
    torch.testing.assert_close(weights_of(gs.FAMO(), 30)[0], torch.stack(expected))


def test_grad_norm_equals_autograd_with_torchs_adam() -> None:
    weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.025)
    first = some_losses(0) + 1e-8
    expected = []
    for step in range(30):
        expected.append(weights.detach().clone())
        rates = (some_losses(step) + 1e-8) / first
        sizes = weights * some_rows(step).norm(dim=1)
        targets = sizes.mean() * (rates / rates.mean()) ** 1.5
        optimizer.zero_grad()
        (sizes - targets.detach()).abs().sum().backward()
        optimizer.step()
        with torch.no_grad():
            weights.mul_(3 / weights.sum())
    found, _ = weights_of(GradNorm(), 30)
    torch.testing.assert_close(found, torch.stack(expected))
    torch.testing.assert_close(found.sum(1), torch.full((30,), 3.0, dtype=torch.float64))


def test_grad_norm_lowers_the_weight_of_a_large_gradient_but_not_to_zero() -> None:
    aggregator = GradNorm(alpha=0.0, lr=0.5)
    state = aggregator.init(2)
    rows = torch.diag(torch.tensor([100.0, 1.0], dtype=torch.float64))
    context = AggregatorContext(losses=torch.ones(2, dtype=torch.float64))
    weights = torch.ones(2)
    for _ in range(50):
        result, state = aggregator.merge(rows, state, context)
        weights = result / rows.diagonal()
        assert weights.min() >= LEAST_SHARE / 4
    assert weights[0] < 0.1 < 1.9 < weights[1]


def test_uncertainty_weighting_equals_autograd_with_torchs_sgd() -> None:
    kinds = ("gaussian", 0.5, 0.5), ("softmax", 1.0, 0.5), ("laplace", 1.0, 1.0)
    for likelihood, factor, slope in kinds:
        logs = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([logs], lr=0.1)
        expected = []
        for step in range(30):
            expected.append(factor * (-logs.detach()).exp())
            optimizer.zero_grad()
            (factor * (-logs).exp() * some_losses(step) + slope * logs).sum().backward()
            optimizer.step()
        found, _ = weights_of(gs.UncertaintyWeighting(lr=0.1, likelihood=likelihood), 30)
        torch.testing.assert_close(found, torch.stack(expected))


def test_dwa_compares_the_mean_losses_of_the_last_two_periods() -> None:
    found, _ = weights_of(gs.DWA(temperature=0.5, period=4), 23)
    losses = torch.stack([some_losses(step) for step in range(23)])
    expected = []
    for step in range(23):
        first = step // 4 * 4  # of this period
        rates = losses[first - 4 : first].mean(0) / losses[first - 8 : first - 4].mean(0)
        weights = 3 * (rates / 0.5).softmax(0) if first >= 8 else torch.ones_like(losses[0])
        expected.append(weights)
    torch.testing.assert_close(found, torch.stack(expected))


def test_crmogm_averages_the_weights_of_another_aggregator() -> None:
    ours, inner = gs.CRMOGM(gs.SDMGrad(), alpha=0.75), gs.SDMGrad()
    state, of_inner, average = ours.init(3), inner.init(3), torch.zeros(3, dtype=torch.float64)
    for step in range(10):
        matrix = torch.from_numpy(inputs.rows(3, 3, 5.0, seed=step))
        gramian, context = matrix @ matrix.T, AggregatorContext(step=step)
        weights, of_inner = inner.update(gramian, of_inner, context)
        average = 0.75 * average + 0.25 * weights if step else weights
        found, state = ours.update(gramian, state, context)
        torch.testing.assert_close(found, average)
    nans = torch.full((3, 3), math.nan, dtype=torch.float64)
    spoiled, after = ours.update(nans, state, AggregatorContext())
    assert spoiled.isnan().all()
    assert after is state


def test_crmogm_needs_an_aggregator_with_a_gramian() -> None:
    of_losses: Any = gs.FAMO()
    with pytest.raises((TypeError, ValueError), match="of: "):
        gs.CRMOGM(of_losses)


def test_the_weights_of_stch_are_the_gradient_of_a_smooth_maximum() -> None:
    aggregator = gs.STCH(mu=0.1, preference=(0.2, 0.5, 0.3), ideal=(0.1, -1.0, 0.0))
    shares = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    for step in range(5):
        losses = (some_losses(step) - 1).requires_grad_()
        above = losses - torch.tensor([0.1, -1.0, 0.0], dtype=torch.float64)
        (0.1 * (shares * above / 0.1).logsumexp(0)).backward()
        found, _ = aggregator.weigh(3, {}, AggregatorContext(losses=losses))
        torch.testing.assert_close(found, losses.grad)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preference": (1.0, 2.0)}, "preference: must be one share for each task, found 2 for 3"),
        ({"ideal": (1.0, 2.0)}, "ideal: must be one number for each task, found 2 for 3"),
    ],
)
def test_stch_needs_a_number_for_each_task(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gs.STCH(**fields)(some_rows(0), AggregatorContext(losses=some_losses(0)))


def test_a_preference_without_a_task_is_refused() -> None:
    with pytest.raises(ValueError, match="preference: must have a share above 0, found"):
        gs.STCH(preference=(0.0, 0.0))


@every_one
def test_a_loss_that_is_not_finite_keeps_the_state(aggregator: Aggregator) -> None:
    _, state = weights_of(aggregator, 3)
    for bad in (math.nan, math.inf):
        losses = torch.tensor([1.0, bad, 1.0], dtype=torch.float64)
        spoiled = some_rows(0)
        spoiled[1] = bad
        for rows in (some_rows(0), spoiled):
            _, after = aggregator.merge(rows, state, AggregatorContext(losses=losses))
            assert after.keys() == state.keys()
            assert all(torch.equal(after[key], state[key]) for key in state)


def test_a_norm_that_is_not_finite_keeps_the_state_of_grad_norm() -> None:
    _, state = weights_of(GradNorm(), 3)
    rows = some_rows(0)
    rows[1] = math.inf
    _, after = GradNorm().merge(rows, state, AggregatorContext(losses=some_losses(0)))
    assert all(torch.equal(after[key], state[key]) for key in state)


def test_the_weights_of_famo_are_finite_for_extreme_logits() -> None:
    state = gs.FAMO().init(2) | {"logits": torch.tensor([0.0, 2000.0], dtype=torch.float64)}
    weights, _ = gs.FAMO().weigh(2, state, AggregatorContext(losses=torch.tensor([1.0, 2.0])))
    assert weights.tolist() == [0.0, 1.0]


@every_one
def test_extreme_losses_and_norms_emit_no_warning(aggregator: Aggregator) -> None:
    """Warnings are errors, so an overflow that numpy warns about fails too."""
    state, rows, weights = aggregator.init(3), some_rows(0) * 1e150, []
    for losses in ([0.0, 1.0, 1e-300], [1e301, 1.0, 1e-300], [1.0, 1e308, 0.0]):
        context = AggregatorContext(losses=torch.tensor(losses, dtype=torch.float64))
        result, state = aggregator.merge(rows, state, context)
        weights.append(result / rows.diagonal())
    assert all(bool((own.isfinite() & (own >= 0)).all()) for own in weights[:2])
    # The loss of 1e301 is 1e309 times the first one of GradNorm, which is beyond float64.
    assert bool(weights[2].isfinite().all()) != isinstance(aggregator, GradNorm)


def test_uncertainty_weighting_overflows_to_infinity() -> None:
    aggregator = gs.UncertaintyWeighting(lr=2000.0)
    context = AggregatorContext(losses=torch.tensor([0.0, 1.0], dtype=torch.float64))
    _, state = aggregator.weigh(2, aggregator.init(2), context)
    weights, _ = aggregator.weigh(2, state, context)
    assert weights.tolist() == [math.inf, 0.5]


@every_one
def test_a_negative_loss_is_refused(aggregator: Aggregator) -> None:
    losses = torch.tensor([1.0, -0.5, 1.0])
    with pytest.raises(ValueError, match=f"^{type(aggregator).__name__} .* >= 0, found -0.5$"):
        aggregator(some_rows(0), AggregatorContext(losses=losses))


@every_one
def test_another_number_of_tasks_is_refused(aggregator: Aggregator) -> None:
    name = type(aggregator).__name__
    with pytest.raises(ValueError, match=f"^{name}: the state is of 3 tasks, found 2: the number"):
        aggregator.merge(
            some_rows(0, 2), aggregator.init(3), AggregatorContext(losses=some_losses(0, 2))
        )


@every_one
def test_a_context_without_a_loss_for_each_task_is_refused(aggregator: Aggregator) -> None:
    name = type(aggregator).__name__
    with pytest.raises(ValueError, match=f"^{name} needs the losses of the tasks"):
        aggregator(some_rows(0))
    with pytest.raises(ValueError, match=f"^{name} needs a loss for each of the 3 tasks, found 2"):
        aggregator(some_rows(0), AggregatorContext(losses=some_losses(0, 2)))


def test_excess_mtl_equals_a_loop_over_tasks_and_entries() -> None:
    rows = [inputs_of(step) for step in range(12)]
    weights, first = [1.0] * 3, [0.0] * 3
    sums = [[0.0] * 5 for _ in range(3)]
    aggregator, state = gs.ExcessMTL(lr=2.0), gs.ExcessMTL().init(3)
    for step, grads in enumerate(rows):
        for task, grad in enumerate(grads.tolist()):
            excess = 0.0
            for entry, value in enumerate(grad):
                sums[task][entry] += value**2
                excess += value / math.sqrt(sums[task][entry] + 1e-7) * value
            if step:
                weights[task] *= math.exp(2.0 * excess / first[task])
            else:
                first[task] = excess
        weights = [3 * weight / sum(weights) for weight in weights]
        expected = sum(weight * grad for weight, grad in zip(weights, grads, strict=True))
        result, state = aggregator.merge(grads, state, AggregatorContext(step=step))
        torch.testing.assert_close(result, expected)
    assert max(weights) > 1.2  # they have moved


def inputs_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    sizes = torch.tensor([[1.0], [0.1], [3.0]], dtype=torch.float64)
    return sizes * torch.randn(3, 5, generator=generator, dtype=torch.float64) / (1 + step)


def test_excess_mtl_keeps_its_state_for_a_nan_and_refuses_other_sizes() -> None:
    aggregator, state = gs.ExcessMTL(), gs.ExcessMTL().init(3)
    for step in range(3):
        _, state = aggregator.merge(inputs_of(step), state, AggregatorContext())
    broken = inputs_of(3)
    broken[1, 2] = math.nan
    result, after = aggregator.merge(broken, state, AggregatorContext())
    assert result.isnan().tolist() == [False, False, True, False, False]
    assert all(torch.equal(after[key], state[key]) for key in state)
    with pytest.raises(ValueError, match="the state is of 5 parameters, found 4"):
        aggregator.merge(inputs_of(3)[:, :4], state, AggregatorContext())
    with pytest.raises(ValueError, match="the number of tasks must stay the same"):
        aggregator.merge(inputs_of(3)[:2], state, AggregatorContext())
    first = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    _, state = aggregator.merge(first, aggregator.init(2), AggregatorContext())
    assert aggregator.merge(first + 1, state, AggregatorContext())[0].isfinite().all()


def combined(aggregator: Aggregator, names: tuple[str, ...] = ()) -> np.ndarray:
    """The combined gradients of some random rows, (steps, P), in one group of two blocks."""
    found, state = [], aggregator.init(3 if not names else len(names))
    for rows, losses in SERIES:
        rows, losses = (rows[:2], losses[:2]) if names else (rows, losses)
        context = AggregatorContext(tasks=names, losses=torch.from_numpy(losses))
        blocks = [*(8.0 * torch.from_numpy(rows)).split([2, 3], dim=1)]
        result = aggregate(aggregator, blocks, state, context, scale=8.0)
        state = result.state
        found.append(torch.cat(result.grads).numpy() / 8)
    return np.array(found)


SERIES = [
    (np.random.default_rng(step).normal(size=(3, 5)), np.random.default_rng(step).random(3) + 0.1)
    for step in range(6)
]


def test_moco_equals_algorithm_1_of_the_paper() -> None:
    y, w, expected = np.zeros((3, 5)), np.full(3, 1 / 3), []
    for call, (rows, _) in enumerate(SERIES, 1):
        y += 0.6 / call**0.25 * (rows - y)
        point = w - 0.3 / call**0.25 * (y @ y.T @ w + 0.2 * w)
        # The projection: the shift at which the positive parts sum to one, by bisection.
        low, high = point.min() - 1, point.max()
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if (point - middle).clip(0).sum() > 1 else (low, middle)
        w = (point - low).clip(0)
        expected.append(w @ y)
    found = combined(gs.MoCo(0.6, gamma=0.3, rho=0.2, decay=0.25))
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-13)


def test_db_mtl_equals_the_equations_of_the_paper() -> None:
    mean, expected = None, []
    for rows, losses in SERIES:
        logs = rows / (losses[:, None] + 1e-8)
        mean = logs if mean is None else 0.7 * mean + 0.3 * logs
        norms = np.linalg.norm(mean, axis=1)
        expected.append((norms.max() / norms) @ mean)
    np.testing.assert_allclose(combined(gs.DBMTL(0.7)), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("names", [("forget", "retain"), ("retain", "forget")])
def test_agem_with_decay_projects_on_a_running_mean_of_the_memory(names: tuple[str, ...]) -> None:
    mean, expected, place = None, [], names.index("retain")
    for rows, _ in SERIES:
        g, memory = rows[1 - place], rows[place]
        mean = memory if mean is None else 0.9 * mean + 0.1 * memory
        expected.append(g - min(g @ mean, 0.0) / (mean @ mean) * mean)
    found = combined(gs.AGEM(memory="retain", decay=0.9), names)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-13)


def test_the_geometric_mean_equals_autograd() -> None:
    losses = torch.tensor([0.3, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    (losses.log().mean()).exp().backward()
    context = AggregatorContext(losses=losses.detach())
    found = gs.GeometricMean()(torch.eye(3, dtype=torch.float64), context)
    torch.testing.assert_close(found, losses.grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("aggregator", [gs.MoCo(), gs.DBMTL(), gs.AGEM(decay=0.5)], ids=repr)
def test_a_nan_keeps_the_running_means(aggregator: Aggregator) -> None:
    rows, context = torch.eye(2), AggregatorContext(losses=torch.ones(2))
    _, state = aggregator.merge(rows, aggregator.init(2), context)
    found, after = aggregator.merge(rows * torch.nan, state, context)
    assert found.isnan().all()
    assert {name: value.tolist() for name, value in after.items()} == {
        name: value.tolist() for name, value in state.items()
    }
    with pytest.raises(ValueError, match="found \\[2, 3\\]: their numbers must stay the same"):
        aggregator.merge(torch.ones(2, 3), state, context)
