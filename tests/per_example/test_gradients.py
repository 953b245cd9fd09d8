"""Gradients of single examples equal the gradients of a loop over the examples."""

from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradsurg as gs
from gradsurg.per_example.gradients import ExampleGradients
from gradsurg.per_example.layers import LayerCall, rule_of
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
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    transform: Transform,
    sizes: Sequence[int] | None = None,
) -> list[Tensor]:
    """The gradients that the optimizer gets, from backward passes of mean losses."""
    sizes = sizes or [len(inputs)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.zero_grad()
    with gs.Surgery(gs.Intervention(transform)).attach(model, optimizer):
        for part, labels in zip(inputs.split(sizes), targets.split(sizes), strict=True):
            (functional.cross_entropy(model(part), labels) / len(sizes)).backward()
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
    norms = torch.stack([row.reshape(len(row), -1).square().sum(1) for row in rows]).sum(0).sqrt()
    weights = (bound / (norms + 1e-6)).clamp(max=1)
    assert 0 < int((weights < 1).sum()) < len(weights)
    return [torch.einsum("n...,n->...", row, weights) / len(row) for row in rows]


def median_norm(rows: list[Tensor]) -> float:
    return float(
        torch.stack([row.reshape(len(row), -1).square().sum(1) for row in rows])
        .sum(0)
        .sqrt()
        .median()
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in models.NAMES),
        (models.NAMES[0], torch.float64),
        *(pytest.param(name, torch.float64, marks=pytest.mark.full) for name in models.NAMES[1:]),
    ],
)
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


@pytest.mark.parametrize("name", models.NAMES)
def test_a_chain_that_ends_in_a_clip_of_the_norm_is_that_of_a_loop(name: str) -> None:
    model, inputs = models.make(name, COUNT)
    targets = torch.arange(COUNT) % 7
    rows = [row.clamp(-0.01, 0.01) for row in loop(model, inputs, targets)]
    bound = median_norm(rows)
    chain = gs.Chain(gs.Clip(0.01), gs.ClipGlobalNorm(bound))
    assert_close(treated(model, inputs, targets, gs.PerSample(chain)), clipped(rows, bound), 1e-5)
    sums = torch.stack([row.reshape(COUNT, -1).abs().sum(1) for row in rows]).sum(0)
    bound = float(sums.median())
    chain = gs.Chain(gs.Clip(0.01), gs.ClipGlobalNorm(bound, p=1))
    weights = (bound / (sums + 1e-6)).clamp(max=1) / COUNT
    wanted = [torch.tensordot(weights, row, 1) for row in rows]
    assert_close(treated(model, inputs, targets, gs.PerSample(chain)), wanted, 1e-5)


@pytest.mark.parametrize("sizes", [[5], [3, 2]])
@pytest.mark.parametrize("name", models.NAMES)
def test_an_aggregator_on_the_gramian_is_that_on_the_rows(
    name: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = models.make(name, COUNT)
    targets = torch.arange(COUNT) % 7
    joint = torch.cat([row.reshape(COUNT, -1) for row in loop(model, inputs, targets)], dim=1)
    monkeypatch.setattr(ExampleGradients, "_matrices", None)  # no rows of all parameters
    for aggregator in (gs.UPGrad(), gs.MGDA(), gs.AlignedMTL()):
        results = treated(model, inputs, targets, gs.PerSample(aggregator), sizes)
        expected = aggregator(joint)
        parts = expected.split([param.numel() for param in model.parameters()])
        shapes = [param.shape for param in model.parameters()]
        wanted = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        assert_close(results, wanted, 1e-5)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Linear(40, 30), torch.randn(3, 2, 40)),
        (nn.Linear(4, 3), torch.randn(3, 9, 4)),
        (nn.Conv2d(20, 30, 3), torch.randn(3, 20, 4, 4)),
        (nn.Embedding(50, 4), torch.tensor([[1, 2, 1], [2, 3, 0], [4, 1, 4]])),
    ],
)
def test_the_gramian_from_the_factors_is_that_of_the_rows(layer: nn.Module, inputs: Tensor) -> None:
    rule = rule_of(layer)
    assert rule is not None
    call = LayerCall(layer, inputs, torch.randn_like(layer(inputs)))
    for name, _ in layer.named_parameters():
        rows = rule.rows(call, name).flatten(1).double()
        torch.testing.assert_close(rule.gramian(call, name), rows @ rows.T, rtol=1e-5, atol=1e-4)


