"""Gradients of single examples equal those of a loop over the examples."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradsurg as gs
from gradsurg.transforms.base import Transform
from tests.per_example import models

COUNT = 5


def loop(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """The rows of each parameter, one backward pass an example."""
    rows = []
    for index in range(len(inputs)):
        model.zero_grad()
        part = slice(index, index + 1)
        functional.cross_entropy(model(inputs[part]), targets[part]).backward()
        rows.append(
            [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        )
    model.zero_grad()
    return [torch.stack(row) for row in zip(*rows, strict=True)]


def treated(
    model: nn.Module, inputs: Tensor, targets: Tensor, transform: Transform, parts: int = 1
) -> list[Tensor]:
    """The gradients that the optimizer gets, from `parts` backward passes of a mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.zero_grad()
    with gs.Surgery(gs.Intervention(transform)).attach(model, optimizer):
        for part, labels in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            (functional.cross_entropy(model(part), labels) / parts).backward()
        optimizer.step()
    grads = [param.grad for param in model.parameters()]
    return [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(model.parameters(), grads, strict=True)
    ]


def assert_close(results: list[Tensor], expected: list[Tensor], tolerance: float = 1e-6) -> None:
    size = max(float(grad.abs().max()) for grad in expected)
    for result, wanted in zip(results, expected, strict=True):
        assert float((result - wanted).abs().max()) <= tolerance * size


def clipped(rows: list[Tensor], bound: float) -> list[Tensor]:
    """The mean of the rows, each clipped to a joint norm."""
    norms = torch.stack([row.flatten(1).square().sum(1) for row in rows]).sum(0).sqrt()
    weights = (bound / (norms + 1e-6)).clamp(max=1)
    assert 0 < int((weights < 1).sum()) < len(weights)
    return [torch.einsum("n...,n->...", row, weights) / len(row) for row in rows]


