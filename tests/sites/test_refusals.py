"""Selections that the first forward shows to be impossible are refused with the reason."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from tests.nets import attached, num_hooks, small
from tests.sites.points import Double, InPlace, Made, passed, recomputed


def _appended(self: Made, x: Tensor) -> Tensor:
    tensors = [x * 1]
    self.append(tensors)
    return tensors[-1]


def _beside_a_teacher(self: Made, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.teacher(x)
    return (self.own(x) - y).sum()


def _written(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(Double(), *modules)


APPEND = Made(_appended, append=Made(lambda self, tensors: tensors.append(tensors[-1] * 2)))
TEACHER = Made(_beside_a_teacher, own=nn.Linear(6, 3), teacher=nn.Linear(6, 3))
CHECKPOINTED = Made(lambda self, x: recomputed(self.inner, x, False), inner=nn.Tanh())
PRODUCT = Made(lambda self, x: x * torch.ones(6))
RETURNED = "the module returned its input, which was then written"
NODES = "no node is selected by 'Rleu'. "


@pytest.mark.parametrize(
    ("model", "at", "error", "message"),
    [
        (_written(InPlace()), gs.Inputs("1"), RuntimeError, "'1#0.input': the module wrote to its"),
        (
            _written(nn.Flatten(0), InPlace()),
            gs.Inputs("2", path="total"),
            RuntimeError,
            "'2#0.input': the module wrote to its input: a hook",
        ),
        (_written(nn.Identity(), InPlace()), gs.Inputs("1"), RuntimeError, RETURNED),
        (_written(nn.Flatten(0), InPlace()), gs.Inputs("1"), RuntimeError, RETURNED),
        (_written(nn.Identity(), InPlace()), gs.Outputs("1"), RuntimeError, f"'1#0': {RETURNED}"),
        (APPEND, gs.Inputs("append"), RuntimeError, "wrote to a container that it took"),
        (
            PRODUCT,
            gs.Nodes("Mul", side="leave", edge=1),
            LookupError,
            "no edge 1 that takes a gradient. There are: 0",
        ),
        (
            small(),
            gs.Nodes("Rleu"),
            LookupError,
            f"{NODES}Did you mean 'Relu'? There are: activation, matmul, ",
        ),
        (
            small(),
            gs.Nodes("Tanh", module="act"),
            LookupError,
            "There are: activation, rectifier, Relu.",
        ),
        (
            small(),
            gs.Nodes("Relu", module="first"),
            LookupError,
            "no node in 'first' is selected by 'Relu'",
        ),
        (small(), gs.Nodes("Relu", call=3), LookupError, "call=3"),
        (small(), gs.Nodes("Relu", occurrence=3), LookupError, "occurrence=3"),
        (TEACHER, gs.Nodes("Rleu"), LookupError, f"{NODES}There are: "),
        (
            CHECKPOINTED,
            gs.SavedTensors(node="Tanh"),
            RuntimeError,
            "'inner#0/TanhBackward[0].result': there are hooks",
        ),
    ],
)
def test_a_selection_is_refused_in_the_first_forward(
    model: nn.Module, at: Any, error: type[Exception], message: str
) -> None:
    x = torch.ones(2, 6, requires_grad=True)
    with pytest.raises(error, match=re.escape(message)), attached(model, gs.Zero(), at):
        model(x)
    assert num_hooks(model) == 0


def test_the_total_of_a_tensor_in_a_container_that_a_module_writes_to_is_transformed() -> None:
    at = gs.Inputs("append", path="total")
    assert passed(APPEND, gs.Scale(10.0), at)[0] == [20.0]