def test_an_aggregator_of_nearly_dependent_examples_gets_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = models.make("mlp", 4)
    inputs, targets = torch.cat([inputs, inputs + 1e-5]), torch.arange(8) % 4
    joint = torch.cat([row.flatten(1) for row in loop(model, inputs, targets)], dim=1)
    made = Mock(side_effect=ExampleGradients._matrices)
    monkeypatch.setattr(ExampleGradients, "_matrices", lambda examples: made(examples))
    results = treated(model, inputs, targets, gs.PerSample(gs.UPGrad()))
    merged = torch.cat([result.flatten() for result in results])
    assert made.call_count == 1
    assert float((merged - gs.UPGrad()(joint)).norm()) < 1e-5 * float(merged.norm())


def test_the_plan_names_the_parameters_whose_rows_are_made_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    plans = [
        gs.Surgery(gs.Intervention(gs.PerSample(of))).plan(model)
        for of in (gs.UPGrad(), gs.TrimmedMean(0.2))
    ]
    assert "on the Gramian of the examples" in plans[0]
    assert "one parameter at a time of 1.weight, 1.bias\n" in plans[0]
    assert "stores the gradients of all examples" in plans[1]


def test_the_examples_of_several_backward_passes_are_one_batch() -> None:
    model, inputs = models.make("mlp", 6)
    targets = torch.arange(6) % 7
    rows = loop(model, inputs, targets)
    for transform, expected in (
        (gs.PerSample(gs.ClipGlobalNorm(median_norm(rows))), clipped(rows, median_norm(rows))),
        (gs.PerSample(gs.TrimmedMean(0.2)), [row.sort(0).values[2:-2].mean(0) for row in rows]),
    ):
        assert_close(treated(model, inputs, targets, transform, sizes=[2, 2, 2]), expected)


