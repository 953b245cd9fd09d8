"""What sort of tensor was saved: what stands for a weight is told from what flows."""

import gc
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import weight_norm as old_weight_norm

import gradsurg as gs
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty
from tests.nets import attached, num_hooks

IN, MIDDLE, OUT, BATCH = 4, 3, 2, 5
WEIGHT = {(OUT, MIDDLE), (MIDDLE, OUT)}  # a linear layer saves its weight transposed
FLOWS = [(BATCH, IN), (BATCH, MIDDLE), (BATCH, MIDDLE)]

Call = Callable[[nn.Module, Tensor], Tensor]


class Shapes(Stateless):
    """Notes what passes, and changes nothing."""

    seen: ClassVar[list[tuple[int, ...]]] = []

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"deterministic", "linear"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        self.seen.append(tuple(grad.shape))
        return grad


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, MIDDLE), nn.Tanh(), nn.Linear(MIDDLE, OUT))


def _plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def _autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float()


def _leaves(model: nn.Module, x: Tensor) -> Tensor:
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    return functional_call(model, given, (x,))


def _fast_weights(model: nn.Module, x: Tensor) -> Tensor:
    return functional_call(model, {name: p * 1.5 for name, p in model.named_parameters()}, (x,))


def _frozen_leaves(model: nn.Module, x: Tensor) -> Tensor:
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    return functional_call(model, given, (x,))


def _in_autocast(call: Call) -> Call:
    def called(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(model, x).float()

    called.__name__ = f"{call.__name__}_in_autocast"
    return called


class Partly(nn.Sequential):
    """Calls its last layer with weights that it has just computed, as a hyper-network does."""

    def forward(self, input: Tensor) -> Tensor:
        first, act, last = self
        given = {name: p * 1.5 for name, p in last.named_parameters()}
        return functional_call(last, given, (act(first(input)),))


def _nothing(last: nn.Module) -> object:
    return None


def _frozen(last: nn.Module) -> object:
    return last.requires_grad_(False)


def _frozen_weight_norm(last: nn.Module) -> object:
    return parametrizations.weight_norm(last).requires_grad_(False)


def _old_weight_norm(last: nn.Module) -> object:
    return old_weight_norm(last)


def _pruned(last: nn.Module) -> object:
    return prune.l1_unstructured(last, "weight", amount=2)


CASES = [
    (_frozen, _autocast),
    (_nothing, _leaves),
    (_nothing, _fast_weights),
    (_nothing, _frozen_leaves),
    (_nothing, _in_autocast(_leaves)),
    (_nothing, _in_autocast(_fast_weights)),
    (_nothing, _in_autocast(_frozen_leaves)),
    (parametrizations.weight_norm, _plain),
    (parametrizations.weight_norm, _autocast),
    (parametrizations.spectral_norm, _plain),
    (parametrizations.orthogonal, _plain),
    (_frozen_weight_norm, _plain),
    (_frozen_weight_norm, _autocast),
    (_old_weight_norm, _plain),
    (_pruned, _plain),
    (_pruned, _autocast),
]


def _saved(model: nn.Module, at: gs.SavedTensors, call: Call) -> list[tuple[int, ...]]:
    Shapes.seen.clear()
    before = num_hooks(model)  # some of torch.nn.utils are hooks themselves
    with attached(model, Shapes(), at):
        call(model, torch.ones(BATCH, IN, requires_grad=True)).sum().backward()
    assert num_hooks(model) == before
    return list(Shapes.seen)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(("change", "call"), CASES)
@pytest.mark.parametrize("at", [{}, {"node": "*"}, {"pattern": "block"}])
def test_a_tensor_in_place_of_a_weight_is_not_an_activation(
    change: Callable[[nn.Module], object], call: Call, at: dict[str, Any]
) -> None:
    model = _model()
    change(model[2])
    origins = _saved(model, gs.SavedTensors(**at), call)
    # A frozen layer does not save its input; the norms that the old way saves are nobody's weights.
    norms = {(OUT, 1)} if change is _old_weight_norm else set()
    assert (BATCH, MIDDLE) in origins
    assert set(origins) - norms <= set(FLOWS)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(("change", "call"), CASES)
def test_a_tensor_in_place_of_a_weight_is_a_parameter(
    change: Callable[[nn.Module], object], call: Call
) -> None:
    model = _model()
    change(model[2])
    assert WEIGHT & set(_saved(model, gs.SavedTensors(of="parameters"), call))


def test_a_functional_weight_saved_without_a_cast_is_not_an_activation() -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 3))
    call: list[Call] = [_leaves, _fast_weights, _frozen_leaves]
    for run in call:
        Shapes.seen.clear()
        with attached(model, Shapes(), gs.SavedTensors()):
            run(model, torch.ones(2, 1, 5, requires_grad=True)).sum().backward()
        assert (1, 1, 3) not in Shapes.seen


@pytest.mark.parametrize("pattern", ["*", "block"])
def test_functional_weights_of_a_submodule_are_not_activations(pattern: str) -> None:
    model = Partly(*_model())
    assert sorted(_saved(model, gs.SavedTensors(pattern), _plain)) == sorted(FLOWS)


def test_tensors_saved_inside_a_parametrization_are_parameters() -> None:
    model = _model()
    parametrizations.weight_norm(model[2])
    inside = gs.SavedTensors("2.parametrizations.*", of="parameters")
    assert (OUT, 1) in _saved(model, inside, _plain)
    with pytest.warns(gs.SurgeryWarning, match="saves no such tensor of its own"):
        assert not _saved(model, gs.SavedTensors("2.parametrizations.*"), _plain)


def test_an_activation_with_the_shape_of_a_weight_and_another_dtype_stays_an_activation() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).requires_grad_(False)
    Shapes.seen.clear()
    with attached(model, Shapes(), gs.SavedTensors()), torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(3, 3, requires_grad=True)).sum().backward()
    assert Shapes.seen == [(3, 3)]


def test_functional_weights_are_not_kept_alive() -> None:
    model, x = _model(), torch.ones(BATCH, IN)
    with attached(model, Shapes(), gs.SavedTensors()):
        given = {name: p * 1.5 for name, p in model.named_parameters()}
        held = [ref(tensor) for tensor in given.values()]
        functional_call(model, given, (x,)).sum().backward()
        del given
        gc.collect()
        assert all(weight() is None for weight in held)


def test_tensors_after_a_parametrization_that_raises_are_not_parameters() -> None:
    class Fails(nn.Module):
        fails = True

        def forward(self, weight: Tensor) -> Tensor:
            if self.fails:
                raise KeyboardInterrupt
            return weight * 2

    model, fails = _model(), Fails()
    torch.nn.utils.parametrize.register_parametrization(model[2], "weight", fails, unsafe=True)
    Shapes.seen.clear()
    with attached(model, Shapes(), gs.SavedTensors()):
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(BATCH, IN))
        fails.fails = False
        model(torch.ones(BATCH, IN)).sum().backward()
    assert sorted(Shapes.seen) == sorted(FLOWS)
