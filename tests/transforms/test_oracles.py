"""Transforms compared with slow, obvious implementations and with PyTorch's functions."""

import math
import platform
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.transforms.base import Transform, TransformContext, init_all, update_all
from gradsurg.transforms.mask import Mask, multiples_of
from tests.transforms.cases import INF, NAN


def act(transform: Transform, grad: Tensor, value: Tensor | None = None, step: int = 0) -> Tensor:
    context = TransformContext("a.weight", step, value)
    return transform.update(grad, transform.init(grad), context)[0]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def euclid(numbers: list[float]) -> float:
    return math.sqrt(sum(number * number for number in numbers))


@pytest.mark.parametrize(
    "shape", [(8, 4, 3, 3), (8, 4, 5), (8, 4), (8,), (1, 7), (1, 1, 1, 4)], ids=str
)
def test_agc_agrees_with_the_papers_loop_over_units(shape: tuple[int, ...]) -> None:
    grad, value = random(*shape) * 0.02, random(*shape, seed=1)
    value[0] = 0.0  # A unit of zeros has eps for its norm.
    expected = grad.clone()
    units = [(grad[i], value[i], expected[i]) for i in range(shape[0])]
    if len(shape) < 2:
        units = [(grad, value, expected)]
    clipped = 0
    for g, w, out in units:
        size, bound = euclid(g.flatten().tolist()), 0.01 * max(euclid(w.flatten().tolist()), 1e-3)
        if size > bound:
            clipped += 1
            for index in range(g.numel()):
                out.view(-1)[index] = g.flatten()[index] * bound / size
    assert clipped
    torch.testing.assert_close(act(gs.AGC(0.01), grad, value), expected)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_global_norm_agrees_with_clip_grad_norm(p: float, max_norm: float) -> None:
    grads = [random(4, 3), random(5, seed=1), random(seed=2), random(2, 2, seed=3)]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(params, max_norm, p)
    for result, param in zip(group(gs.ClipGlobalNorm(max_norm, p), grads), params, strict=True):
        torch.testing.assert_close(result, param.grad)


@pytest.mark.parametrize("p", [2.0, INF])
def test_clip_global_norm_of_mixed_dtypes_and_empty_tensors(p: float) -> None:
    # 1e200 is out of float32's range: the common norm has to be of the widest dtype.
    grads = [torch.tensor([0.0, 3.0]), torch.zeros(0), torch.tensor(1e100, dtype=torch.float64)]
    grads += [torch.tensor(1.0, dtype=torch.bfloat16)]
    results = group(gs.ClipGlobalNorm(1.0, p, eps=0.0), grads)
    assert [result.dtype for result in results] == [grad.dtype for grad in grads]
    assert [result.shape for result in results] == [grad.shape for grad in grads]
    torch.testing.assert_close(results[2], torch.tensor(1.0, dtype=torch.float64))
    assert group(gs.ClipGlobalNorm(1.0, p), []) == []
    assert group(gs.ClipGlobalNorm(1.0, p), [torch.zeros(0)])[0].shape == (0,)


def test_clip_global_norm_measures_bfloat16_in_float32() -> None:
    # In bfloat16 a sum of 256 ones and more stays 256.
    grad = torch.ones(10_000, dtype=torch.bfloat16)
    (result,) = group(gs.ClipGlobalNorm(1.0), [grad])
    torch.testing.assert_close(result, torch.full_like(grad, 0.01))
    # Nor is the factor rounded to eight bits: that would move about half of the entries.
    grad = random(1000).bfloat16()
    (result,) = group(gs.ClipGlobalNorm(1.0), [grad])
    exact = (grad.double() / (grad.double().norm() + 1e-6)).bfloat16()
    assert (result != exact).float().mean() < 0.01


def test_clip_agrees_with_clip_grad_value() -> None:
    param = torch.nn.Parameter(torch.zeros(50))
    param.grad = random(50)
    torch.nn.utils.clip_grad_value_([param], 0.3)
    assert torch.equal(act(gs.Clip(0.3), random(50)), param.grad)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
def test_norm_rescale_reaches_the_norm_at_every_scale(scale: float, p: float) -> None:
    grad = random(3, 4) * scale
    result = act(gs.NormRescale(2.5, p=p, per="unit"), grad)
    for row in range(3):
        exact = grad[row].double()
        expected = 2.5 * exact / torch.linalg.vector_norm(exact, p)
        torch.testing.assert_close(result[row], expected.float())