def median_norm(rows: list[Tensor]) -> float:
    return float(
        torch.stack([row.flatten(1).square().sum(1) for row in rows]).sum(0).sqrt().median()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", models.NAMES)
def test_clipped_and_transformed_and_sorted_rows_are_those_of_a_loop(
    name: str, dtype: torch.dtype
) -> None:
    model, inputs = models.make(name, COUNT)
    model = model.to(dtype)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    targets = torch.arange(COUNT) % 7
    rows = loop(model, inputs, targets)
    bound = median_norm(rows)
    results = treated(model, inputs, targets, gs.PerSample(gs.ClipGlobalNorm(bound)))
    assert_close(results, clipped(rows, bound))
    results = treated(model, inputs, targets, gs.PerSample(gs.Clip(0.01)))
    largest = max(float(row.abs().max()) for row in rows)
    assert_close(results, [row.clamp(-0.01, 0.01).mean(0) for row in rows], 1e-4 * largest)
    results = treated(model, inputs, targets, gs.PerSample(gs.TrimmedMean(0.5)))
    assert_close(results, [row.median(0).values for row in rows])


def test_the_examples_of_several_backward_passes_are_one_batch() -> None:
    model, inputs = models.make("mlp", 6)
    targets = torch.arange(6) % 7
    rows = loop(model, inputs, targets)
    for transform, expected in (
        (gs.PerSample(gs.ClipGlobalNorm(median_norm(rows))), clipped(rows, median_norm(rows))),
        (gs.PerSample(gs.TrimmedMean(0.2)), [row.sort(0).values[2:-2].mean(0) for row in rows]),
    ):
        assert_close(treated(model, inputs, targets, transform, parts=3), expected)


def test_a_loss_that_is_a_sum_has_the_sum_of_the_clipped_gradients() -> None:
    model, inputs = models.make("mlp", COUNT)
    targets = torch.arange(COUNT)
    rows = loop(model, inputs, targets)
    expected = [COUNT * grad for grad in clipped(rows, median_norm(rows))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    transform = gs.PerSample(gs.ClipGlobalNorm(median_norm(rows)), reduction="sum")
    with gs.Surgery(gs.Intervention(transform)).attach(model, optimizer):
        functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
        optimizer.step()
    assert_close([param.grad for param in model.parameters()], expected)


def test_noise_has_the_deviation_of_dp_sgd_and_no_other_seed_gives_it() -> None:
    model = nn.Linear(400, 100)
    inputs, targets = torch.randn(10, 400), torch.arange(10)
    plain = treated(model, inputs, targets, gs.PerSample(gs.ClipGlobalNorm(0.5)))[0]
    noisy = treated(model, inputs, targets, gs.PerSample(gs.ClipGlobalNorm(0.5), noise=2.0))[0]
    state = torch.get_rng_state()
    again = treated(model, inputs, targets, gs.PerSample(gs.ClipGlobalNorm(0.5), noise=2.0))[0]
    assert torch.equal(noisy, again)
    assert torch.equal(state, torch.get_rng_state())
    assert float((noisy - plain).std()) == pytest.approx(2.0 * 0.5 / 10, rel=0.02)


@pytest.mark.parametrize("wrapped", [False, True])
def test_examples_are_weighted_inversely_to_the_density_of_their_norms(wrapped: bool) -> None:
    model, inputs = models.make("mlp", 12)
    targets = torch.arange(12) % 7
    rows = loop(model, inputs, targets)
    norms = [torch.cat([row[index].flatten() for row in rows]).norm() for index in range(12)]
    shares = [float(norm / max(norms)) for norm in norms]
    weights, filled = [0.0] * 12, 0
    for low in (0.0, 0.25, 0.5, 0.75):  # the algorithm of the authors' code, one bin at a time
        high = low + 0.25 if low < 0.75 else 1.1
        inside = [index for index, share in enumerate(shares) if low <= share < high]
        filled += bool(inside)
        for index in inside:
            weights[index] = 12 / len(inside)
    assert filled > 1
    factors = torch.tensor(weights) / filled
    expected = [torch.einsum("n...,n->...", row, factors) / 12 for row in rows]
    transform = gs.PerSample(gs.GHM(4)) if wrapped else gs.GHM(4)
    assert_close(treated(model, inputs, targets, transform), expected)


def test_what_acts_on_all_examples_is_refused_for_one() -> None:
    for of in (gs.PerSample(gs.Clip(1.0)), gs.Chain(gs.GHM(), gs.Clip(1.0))):
        with pytest.raises(ValueError, match=r"PerSample.of: must act on the gradient of one ex"):
            gs.PerSample(of)


def test_identity_leaves_the_gradient() -> None:
    model, inputs = models.make("mlp", COUNT)
    targets = torch.arange(COUNT)
    functional.cross_entropy(model(inputs), targets).backward()
    expected = [torch.clone(param.grad) for param in model.parameters()]
    model.zero_grad()
    assert_close(treated(model, inputs, targets, gs.PerSample(gs.Identity())), expected)


def test_numbers_are_those_of_the_rows() -> None:
    model, inputs = models.make("mlp", COUNT)
    targets = torch.arange(COUNT)
    rows = torch.cat([row.flatten(1) for row in loop(model, inputs, targets)], 1).double()
    norms = rows.norm(dim=1)
    bound = float(norms.median())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    surgery = gs.Surgery(gs.Intervention(gs.PerSample(gs.ClipGlobalNorm(bound))))
    with surgery.attach(model, optimizer) as live:
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    numbers = live.examples["per_sample"].numbers()
    covariance = rows.T.cov().trace()
    square = rows.mean(0).square().sum() - covariance / COUNT  # unbiased
    expected = {
        "norm_mean": norms.mean(),
        "norm_median": norms.median(),
        "norm_90": norms.quantile(0.9),
        "norm_max": norms.max(),
        "changed": torch.tensor(2 / COUNT),
        "noise_scale": covariance / square,
    }
    assert numbers["norm_mean"] == pytest.approx(float(expected["norm_mean"]), rel=1e-5)
    for name, value in numbers.items():
        if name != "changed":  # rounding decides for the example at the bound
            assert value == pytest.approx(float(expected[name]), rel=1e-4), name
    assert numbers["changed"] in (pytest.approx(2 / COUNT), pytest.approx(3 / COUNT))
    assert "norm_median" in live.examples["per_sample"].table()
