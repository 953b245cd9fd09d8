"""The private functions of `torch.func` do as `vmap` and `functional_call` do."""

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from gradsurg.torch_internals.batching import Slots, batch_linear_layers, batched


def a_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight  # tied: one tensor in two places
    return model


def test_a_batched_call_is_vmap_of_a_functional_call() -> None:
    torch.manual_seed(0)
    model, inputs = a_model(), torch.randn(4, 5, 3)
    params = {name: torch.randn(4, *param.shape) for name, param in model.named_parameters()}
    slots = Slots(model)

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        slots.fill(zip(params, tensors[1:], strict=True))
        return [model(tensors[0])]

    before = {name: param.clone() for name, param in model.named_parameters()}
    (found,) = batched(call, [inputs, *params.values()], 4)
    slots.restore()
    expected = vmap(lambda own, x: functional_call(model, own, (x,)))(params, inputs)
    assert torch.equal(found, expected)
    assert model[2].weight is model[0].weight
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])


def test_a_random_number_in_a_batched_call_is_refused_and_vmap_ends() -> None:
    with pytest.raises(RuntimeError, match="random"):
        batched(lambda tensors: [torch.rand_like(tensors[0])], [torch.ones(2, 3)], 2)
    (found,) = batched(lambda tensors: [tensors[0] + 1], [torch.zeros(2)], 2)
    assert torch.equal(found, torch.ones(2))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3)])
@pytest.mark.parametrize("shared", [False, True])
def test_a_batched_linear_layer_is_that_of_each_model(shape, bias, shared) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2, bias=bias))
    plain = deepcopy(model)
    batch_linear_layers(model)
    inputs = torch.randn(shape) if shared else torch.randn(6, *shape)
    params = {name: torch.randn(6, *param.shape) for name, param in model.named_parameters()}
    leaves = [param.requires_grad_() for param in params.values()]
    slots = Slots(model)

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        slots.fill(zip(params, tensors[: len(params)], strict=True))
        rest = tensors[len(params) :]
        return [model(rest[0] if rest else inputs)]

    (found,) = batched(call, leaves if shared else [*leaves, inputs], 6)
    slots.restore()
    grads = torch.autograd.grad(found.square().sum(), leaves)
    for row in range(6):
        own = {name: param[row].detach().requires_grad_() for name, param in params.items()}
        expected = functional_call(plain, own, (inputs if shared else inputs[row],))
        torch.testing.assert_close(found[row], expected)
        alone = torch.autograd.grad(expected.square().sum(), list(own.values()))
        for one, other in zip(grads, alone, strict=True):
            torch.testing.assert_close(one[row], other)