def test_grokfast_ema_agrees_with_the_papers_recursion() -> None:
    transform = gs.GrokfastEMA(0.9, 2.0)
    grads = [random(3, seed=seed) for seed in range(5)]
    state = transform.init(grads[0])
    m = grads[0].tolist()
    for step, grad in enumerate(grads):
        result, state = transform.update(grad, state, TransformContext(step=step))
        if step:
            m = [0.9 * old + 0.1 * new for old, new in zip(m, grad.tolist(), strict=True)]
        expected = [g + 2.0 * old for g, old in zip(grad.tolist(), m, strict=True)]
        torch.testing.assert_close(result, torch.tensor(expected))


@pytest.mark.parametrize("amount", [0.01, 0.3, 0.5, 1.0])
def test_mask_keeps_the_largest_entries_of_a_sort(amount: float) -> None:
    grad = random(6, 5)
    result = act(Mask(amount, per="unit"), grad)
    for row in range(6):
        order = sorted(range(5), key=lambda i: -abs(grad[row, i].item()))
        kept = order[: max(1, round(amount * 5))]
        expected = [grad[row, i].item() if i in kept else 0.0 for i in range(5)]
        torch.testing.assert_close(result[row], torch.tensor(expected))


@pytest.mark.parametrize("per", ["tensor", "unit", "a b c -> b", "a b c -> c a"])
def test_mask_keeps_exactly_k_of_equal_entries_in_each_group(per: str) -> None:
    result = act(Mask(0.5, per=per), torch.ones(4, 6, 2))
    assert result.count_nonzero() == 24
    if per == "a b c -> b":
        assert result.count_nonzero(dim=(0, 2)).tolist() == [4] * 6


def test_random_k_mask_keeps_exactly_k_entries_of_each_row_other_ones_at_each_step() -> None:
    grad = random(50, 20)
    transform = Mask(0.1, by="random_k", per="b o -> b")
    first, second = act(transform, grad), act(transform, grad, step=1)
    for kept in (first, second):
        assert kept.count_nonzero(dim=1).tolist() == [2] * 50
        assert torch.equal(kept[kept != 0], grad[kept != 0])
    assert not torch.equal(first, second)
    assert len({tuple(row.nonzero().flatten().tolist()) for row in first}) > 10
    rescaled = act(Mask(0.1, by="random_k", per="b o -> b", rescale=True), grad)
    torch.testing.assert_close(rescaled, first * 10)


