"""Transforms compared with the libraries that have them; `pip install -e '.[oracles]'`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.transforms.base import Transform, TransformContext, init_all, update_all


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def act(transform: Transform, grad: Tensor, value: Tensor | None = None) -> Tensor:
    context = TransformContext("a.weight", 0, value)
    return transform.update(grad, transform.init(grad), context)[0]


def steps(transform: Transform, sequence: Sequence[list[Tensor]]) -> list[list[Tensor]]:
    """Return the results for a sequence of gradients of a group."""
    state = init_all(transform, sequence[0])
    results = []
    for step, grads in enumerate(sequence):
        contexts = [TransformContext(f"site{index}", step) for index in range(len(grads))]
        result, state = update_all(transform, grads, state, contexts)
        results.append([*result])
    return results


def spiky(count: int, seed: int = 0) -> list[list[Tensor]]:
    """Return gradients of two tensors whose norm is large at every seventh step."""
    sizes = [10.0 if step % 7 == 6 else 1.0 for step in range(count)]
    return [
        [random(4, 3, seed=seed + 2 * step) * size, random(5, seed=seed + 2 * step + 1) * size]
        for step, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("slope", [1.0, 5.0, 25.0])
@pytest.mark.parametrize(
    ("window", "maker", "argument"),
    [
        ("sigmoid", "sigmoid", "slope"),
        ("fast_sigmoid", "fast_sigmoid", "slope"),
        ("arctan", "atan", "alpha"),
    ],
)
def test_surrogate_gradients_are_those_of_snntorch(
    window: str, maker: str, argument: str, slope: float
) -> None:
    surrogate = pytest.importorskip("snntorch.surrogate")
    value, grad = (random(1000) * 0.3).requires_grad_(), random(1000, seed=1)
    getattr(surrogate, maker)(**{argument: slope})(value).backward(grad)
    assert value.grad is not None
    result = act(gs.SurrogateGradient(window, slope), grad, value)
    torch.testing.assert_close(result, value.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_norm", [None, 3.0])
@pytest.mark.parametrize(
    ("rule", "mode"), [("zscore", "zscore"), ("deviations", "percentile")], ids=str
)
def test_adaptive_clip_is_zclip(rule: str, mode: str, max_norm: float | None) -> None:
    zclip = pytest.importorskip("zclip.zclip")
    theirs = zclip.ZClip(0.9, 2.0, max_norm, warmup_steps=5, mode=mode)
    params = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))]
    model = nn.ParameterList(params)
    sequence = spiky(30)
    results = steps(gs.AdaptiveClip(rule, 2.0, decay=0.9, warmup=5, max_norm=max_norm), sequence)
    clipped = 0
    for grads, result in zip(sequence, results, strict=True):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        theirs.step(model)
        clipped += not torch.equal(params[0].grad, grads[0])
        expected = [param.grad for param in params]
        # They divide by n + 1e-6.
        torch.testing.assert_close(result, expected, rtol=2e-6, atol=0)
    assert clipped >= 4


def test_adaptive_clip_is_adagc() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    params = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))]
    # Their warm-up ends one step earlier than the paper's.
    theirs = library.AdaGC(
        params, lr=0, betas=(0.0, 0.0), beta=0.9, lambda_rel=1.05, warmup_steps=5, lambda_abs=2.0
    )
    sequence = spiky(30)
    transform = gs.AdaptiveClip("ratio", 1.05, decay=0.9, warmup=4, max_norm=2.0, of="each")
    for grads, result in zip(sequence, steps(transform, sequence), strict=True):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        theirs.step()
        expected = [theirs.state[param]["exp_avg"] for param in params]
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-7)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)
    )


@pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU:UserWarning")
def test_deconvolve_at_relu_nodes_is_captums_deconvolution() -> None:
    attr = pytest.importorskip("captum.attr")
    model, inputs = network(), random(5, 2, 6, 6).requires_grad_()
    targets = torch.tensor([0, 1, 2, 0, 1])
    expected = attr.Deconvolution(model).attribute(inputs, target=targets)
    site = gs.Nodes("Relu", side="leave")
    with gs.Surgery(gs.Intervention(gs.Deconvolve(), at=site)).attach(model):
        outputs = model(inputs).gather(1, targets[:, None]).sum()
        (result,) = torch.autograd.grad(outputs, inputs)
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("transform", "name", "fields"),
    [
        (gs.Momentum(0.9), "trace", {}),
        (gs.Momentum(0.9, nesterov=True), "trace", {"nesterov": True}),
        (gs.Momentum(0.9, average=True), "ema", {"debias": False}),
        (gs.Momentum(0.9, average=True, debias=True), "ema", {}),
    ],
    ids=str,
)
def test_momentum_is_optaxs(transform: Transform, name: str, fields: dict[str, bool]) -> None:
    optax = pytest.importorskip("optax")
    theirs = getattr(optax, name)(0.9, **fields)
    sequence = [[random(4, 3, seed=seed)] for seed in range(6)]
    state = theirs.init(sequence[0][0].numpy())
    for (grad,), (result,) in zip(sequence, steps(transform, sequence), strict=True):
        expected, state = theirs.update(grad.numpy(), state)
        torch.testing.assert_close(result, torch.tensor(np.array(expected)))


def test_orthogonalize_is_optaxs_newton_schulz() -> None:
    muon = pytest.importorskip("optax.contrib._muon")
    for shape in ((6, 4), (4, 6)):
        grad = random(*shape)
        theirs = muon.orthogonalize_via_newton_schulz(
            jax_array(grad), jax_array(torch.tensor([3.4445, -4.775, 2.0315])), 5
        )
        expected = torch.tensor(np.array(theirs))
        result = act(gs.Orthogonalize(scale="none"), grad)
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)


def jax_array(tensor: Tensor) -> Any:  # Any: jax is not always installed
    return pytest.importorskip("jax.numpy").asarray(tensor.numpy())


def test_a_rescaled_perpendicular_gradient_is_orthograd() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    params = [nn.Parameter(random(4, 3)), nn.Parameter(random(5, seed=1))]
    grads = [random(4, 3, seed=2), random(5, seed=3)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    library.OrthoGrad(torch.optim.SGD(params, lr=0.0)).step()
    for param, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(act(gs.Perpendicular(rescale=True), grad, param), param.grad)


def test_grokfast_ma_is_that_of_pytorch_optimizer() -> None:
    library = pytest.importorskip("pytorch_optimizer.optimizer.grokfast")
    model, past = nn.Linear(3, 4, bias=False), None
    sequence = [[random(4, 3, seed=seed)] for seed in range(9)]
    results = steps(gs.GrokfastMA(4, 2.0), sequence)
    for (grad,), (result,) in zip(sequence, results, strict=True):
        model.weight.grad = grad.clone()
        past = library.gradfilter_ma(model, past, window_size=4, lamb=2.0)
        torch.testing.assert_close(result, model.weight.grad)


def test_adamw_with_update_clip_is_stable_adamw() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    fields = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours, plain, theirs = network(), network(), network()
    optimizer = torch.optim.AdamW(ours.parameters(), **fields)
    loops = [
        (ours, optimizer),
        (plain, torch.optim.AdamW(plain.parameters(), **fields)),
        (theirs, library.StableAdamW(theirs.parameters(), **fields)),
    ]
    surgery = gs.Surgery(gs.Intervention(gs.UpdateClip(0.95), gs.Updates()))
    with surgery.attach(ours, optimizer):
        for step in range(12):
            for model, loop in loops:
                for index, param in enumerate(model.parameters()):
                    size = 30.0 if step % 5 == 4 else 1.0
                    param.grad = size * random(*param.shape, seed=100 * step + index)
                loop.step()
    for a, b, c in zip(ours.parameters(), theirs.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(b, c, rtol=1e-2)


@pytest.mark.parametrize(("debias", "decay"), [(False, 0.9), (True, 0.9), (False, 0.0)])
def test_sgd_with_scale_by_rms_is_rmsprop_and_adam(debias: bool, decay: float) -> None:
    sequence = [[random(4, 3, seed=seed)] for seed in range(9)]
    param = nn.Parameter(torch.zeros(4, 3))
    optimizer: torch.optim.Optimizer = torch.optim.RMSprop([param], lr=1.0, alpha=decay, eps=1e-3)
    if debias:
        optimizer = torch.optim.Adam([param], lr=1.0, betas=(0.0, decay), eps=1e-3)
    for (grad,), (result,) in zip(
        sequence, steps(gs.ScaleByRMS(decay, eps=1e-3, debias=debias), sequence), strict=True
    ):
        before = param.detach().clone()
        param.grad = grad.clone()
        optimizer.step()
        torch.testing.assert_close(result, before - param.detach())


def test_growth_clip_is_the_limiter_of_fira() -> None:
    """As their code has it, which adds 1e-8 to the norm before."""
    sequence, before = spiky(30), [0.0, 0.0]
    for grads, results in zip(sequence, steps(gs.GrowthClip(1.2), sequence), strict=True):
        for index, (grad, result) in enumerate(zip(grads, results, strict=True)):
            limit = max(float(grad.norm()) / (before[index] + 1e-8), 1.2) / 1.2
            expected = grad / (limit if before[index] else 1.0)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
            before[index] = float(expected.norm())
    per_unit = steps(gs.GrowthClip(1.2, per="unit"), [[torch.eye(2)], [torch.eye(2) * 5]])
    torch.testing.assert_close(per_unit[1][0], torch.eye(2) * 1.2)


def test_moving_median_is_that_of_numpy() -> None:
    sequence = [[random(4, 3, seed=seed)] for seed in range(9)]
    sequence[4][0][0, 0] = torch.nan
    results = steps(gs.MovingMedian(4), sequence)
    for step, (result,) in enumerate(results):
        past = np.stack([grad.numpy() for (grad,) in sequence[max(step - 3, 0) : step + 1]])
        np.testing.assert_allclose(result.numpy(), np.nanmedian(past, axis=0), rtol=1e-6)


def test_spike_clip_is_spam() -> None:
    library = pytest.importorskip("pytorch_optimizer")
    params = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))]
    theirs = library.SPAM(
        params, lr=0.0, betas=(0.0, 0.9), threshold=4, grad_accu_steps=5, update_proj_gap=1000
    )
    sequence = spiky(30)
    # Their fifth gradient is the first to be clipped.
    results = steps(gs.SpikeClip(4.0, decay=0.9, warmup=4), sequence)
    clipped = 0
    for grads, result in zip(sequence, results, strict=True):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        theirs.step()
        expected = [theirs.state[param]["exp_avg"].view(param.shape) for param in params]
        torch.testing.assert_close(result, expected)
        clipped += not torch.equal(result[0], grads[0])
    assert clipped >= 4


@pytest.mark.parametrize(
    ("transform", "name", "fields"),
    [
        (gs.TrustRatio(0.01), "scale_by_trust_ratio", {"trust_coefficient": 0.01}),
        (gs.TrustRatio(1.0, eps=0.1), "scale_by_trust_ratio", {"eps": 0.1}),
        (gs.AddDecayed(0.1), "add_decayed_weights", {"weight_decay": 0.1}),
        (gs.ClipNorm(0.5, mean=True), "clip_by_block_rms", {"threshold": 0.5}),
        (gs.RescaleGlobalNorm(eps=1e-6), "normalize_by_update_norm", {}),
        (gs.RescaleGlobalNorm(3.0), "normalize_by_update_norm", {"scale_factor": 3.0, "eps": 0.0}),
    ],
    ids=str,
)
def test_a_transform_without_state_is_optaxs(
    transform: Transform, name: str, fields: dict[str, float]
) -> None:
    optax = pytest.importorskip("optax")
    theirs = getattr(optax, name)(**fields)
    values = [random(4, 3), random(5, seed=1), torch.zeros(2)]
    grads = [random(4, 3, seed=2), torch.zeros(5), random(2, seed=3)]
    arrays = [value.numpy() for value in values]
    updates, _ = theirs.update([grad.numpy() for grad in grads], theirs.init(arrays), arrays)
    contexts = [TransformContext(f"site{i}", 0, value) for i, value in enumerate(values)]
    results, _ = update_all(transform, grads, init_all(transform, grads), contexts)
    for result, expected in zip(results, updates, strict=True):
        torch.testing.assert_close(result, torch.tensor(np.array(expected)))