def by_hand(transform: Transform, sizes: list[int], values: list[float]) -> tuple[float, gs.Live]:
    """The gradient of a weight whose gradient for example i is values[i]."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gs.Surgery(gs.Intervention(transform)).attach(model, optimizer) as live:
        for part in torch.tensor(values)[:, None].split(sizes):
            (model(part).mean() / len(sizes)).backward()
        optimizer.step()
    assert model.weight.grad is not None
    return float(model.weight.grad), live


FIVE_AND_ONE = [1.0, 1.0, 1.0, 1.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("transform", "sizes", "values", "expected"),
    [
        # (4 * 1) / 4 / 2 + (2 * 0.8) / 2 / 2
        (gs.PerSample(gs.ClipGlobalNorm(1.0)), [4, 2], [1.3] * 4 + [0.8] * 2, 0.9),
        (gs.PerSample(gs.Clip(1.0)), [4, 2], [1.3] * 4 + [0.8] * 2, 0.9),
        (gs.PerSample(gs.ClipGlobalNorm(1.0)), [5, 1], FIVE_AND_ONE, 1.0),
        (gs.PerSample(gs.Clip(1.0)), [5, 1], FIVE_AND_ONE, 1.0),
        (gs.PerSample(gs.Clip(1.0)), [1, 5], FIVE_AND_ONE[::-1], 1.0),
        (gs.PerSample(gs.TrimmedMean(0.5)), [5, 1], FIVE_AND_ONE, 1.0),
        # The mean of the two intervals' means, 1 and 3.
        (gs.PerSample(gs.GHM()), [5, 1], FIVE_AND_ONE, 2.0),
        (gs.GHM(), [5, 1], FIVE_AND_ONE, 2.0),
        # All weights are 1: the gradient itself, 7 / 5 / 2 + 3 / 2.
        (gs.GHM(1), [5, 1], FIVE_AND_ONE, 2.2),
        (gs.PerSample(gs.Identity()), [5, 1], FIVE_AND_ONE, 2.2),
    ],
)
def test_an_example_has_its_own_gradient_in_a_pass_of_any_size(
    transform: Transform, sizes: list[int], values: list[float], expected: float
) -> None:
    result, live = by_hand(transform, sizes, values)
    assert result == pytest.approx(expected, abs=2e-6)
    (source,) = live.examples.values()
    numbers = source.numbers()
    assert numbers["norm_mean"] == pytest.approx(sum(values) / 6)
    assert numbers["norm_max"] == pytest.approx(max(values))


def test_examples_of_unequal_passes_are_counted_as_changed_by_their_own_gradient() -> None:
    _, clipped_live = by_hand(gs.PerSample(gs.ClipGlobalNorm(1.0)), [4, 2], [1.3] * 4 + [0.8] * 2)
    _, even_live = by_hand(gs.PerSample(gs.GHM(1)), [5, 1], FIVE_AND_ONE)
    assert clipped_live.examples["per_sample"].numbers()["changed"] == pytest.approx(4 / 6)
    assert even_live.examples["per_sample"].numbers()["changed"] == 0


def test_the_noise_scale_of_passes_of_unequal_size_is_unbiased() -> None:
    _, live = by_hand(gs.PerSample(gs.Identity()), [5, 1], FIVE_AND_ONE)
    weights = [0.1] * 5 + [0.5]
    square = sum(weight * value**2 for weight, value in zip(weights, FIVE_AND_ONE, strict=True))
    share = sum(weight**2 for weight in weights)  # of the variance that the mean has
    variance = (square - 2.2**2) / (1 - share)
    (source,) = live.examples.values()
    expected = variance / (2.2**2 - share * variance)
    assert source.numbers()["noise_scale"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["mlp", "tokens", "scaled"])
def test_rows_of_passes_of_unequal_size_are_those_of_a_loop(name: str) -> None:
    model, inputs = models.make(name, 7)
    targets, sizes = torch.arange(7), [4, 1, 2]
    rows = loop(model, inputs, targets)
    weights = torch.cat([torch.full((size,), 1 / (3 * size)) for size in sizes])
    norms = torch.stack([row.reshape(7, -1).square().sum(1) for row in rows]).sum(0).sqrt()
    bound = median_norm(rows)
    factors = weights * (bound / (norms + 1e-6)).clamp(max=1)
    clamped = [row.clamp(-0.01, 0.01) for row in rows]
    for of, expected in (
        (gs.ClipGlobalNorm(bound), [torch.einsum("n...,n->...", row, factors) for row in rows]),
        (gs.Clip(0.01), [torch.einsum("n...,n->...", row, weights) for row in clamped]),
        (gs.TrimmedMean(0.5), [row.median(0).values for row in rows]),
    ):
        assert_close(treated(model, inputs, targets, gs.PerSample(of), sizes), expected, 1e-5)


def test_a_random_transform_weighs_each_pass_by_its_size() -> None:
    # A quantity of two levels is 0 or the norm: each example's result is its own gradient.
    result, _ = by_hand(gs.PerSample(gs.Quantize(levels=1)), [5, 1], FIVE_AND_ONE)
    assert result == pytest.approx(2.2, abs=1e-5)


def test_sums_of_passes_of_unequal_size_are_the_sum_of_the_clipped_gradients() -> None:
    model, inputs = models.make("mlp", 6)
    targets = torch.arange(6)
    rows = loop(model, inputs, targets)
    bound = median_norm(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    transform = gs.PerSample(gs.ClipGlobalNorm(bound), reduction="sum")
    with gs.Surgery(gs.Intervention(transform)).attach(model, optimizer):
        for part in (slice(0, 4), slice(4, 6)):
            functional.cross_entropy(model(inputs[part]), targets[part], reduction="sum").backward()
        optimizer.step()
    assert_close([p.grad for p in model.parameters()], [6 * grad for grad in clipped(rows, bound)])


def test_a_first_pass_that_is_the_smallest_does_not_look_like_a_sum() -> None:
    model = nn.Linear(7, 7, bias=False)
    nn.init.eye_(model.weight)
    inputs, targets = 50 * torch.eye(7)[:6], torch.arange(6) + 1  # all are sure and wrong
    transform = gs.PerSample(gs.ClipGlobalNorm(1.0))
    (grad,) = treated(model, inputs, targets, transform, [2, 4])  # a warning is an error
    assert float(grad.norm()) > 0


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


def test_noise_is_that_of_the_pass_whose_examples_weigh_most() -> None:
    model = nn.Linear(400, 100)
    inputs, targets = torch.randn(10, 400), torch.arange(10)
    plain, noisy = (
        treated(model, inputs, targets, gs.PerSample(gs.ClipGlobalNorm(0.5), noise=noise), [8, 2])
        for noise in (0.0, 2.0)
    )
    assert float((noisy[0] - plain[0]).std()) == pytest.approx(2.0 * 0.5 / 4, rel=0.02)


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


def test_numbers_are_those_of_the_rows() -> None:
    model, inputs = models.make("mlp", COUNT)
    targets = torch.arange(COUNT)
    rows = torch.cat(
        [row.reshape(len(row), -1) for row in loop(model, inputs, targets)], 1
    ).double()
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
