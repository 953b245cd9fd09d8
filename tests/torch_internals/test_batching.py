"""The private functions of `torch.func` do as `vmap` and `functional_call` do."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from gradsurg.torch_internals.batching import Slots, batched


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
