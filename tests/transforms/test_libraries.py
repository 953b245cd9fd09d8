"""Transforms compared with the libraries that have them; `pip install -e '.[oracles]'`."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from gradsurg.transforms.adaptive_clip import AdaptiveClip
from gradsurg.transforms.base import Transform, TransformContext, init_all, update_all
from gradsurg.transforms.surrogate_gradient import SurrogateGradient


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
        results.append(result)
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
    result = act(SurrogateGradient(window, slope), grad, value)
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
    results = steps(AdaptiveClip(rule, 2.0, decay=0.9, warmup=5, max_norm=max_norm), sequence)
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
    transform = AdaptiveClip("ratio", 1.05, decay=0.9, warmup=4, max_norm=2.0, of="each")
    for grads, result in zip(sequence, steps(transform, sequence), strict=True):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        theirs.step()
        expected = [theirs.state[param]["exp_avg"] for param in params]
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-7)