@pytest.mark.parametrize("step", [0, 1, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_noise_has_the_variance_of_the_paper(step: int, dtype: torch.dtype) -> None:
    noise = act(gs.AddNoise(0.3), torch.zeros(200_000, dtype=dtype), step=step).double()
    expected = math.sqrt(0.3 / (1 + step) ** 0.55)
    assert abs(noise.std().item() / expected - 1) < 0.01
    assert abs(noise.mean().item()) < 5 * expected / math.sqrt(200_000)


def test_scaled_sign_has_the_mean_magnitude_of_each_unit() -> None:
    grad = random(3, 4)
    result = act(gs.Sign("mean", per="unit"), grad)
    for row in range(3):
        size = sum(abs(x) for x in grad[row].tolist()) / 4
        torch.testing.assert_close(result[row], grad[row].sign() * size)


def test_scale_by_sign_does_not_change_a_group_with_a_nan() -> None:
    grad = torch.tensor([[1.0, NAN], [1.0, 2.0]])
    result = act(gs.ScaleBySign(3.0, per="unit"), grad)
    torch.testing.assert_close(result, torch.tensor([[1.0, NAN], [3.0, 6.0]]), equal_nan=True)


def by_two_masks(grad: Tensor, positive: float, negative: float, signs: Tensor) -> Tensor:
    def scaled(factor: float) -> Tensor:
        return grad * factor if factor else torch.zeros_like(grad)

    below = torch.where(signs < 0, scaled(negative), grad)
    return torch.where(signs > 0, scaled(positive), below)


def assert_same_bits(result: Tensor, expected: Tensor) -> None:
    """Assert that tensors are equal, zeros with their signs, where the first is not NaN too."""
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    known = ~expected.isnan()
    if platform.machine() in ("x86_64", "AMD64"):  # others may lose the sign of a zero
        assert torch.equal(result[known].signbit(), expected[known].signbit())


FACTORS = [0.0, 1.0, 0.3, 0.5, 2.0, 3.0, -1.0, -0.7, 1e-30, 1e30]


@pytest.mark.parametrize("of", ["grad", "value"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scale_by_sign_has_the_bits_of_two_masks(
    of: Literal["grad", "value"], dtype: torch.dtype
) -> None:
    info = torch.finfo(dtype)
    sizes = [INF, 0.0, info.tiny, info.max, info.smallest_normal / 8, 1.0, 7.0, NAN]
    special = torch.tensor([*sizes, *(-size for size in sizes)], dtype=torch.float64).to(dtype)
    # So many that vectors of any width are filled, and a rest is left.
    grad = torch.cat([special.repeat(9), random(30).to(dtype), special])
    other = grad[torch.randperm(len(grad), generator=torch.Generator().manual_seed(0))]
    signs = grad if of == "grad" else other
    for positive, negative in product(FACTORS, FACTORS):
        result = act(gs.ScaleBySign(positive, negative, of=of), grad, other)
        assert_same_bits(result, by_two_masks(grad, positive, negative, signs))


@pytest.mark.parametrize("negative", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("positive", [0.0, 1.0, 2.0])
def test_scale_by_sign_has_the_derivatives_of_two_masks(positive: float, negative: float) -> None:
    x = torch.tensor([2.0, -2.0, 0.0, -0.0, NAN, INF, -INF], requires_grad=True)
    weights = random(7)
    derivatives = [
        torch.autograd.grad((result * weights).sum(), x)[0]
        for result in (
            act(gs.ScaleBySign(positive, negative), x),
            by_two_masks(x, positive, negative, x),
        )
    ]
    assert derivatives[0].isfinite().all()
    torch.testing.assert_close(*derivatives, rtol=0, atol=0)


def test_scale_by_sign_without_a_value_names_what_it_needs() -> None:
    with pytest.raises(ValueError, match="ScaleBySign needs the tensor whose gradient this is"):
        act(gs.ScaleBySign(of="value"), random(3))


def group(transform: Transform, grads: list[Tensor]) -> list[Tensor]:
    contexts = [TransformContext(f"site{index}") for index in range(len(grads))]
    return list(update_all(transform, grads, init_all(transform, grads), contexts)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_bound_above_the_largest_number_of_a_dtype_is_that_number(dtype: torch.dtype) -> None:
    grad = torch.tensor([INF, -INF, 2.0, NAN]).to(dtype)
    largest = torch.finfo(dtype).max
    context = TransformContext()
    expected = torch.tensor([largest, -largest, 2.0, NAN]).to(dtype)
    above = 2 * largest
    for transform in (gs.Clip(above), gs.Clamp(low=-above, high=above)):
        result = transform.apply(grad, context)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert gs.Clamp(low=None, high=-above).apply(grad, context)[2] == -largest
    assert gs.Clamp(low=above, high=None).apply(grad, context)[2] == largest


@pytest.mark.slow
def test_a_small_amount_keeps_entries_with_that_probability() -> None:
    """Of 67 million entries 0.07 on average; draws of 24 bits keep 4."""
    grad = torch.ones(1 << 24)
    mask = Mask(1e-9, by="random")
    kept = sum(mask.apply(grad, TransformContext(call=call)).sum().item() for call in range(4))
    assert kept <= 1


@pytest.mark.parametrize(
    "amount",
    [
        0.3,
        *(pytest.param(amount, marks=pytest.mark.slow) for amount in (1e-7, 1e-9)),
        *(pytest.param(amount, marks=pytest.mark.full) for amount in (0.5, 1e-3)),
    ],
)
def test_the_probability_of_a_random_mask_is_the_amount(
    amount: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.rand` draws multiples of 2^-24: every one that decides is tried."""
    bits = 1 << 24
    lowest = math.floor(amount * bits)

    def probability(first: Tensor, second: Tensor) -> float:
        draws = iter([first, second])
        monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: next(draws))
        mask = Mask(amount, by="random")
        return mask.apply(torch.ones_like(second), TransformContext()).double().mean().item()

    every = torch.arange(bits, dtype=torch.float64) / bits
    at_border = probability(torch.full((bits,), lowest / bits), every.float())
    assert lowest / bits + at_border / bits == pytest.approx(amount, rel=1e-5)
    if lowest:
        assert probability(torch.tensor([(lowest - 1) / bits]), torch.tensor([0.9])) == 1
    assert probability(torch.tensor([(lowest + 1) / bits]), torch.tensor([0.0])) == 0


def test_the_draws_of_cuda_are_equally_likely() -> None:
    """CUDA rounds 32 random bits x to (x + 1/2) / 2^32 in float32, and returns 0 for 1."""
    edge = torch.arange(1 << 16, dtype=torch.float64)
    bits = torch.cat([edge, 2**32 - 1 - edge])
    draws = bits.float() * 2**-32 + 2**-33
    multiples = multiples_of(torch.where(draws == 1, 0, draws), is_cuda=True)
    assert (multiples == 0).sum() == 1 << 8
    assert (multiples == 1).sum() == 1 << 8
    assert multiples.max() == (1 << 24) - 1


def test_random_refuses_amounts_below_the_resolution_of_its_draws() -> None:
    with pytest.raises(ValueError, match=r"amount: must be >= 1e-09 with by=random, found 1e-10"):
        Mask(1e-10, by="random")
    assert Mask(1e-10).amount == 1e-10


def test_a_convolution_weight_of_one_long_axis_has_the_units_of_timm() -> None:
    """As documented: optax takes it for one unit."""
    grad, value = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [4.0]])
    result = gs.AGC(0.01).apply(grad, TransformContext(value=value))
    torch.testing.assert_close(result, 0.01 * value)
    assert "optax" in (gs.AGC.__doc__ or "")


@pytest.mark.parametrize("window", ["sigmoid", "arctan", "fast_sigmoid"])
def test_a_surrogate_is_the_derivative_of_its_smooth_step(window: str) -> None:
    value, grad, slope = random(200).double().requires_grad_(), random(200, seed=1).double(), 3.0
    u = slope * (value - 0.5)
    step = {
        "sigmoid": u.sigmoid(),
        "arctan": (math.pi / 2 * u).atan() / math.pi,
        "fast_sigmoid": u / (1 + u.abs()) / slope,
    }[window]
    step.backward(grad)
    result = act(gs.SurrogateGradient(window, slope, center=0.5), grad, value)
    torch.testing.assert_close(result, value.grad)


def test_autoclip_clips_at_the_percentile_of_all_norms_so_far() -> None:
    grads = [random(4, 3, seed=seed) * (1 + seed % 5) for seed in range(40)]
    transform = gs.AdaptiveClip("quantile", 0.3, max_norm=None)
    state, norms = transform.init(grads[0]), []
    for grad in grads:
        result, state = transform.update(grad, state, TransformContext())
        norms.append(float(grad.norm()))
        bound = float(np.percentile(norms, 30))
        torch.testing.assert_close(result, grad * min(1.0, bound / norms[-1]))


def test_autoclip_forgets_norms_before_its_window() -> None:
    transform = gs.AdaptiveClip("quantile", 1.0, max_norm=None, window=2)
    state = transform.init(torch.zeros(1))
    results = []
    for size in (1.0, NAN, 8.0, 2.0, 4.0):
        result, state = transform.update(torch.tensor([size]), state, TransformContext())
        results.append(float(result))
    torch.testing.assert_close(results, [1.0, NAN, 8.0, 2.0, 4.0], equal_nan=True)
    assert state["norms"].flatten().tolist() == [2.0, 4.0]


@pytest.mark.parametrize("rule", ["zscore", "deviations", "ratio"])
def test_a_norm_that_is_not_finite_leaves_the_threshold_as_it_was(rule: str) -> None:
    transform = gs.AdaptiveClip(rule, 1.5, warmup=2, max_norm=9.0)
    grad = torch.tensor([3.0, 4.0])
    state = transform.init(grad)
    for factor in (1.0, 1.2, 1.1):
        _, state = transform.update(grad * factor, state, TransformContext())
    for bad in (NAN, INF):
        _, after = transform.update(torch.tensor([bad, 1.0]), state, TransformContext())
        assert all(torch.equal(after[key], state[key]) for key in state)
    assert state["count"] == 3


def test_growth_clip_keeps_its_bound_over_a_nan_and_an_infinity() -> None:
    transform = gs.GrowthClip(1.2, per="unit")
    state = transform.init(torch.zeros(1, 2))
    for grad, expected in (
        ([INF, 1.0], [INF, 1.0]),  # not clipped: there is no result before it
        ([NAN, 1.0], [NAN, 1.0]),
        ([0.3, 0.4], [0.3, 0.4]),
        ([NAN, 1.0], [NAN, NAN]),
        ([INF, 1.0], [NAN, 0.0]),
        ([3.0, 4.0], [0.36, 0.48]),
    ):
        result, state = transform.update(torch.tensor([grad]), state, TransformContext())
        torch.testing.assert_close(result, torch.tensor([expected]), equal_nan=True)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_update_clip_recovers_from_a_gradient_that_is_not_finite(bad: float) -> None:
    transform, update = gs.UpdateClip(0.5), torch.tensor([1.0, -1.0])
    state = spared = transform.init(update)
    for grad in ([1.0, 1.0], [bad, 1.0], [3.0, 1.0]):
        context = TransformContext(gradient=torch.tensor(grad))
        result, state = transform.update(update, state, context)
        assert result.isnan().all() == (bad in grad)
        if bad not in grad:
            expected, spared = transform.update(update, spared, context)
            torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 2, 3)], ids=str)
def test_orthogonalize_moves_each_singular_value_by_the_polynomial(shape: tuple[int, ...]) -> None:
    grad = random(*shape).double()
    a, b, c = 3.4445, -4.775, 2.0315
    left, values, right = np.linalg.svd(grad.reshape(shape[0], -1).numpy(), full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    assert values.min() > 0.6
    expected = torch.from_numpy(left @ np.diag(values) @ right).reshape(shape)
    torch.testing.assert_close(act(gs.Orthogonalize(scale="none"), grad), expected)


@pytest.mark.parametrize("scale", ["spectral", "rms"])
def test_momentum_and_orthogonalize_are_muon(scale: str) -> None:
    rule = {"spectral": "original", "rms": "match_rms_adamw"}[scale]
    param = torch.nn.Parameter(random(12, 8))
    optimizer = torch.optim.Muon([param], lr=1.0, weight_decay=0.0, adjust_lr_fn=rule)
    transform = gs.Chain(
        gs.Momentum(0.95, average=True, nesterov=True), gs.Orthogonalize(scale=scale)
    )
    state = transform.init(param)
    for step in range(5):
        before, grad = param.detach().clone(), random(12, 8, seed=step + 1)
        param.grad = grad.clone()
        optimizer.step()
        result, state = transform.update(grad, state, TransformContext())
        error = (before - param.detach() - result).norm() / result.norm()
        # PyTorch computes in bfloat16, whose rounding error is up to 0.004 at each operation.
        assert error < 0.03


def test_a_soft_threshold_is_softshrink_and_a_softsign_is_pytorchs() -> None:
    grad = random(1000)
    expected = torch.nn.functional.softshrink(grad, 0.3)
    torch.testing.assert_close(act(gs.Curve("soft_threshold", 0.3), grad), expected)
    expected = torch.nn.functional.softsign(grad / 2) * 2
    torch.testing.assert_close(act(gs.Curve("softsign", 2.0), grad), expected)


def test_a_perpendicular_gradient_is_the_residual_of_least_squares() -> None:
    grad, value = random(4, 6).double(), random(4, 6, seed=1).double()
    for row in range(4):
        factor = torch.linalg.lstsq(value[row][:, None], grad[row][:, None]).solution[0]
        expected = grad[row] - factor * value[row]
        result = act(gs.Perpendicular(per="unit"), grad, value)[row]
        torch.testing.assert_close(result, expected)


def test_deconvolve_refuses_a_node_that_changes_the_shape() -> None:
    context = TransformContext("a", entering=(random(3),))
    with pytest.raises(ValueError, match=r"keeps the shape, and 'a' maps \[2\] to \[3\]"):
        gs.Deconvolve().apply(random(2), context)


def micro_batches(count: int) -> list[Tensor]:
    """Return gradients with equal signs at a third of the entries and zeros at some."""
    grads = [random(9, 10, seed=seed) for seed in range(count)]
    grads = [torch.cat([grad[:3].abs(), grad[3:]]) for grad in grads]
    grads[-1][0, 0] = 0.0
    return grads


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.6, 1.0])
def test_accumulated_gradients_have_the_and_mask(threshold: float, rescale: bool) -> None:
    grads = micro_batches(5)
    model = torch.nn.Linear(10, 9, bias=False)
    surgery = gs.Surgery(
        gs.Intervention(gs.SignAgreement(threshold, rescale=rescale), at=gs.Parameters("weight"))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gs.SurgeryWarning)
        with surgery.attach(model, optimizer):
            for sign in (-2, 1):  # another step starts anew
                optimizer.zero_grad()
                for grad in grads[::sign]:
                    (model.weight * grad).sum().backward()
                optimizer.step()
    signs = torch.stack(grads).sign().mean(dim=0)
    kept = signs.abs() >= threshold - 1e-6
    expected = torch.where(kept, torch.stack(grads).sum(dim=0), 0.0)
    expected = expected / kept.float().mean() if rescale else expected
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, expected)
    assert (model.weight.grad[~kept] == 0).all()
    assert kept.any()


def test_a_spike_is_clipped_to_the_usual_size_of_its_entry() -> None:
    transform = gs.SpikeClip(9.0, decay=0.5, warmup=2)
    state = transform.init(torch.zeros(2))
    results, square = [], [0.0, 0.0]
    for step, grad in enumerate([[1.0, 10.0], [-1.0, 10.0], [50.0, -20.0], [50.0, INF]]):
        result, state = transform.update(torch.tensor(grad), state, TransformContext())
        expected = list(grad)
        for index, entry in enumerate(grad):
            bound = math.sqrt(9 * square[index])
            if step >= 2 and abs(entry) > bound:
                expected[index] = math.copysign(bound, entry)
            square[index] = 0.5 * square[index] + 0.5 * expected[index] ** 2
        torch.testing.assert_close(result, torch.tensor(expected))
        results.append(expected)
    assert results[2][0] < 50
    assert results[2][1] == -20
    assert results[3][1] < INF


@pytest.mark.parametrize("amount", [0.1, 0.5])
def test_dgc_sends_every_gradient_in_the_end(amount: float) -> None:
    """Of a gradient g the sum of all results is g / (1 - momentum)."""
    transform, grad = gs.DGC(amount, 0.5), random(4, 5).double()
    total, state = torch.zeros_like(grad), transform.init(grad)
    for step in range(100):
        current = grad if step == 0 else torch.zeros_like(grad)
        result, state = transform.update(current, state, TransformContext())
        assert result.count_nonzero() <= round(amount * 20)
        assert ((result == 0) | (state["v"] == 0)).all()
        total += result
    sent_at_once = Mask(amount).apply(grad, TransformContext()) != 0
    # An entry that is sent takes its momentum with it.
    torch.testing.assert_close(total[sent_at_once], grad[sent_at_once])
    assert ((total / grad >= 1) & (total / grad <= 2)).all()


def test_low_rank_of_one_gradient_again_and_again_is_the_truncated_svd() -> None:
    grad = random(8, 3, 2).double()
    transform = gs.LowRank(2)
    state, result = transform.init(grad), grad
    for _ in range(200):
        result, state = transform.update(grad, state, TransformContext())
    left, values, right = np.linalg.svd(grad.reshape(8, -1).numpy(), full_matrices=False)
    expected = torch.from_numpy(left[:, :2] @ np.diag(values[:2]) @ right[:2])
    torch.testing.assert_close(result.reshape(8, -1), expected, rtol=1e-6, atol=1e-6)


def test_low_rank_keeps_its_basis_over_a_nan_and_a_zero() -> None:
    transform, grad = gs.LowRank(1), random(4, 3)
    _, state = transform.update(grad, transform.init(grad), TransformContext())
    for bad in (torch.full((4, 3), NAN), torch.zeros(4, 3)):
        _, after = transform.update(bad, state, TransformContext())
        assert torch.equal(after["q"], state["q"])


@pytest.mark.parametrize(("by", "p"), [("norm", 2.0), ("max", INF)])
def test_quantized_entries_are_neighbouring_levels_with_the_mean_of_the_entry(
    by: str, p: float
) -> None:
    grad, draws = random(50), 2000
    transform = gs.Quantize(4, by=by)
    results = torch.stack(
        [transform.apply(grad, TransformContext(seed=seed)) for seed in range(draws)]
    )
    level = torch.linalg.vector_norm(grad, p) / 4
    steps = results / level
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-5)
    assert ((results - grad).abs() < level * (1 + 1e-5)).all()
    assert ((results.mean(dim=0) - grad).abs() < 5 * level / 2 / draws**0.5).all()


def test_the_delayed_gradient_is_that_of_so_many_steps_before() -> None:
    grads = [random(3, seed=seed) for seed in range(6)]
    transform = gs.Delay(2)
    state = transform.init(grads[0])
    for step, grad in enumerate(grads):
        result, state = transform.update(grad, state, TransformContext())
        assert torch.equal(result, grads[step - 2] if step >= 2 else torch.zeros(3))


def test_a_graft_has_the_state_of_both_its_transforms() -> None:
    grads = [random(3, seed=seed) for seed in range(4)]
    transform = gs.Graft(gs.Momentum(0.9), gs.GrokfastEMA())
    state = transform.init(grads[0])
    directions, sizes = (each.init(grads[0]) for each in (gs.Momentum(0.9), gs.GrokfastEMA()))
    for grad in grads:
        result, state = transform.update(grad, state, TransformContext())
        d, directions = gs.Momentum(0.9).update(grad, directions, TransformContext())
        m, sizes = gs.GrokfastEMA().update(grad, sizes, TransformContext())
        torch.testing.assert_close(result, d / d.norm() * m.norm())


def test_a_softplus_window_and_a_straight_through_give_the_gradient_of_the_softplus_network() -> (
    None
):
    """Of a network with one hidden layer, with the inner values of the ReLU network."""
    torch.manual_seed(0)
    first, last = torch.nn.Linear(6, 50).double(), torch.nn.Linear(50, 1).double()
    given = random(9, 6).double().requires_grad_()
    last(torch.nn.functional.softplus(first(given), beta=3.0)).sum().backward()
    other = given.detach().clone().requires_grad_()
    surgery = gs.Surgery(
        gs.Intervention(gs.StraightThrough(), at=gs.Nodes("Relu", side="leave")),
        gs.Intervention(gs.SurrogateGradient("softplus", 3.0), at=gs.Inputs(types="ReLU")),
    )
    model = torch.nn.Sequential(first, torch.nn.ReLU(), last)
    with surgery.attach(model):
        model(other).sum().backward()
    torch.testing.assert_close(other.grad, given.grad)


def test_feature_distances_are_those_of_the_loss_of_transferable_perturbations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))
    model.requires_grad_(requires_grad=False)
    clean, labels = random(4, 5), torch.tensor([0, 1, 2, 0])
    moved = clean + 0.1 * random(4, 5, seed=1)

    def gradient(images: Tensor, first: list[Tensor]) -> Tensor:
        """Return the input gradient of the loss plus the distances of the features from `first`."""
        images = images.clone().requires_grad_()
        features = [model[:2](images), model[:4](images)]
        loss = nn.functional.cross_entropy(model(images), labels)
        for z, z0 in zip(features, first, strict=False):
            # An entry of zero has no slope.
            root = torch.where(z > 0, z, 1.0).sqrt() * (z > 0)
            loss = loss + 0.05 * (root - z0.sqrt()).norm(dim=1).sum()
        return torch.autograd.grad(loss, images)[0]

    first = [model[:2](clean), model[:4](clean)]
    transform = gs.FeatureDistance(0.05, power=0.5)
    surgery = gs.Surgery(gs.Intervention(transform, gs.Outputs(types="ReLU")))
    expected = {clean: gradient(clean, []), moved: gradient(moved, first)}
    with surgery.attach(model):
        for images, grad in expected.items():
            at = images.clone().requires_grad_()
            nn.functional.cross_entropy(model(at), labels).backward()
            torch.testing.assert_close(at.grad, grad)
        with pytest.raises(ValueError, match=r"of \[2, 6\], found \[4, 6\]"):
            model(moved[:2].requires_grad_()).sum().backward()
    assert not torch.allclose(gradient(moved, first), gradient(moved, []), rtol=1e-2)


@pytest.mark.parametrize(
    ("scale", "factor"), [("mean", lambda n, k: n / k), ("paper", lambda n, k: n / (k + 1))]
)
def test_cautious_scales_a_float64_update_in_float64(
    scale: Any, factor: Callable[[float, float], float]
) -> None:
    generator = torch.Generator().manual_seed(0)
    update, grad = torch.randn(2, 101, dtype=torch.float64, generator=generator)
    keeps = update * grad < 0
    context = TransformContext("w", 0)
    context.gradient = grad
    found = gs.Cautious(scale).apply(update, context)
    expected = torch.where(keeps, update * factor(101.0, float(keeps.sum())), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=0)
