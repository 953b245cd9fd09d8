"""LRP at the layers of a network, compared with the formulas of its rules written out in loops."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gradsurg as gs
from gradsurg.transforms.layer_calls import LayerCall

EPSILON, GAMMA = 1e-6, 0.25
LAYERS = gs.Inputs(types="re:Linear|Conv2d")


def surgery(rule: str, at: gs.Inputs = LAYERS) -> gs.Surgery:
    return gs.Surgery(gs.Intervention(gs.LRP(rule), at=at))


def stable(number: float) -> float:
    return number + (EPSILON if number >= 0 else -EPSILON)


def terms(rule: str, x: list[float], weight: list[float], bias: float) -> tuple[list[float], float]:
    """Return the terms that share the relevance of one output of a linear layer, and their sum."""
    z = sum(a * w for a, w in zip(x, weight, strict=True)) + bias
    pairs = [*zip([*x, 1.0], [*weight, bias], strict=True)]
    match rule:
        case "epsilon":
            shared = [a * w for a, w in pairs]
        case "gamma":  # contributions of the sign of z count more
            sign = 1 if z > 0 else -1
            shared = [a * w * (1 + GAMMA * (a * w * sign > 0)) for a, w in pairs]
        case _:
            shared = [max(0.0, a * w) for a, w in pairs]
    return shared[:-1], sum(shared)


def by_hand(rule: str, x: Tensor, layer: nn.Linear, relevance: Tensor) -> Tensor:
    """Return the relevance of the inputs (n, in), given the relevance of the outputs (n, out)."""
    result = torch.zeros_like(x)
    for example, numbers in enumerate(x.tolist()):
        for unit, (weight, bias) in enumerate(
            zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
        ):
            shared, total = terms(rule, numbers, weight, bias)
            share = relevance[example, unit].item() / stable(total)
            result[example] += torch.tensor(shared, dtype=x.dtype) * share
    return result


def as_linear(conv: nn.Conv2d, shape: tuple[int, ...]) -> nn.Linear:
    """Return the linear layer that a convolution is on flattened images of this shape."""
    size = torch.Size(shape).numel()
    with torch.no_grad():
        zero = conv(torch.zeros(1, *shape, dtype=torch.float64)).flatten()
        units = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
        linear = nn.Linear(size, len(zero)).double()
        linear.weight.copy_((conv(units).flatten(1) - zero).mT)
        linear.bias.copy_(zero)
    return linear


@pytest.mark.parametrize("rule", ["epsilon", "gamma", "zplus"])
@pytest.mark.parametrize("convolves", [False, True], ids=["mlp", "convnet"])
def test_the_relevance_of_the_input_is_that_of_the_rules_in_loops(
    rule: str, convolves: bool
) -> None:
    torch.manual_seed(0)
    shape = (2, 4, 4) if convolves else (5,)
    first = nn.Conv2d(2, 3, 3, padding=1) if convolves else nn.Linear(5, 6)
    flat = [nn.Flatten()] if convolves else []
    last = nn.Linear(48 if convolves else 6, 3)
    model = nn.Sequential(first, nn.ReLU(inplace=True), *flat, last).double()
    x = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    with surgery(rule).attach(model):
        score = model(x)[:, 1]
        score.sum().backward()
    assert x.grad is not None

    linear = as_linear(first, shape) if isinstance(first, nn.Conv2d) else first
    hidden = linear(x.flatten(1)).relu().detach()
    relevance = torch.zeros(2, 3, dtype=torch.float64)
    relevance[:, 1] = score.detach()
    expected = by_hand(rule, hidden, last, relevance)
    expected = by_hand(rule, x.detach().flatten(1), linear, expected)
    result = (x.grad * x.detach()).flatten(1)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)


def test_an_elementwise_module_passes_its_relevance_on() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    model = nn.Sequential(nn.SiLU())
    with surgery("identity", gs.Inputs(types="SiLU")).attach(model):
        output = model(x)
        output.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x.detach(), output.detach(), rtol=1e-4, atol=1e-5)


def test_each_call_of_a_shared_module_has_its_own_relevance() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with surgery("zplus").attach(model):
        outputs = model(x)
        outputs.sum().backward()
    assert x.grad is not None
    middle = layer(x).relu().detach()
    expected = by_hand("zplus", middle, layer, outputs.detach())
    expected = by_hand("zplus", x.detach(), layer, expected)
    torch.testing.assert_close(x.grad * x.detach(), expected, rtol=1e-9, atol=1e-12)


def test_the_hooks_of_others_do_not_see_the_forward_that_runs_again() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    seen: list[object] = []
    model[0].register_forward_hook(lambda *call: seen.append(call))
    with surgery("gamma").attach(model):
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert len(seen) == 1


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input * 2)


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(_doubled)
    return layer


def _doubled(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 2


def replaced(layer: nn.Linear) -> nn.Module:
    layer.forward = lambda x: layer.weight.sum() * x  # pyright: ignore[reportAttributeAccessIssue]
    return layer


LAYER_CALLS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    # a layer, the shape of its input, and how often its forward runs again
    "linear": (nn.Linear(4, 3), (2, 4), 0),
    "linear of sequences": (nn.Linear(4, 3, bias=False), (2, 5, 4), 0),
    "linear of one vector": (nn.Linear(4, 3), (4,), 0),
    "conv1d": (nn.Conv1d(2, 3, 3, stride=2), (2, 2, 8), 0),
    "conv2d": (nn.Conv2d(4, 6, 3, (2, 1), (1, 0), 2, groups=2), (2, 4, 7, 8), 0),
    "conv3d": (nn.Conv3d(2, 3, 2), (2, 2, 3, 4, 4), 0),
    "conv2d of one image": (nn.Conv2d(2, 3, 3), (2, 5, 5), 1),
    "named padding": (nn.Conv2d(2, 3, 3, padding="same"), (2, 2, 5, 5), 1),
    "circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 5, 5), 1),
    "transposed": (nn.ConvTranspose2d(2, 3, 3), (2, 2, 4, 4), 1),
    "parametrized": (parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4), 1),
    "subclass": (Doubled(4, 3), (2, 4), 1),
    "output changed by a hook": (hooked(nn.Linear(4, 3)), (2, 4), 1),
    "another forward": (replaced(nn.Linear(4, 4)), (2, 4), 1),
}


@pytest.mark.parametrize("name", LAYER_CALLS)
def test_epsilon_pulls_the_share_of_each_output_back_through_the_layer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, shape, count = LAYER_CALLS[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    again: list[LayerCall] = []
    forward = LayerCall.__call__

    def counted(call: LayerCall, value: Tensor) -> Tensor:
        again.append(call)
        return forward(call, value)

    monkeypatch.setattr(LayerCall, "__call__", counted)
    model = nn.Sequential(layer).double()
    with surgery("epsilon", gs.Inputs("0")).attach(model):
        score = model(x)
        weights = torch.randn_like(score)
        (score * weights).sum().backward()
    z = layer.forward(x)
    share = weights * score.detach() / (z + torch.where(z < 0, -EPSILON, EPSILON))
    (expected,) = torch.autograd.grad(z, x, share.detach())
    torch.testing.assert_close(x.grad, expected, rtol=1e-9, atol=1e-11)
    assert len(again) == count


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, x * 2)


def test_a_module_of_two_tensors_and_a_site_without_a_module_are_refused() -> None:
    model = Two()
    x = torch.randn(2, 3, requires_grad=True)
    attached = surgery("epsilon", gs.Inputs("bilinear")).attach(model)
    with pytest.raises(ValueError, match="one tensor.*'bilinear#0"), attached:
        model(x).sum().backward()
    for site in (gs.Outputs(), gs.Inputs(path="total"), gs.Nodes("Mm")):
        with pytest.raises(ValueError, match="the module whose input has the gradient"):
            gs.Intervention(gs.LRP(), at=site)
