"""Sources of tensor triggers: which tensor of which call is observed, and for how long."""

import gc
from dataclasses import dataclass
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from gradsurg.triggers.base import TensorTrigger, TriggerContext
from tests.nets import attached, backward, num_hooks, sgd, small


class Keeps(TensorTrigger):
    """A trigger that always fires and records the tensors that it observed and its decisions."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.looks: list[Tensor] = []
        self.judged: list[Tensor] = []

    def observe(self, tensor: Tensor) -> object:
        self.looks.append(tensor.clone())
        return self.looks[-1]

    def decide(self, observation: object, context: TriggerContext) -> bool | Tensor:
        assert isinstance(observation, Tensor)
        self.judged.append(observation)
        return True


class Two(nn.Module):
    """Two modules in sequence; the second can be skipped or called twice."""

    def __init__(self, seconds: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 3)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(self.seconds):
            h = self.second(h)
        return h


def _same(tensors: list[Tensor], expected: list[Tensor]) -> bool:
    return len(tensors) == len(expected) and all(map(torch.equal, tensors, expected))


ONE = gs.Parameters("first.weight")
EARLIER = pytest.warns(gs.SurgeryWarning, match="call backward after each forward pass")


def test_each_source_observes_the_tensor_of_its_name() -> None:
    model, x = Two(), torch.ones(4, 2)
    h = model.first(x).detach()
    y = model.second(h).detach()
    sources = {
        "batch": x,
        "input:root": x,
        "output:root": y,
        "input:first": x,
        "output:first": h,
        "input:second": h,
        "output:second": y,
        "value": model.first.weight.detach(),
    }
    for source, expected in sources.items():
        when = Keeps(source)
        with attached(model, gs.Scale(1.0), ONE, when=when):
            model(x).sum().backward()
        assert _same(when.judged, [expected]), source
    assert num_hooks(model) == 0


def test_sources_grad_and_value_are_the_gradient_and_its_tensor() -> None:
    model, x = Two(), torch.ones(4, 2)
    grad, value = Keeps("grad"), Keeps("value")
    with attached(model, gs.Scale(1.0), gs.Outputs("second"), when=grad & value):
        y = model(x)
        (y * 3).sum().backward()
    assert _same(grad.judged, [torch.full((4, 3), 3.0)])
    assert _same(value.judged, [y.detach()])


def test_the_last_of_several_forward_passes_counts() -> None:
    model, when = Two(), Keeps("batch")
    batches = [torch.full((4, 2), float(number)) for number in range(3)]
    with EARLIER, attached(model, gs.Scale(1.0), ONE, when=when):
        loss = model(batches[0]).sum()
        model(batches[1])
        model(batches[2])
        loss.backward()
        model(batches[0]).sum().backward()
    assert _same(when.judged, [batches[2], batches[0]])


WIDE = gs.Shape(above=5)


@pytest.mark.parametrize("when", [WIDE, gs.Threshold(above=1.0, source="output:first")])
@pytest.mark.parametrize("at", [gs.Parameters(), gs.Outputs("second")], ids=repr)
def test_two_forward_passes_before_one_backward_warn_once(at: Any, when: gs.Trigger) -> None:
    model = Two()
    with (
        pytest.warns(gs.SurgeryWarning, match="and (Shape|Threshold).* read only") as caught,
        attached(model, gs.Identity(), at, when=when | ~when),
    ):
        for _ in range(3):
            (model(torch.ones(4, 2)).sum() + model(torch.ones(8, 2)).sum()).backward()
    assert len([warning for warning in caught if "newest" in str(warning.message)]) == 1


def test_forward_passes_with_one_or_no_backward_each_do_not_warn() -> None:
    model = Two()
    with attached(model, gs.Identity(), when=~WIDE) as live:
        model(torch.ones(8, 2))  # as in an evaluation that forgets no_grad
        for _ in range(2):
            loss = model(torch.ones(4, 2)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            checked = model(torch.ones(4, 2))
            checked.sum().backward()
        model(torch.ones(8, 2))
    assert all(entry.fired == 6 for entry in live.ledger)


def test_the_last_of_several_calls_of_a_module_counts() -> None:
    model, when = Two(seconds=2), Keeps("output:second")
    with attached(model, gs.Scale(1.0), ONE, when=when):
        y = model(torch.ones(4, 2))
        y.sum().backward()
    assert len(when.looks) == 2
    assert _same(when.judged, [y.detach()])


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_recomputation_of_a_checkpoint_is_not_observed(reentrant: bool) -> None:
    class Checkpointed(Two):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.second, self.first(x), use_reentrant=reentrant)
            assert isinstance(h, Tensor)
            return h

    model, when = Checkpointed(), Keeps("input:second")
    with attached(model, gs.Scale(1.0), when=when):
        model(torch.ones(4, 2)).sum().backward()
    assert len(when.looks) == 1
    assert len(when.judged) == 4


def test_a_forward_pass_without_a_graph_counts_too() -> None:
    model, when = Two(), Keeps("batch")
    with EARLIER, attached(model, gs.Scale(1.0), ONE, when=when):
        loss = model(torch.ones(4, 2)).sum()
        with torch.no_grad():
            model(torch.zeros(1, 2))
        loss.backward()
    assert _same(when.judged, [torch.zeros(1, 2)])


@dataclass
class Pair:
    number: int
    tensor: Tensor


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (([3, {"x": torch.arange(3)}],), {}),
        ((), {"tokens": torch.arange(3)}),
        (("text", (1, [torch.arange(3), torch.zeros(2)])), {}),
        ((Pair(1, torch.arange(3)),), {}),
        ((), {"a": None, "b": {"c": torch.arange(3)}}),
    ],
)
def test_the_batch_may_be_nested_and_of_integers(args: Any, kwargs: Any) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return self.w * 2

    model, when = Takes(), Keeps("batch")
    with attached(model, gs.Scale(1.0), when=when):
        model(*args, **kwargs).backward()
    assert _same(when.judged, [torch.arange(3)])


# Missing sources


def test_an_unknown_module_is_refused_with_the_nearest_name() -> None:
    model = small()
    with (
        pytest.raises(LookupError) as caught,
        attached(model, gs.Zero(), when=gs.Threshold(1.0, source="input:lsat")),
    ):
        pass
    there = "did you mean 'last'? There is no module 'lsat'. There are: first, act, last, root."
    assert str(caught.value).endswith(there)
    assert num_hooks(model) == 0


def test_a_shared_module_is_observed_under_each_of_its_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    for name in ("0", "2"):
        when = Keeps(f"input:{name}")
        with attached(model, gs.Scale(1.0), gs.Parameters("0.bias"), when=when):
            model(torch.ones(1, 2)).sum().backward()
        assert len(when.looks) == 2


def test_an_observation_of_an_earlier_forward_pass_is_not_used() -> None:
    model, when = Two(), Keeps("output:second")
    with (
        pytest.raises(RuntimeError, match="its source 'output:second' was not observed"),
        attached(model, gs.Zero(), ONE, when=when),
    ):
        model(torch.ones(1, 2)).sum().backward()
        assert len(when.judged) == 1
        model.seconds = 0
        model(torch.ones(1, 2)).sum().backward()


def test_a_batch_without_a_tensor_is_an_error() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, number: float) -> Tensor:
            return self.w * number

    model = Constant()
    with (
        pytest.raises(RuntimeError, match="It must be called with a tensor"),
        attached(model, gs.Zero(), when=gs.Shape(above=1)),
    ):
        model(2.0).backward()


def test_calling_only_a_part_of_the_model_is_an_error() -> None:
    model = Two()
    with (
        pytest.raises(RuntimeError, match="its source 'batch' was not observed"),
        attached(model, gs.Zero(), ONE, when=gs.Shape(above=1)),
    ):
        model.first(torch.ones(2, 2)).sum().backward()


@pytest.mark.parametrize("when", [gs.Threshold(1.0, source="value"), gs.AllSameSign("value")])
def test_source_value_is_refused_at_sites_without_a_value(when: gs.Trigger) -> None:
    with pytest.raises(ValueError, match="use 'grad' or 'batch': .* Nodes has none"):
        gs.Intervention(gs.Zero(), gs.Nodes("Relu"), when)


@pytest.mark.parametrize("source", ["grad", "value"])
def test_sources_grad_and_value_are_refused_for_a_group(source) -> None:
    with pytest.raises(ValueError, match="is of one gradient, and ClipGlobalNorm acts on all"):
        gs.Intervention(gs.ClipGlobalNorm(1.0), when=~gs.Threshold(1.0, source=source))


def test_source_batch_is_allowed_for_a_group() -> None:
    model = small()
    optimizer = sgd(model)
    fired = []
    when = gs.Threshold(0.5, source="batch")
    with attached(model, gs.ClipGlobalNorm(1e-3, eps=0.0), None, optimizer, when):
        for scale in (0.1, 1.0):
            optimizer.zero_grad()
            model(torch.full((2, 6), scale)).sum().backward()
            optimizer.step()
            norm = torch.cat([param.grad.flatten() for param in model.parameters()]).norm()  # pyright: ignore[reportOptionalMemberAccess]
            fired.append(norm.item() == pytest.approx(1e-3))
    assert fired == [False, True]


# Kept observations


def test_observations_are_dropped_on_detach() -> None:
    model = small()
    surgery = gs.Surgery(
        gs.Intervention(gs.Scale(1.0), when=gs.Threshold(0.0, source="output:act") | gs.Shape(0))
    )
    with surgery.attach(model) as live:
        backward(model)
        assert len(live.clock.observations) == 2
    assert live.clock.observations == {}


@pytest.mark.usefixtures("frozen_heap")
def test_observations_keep_neither_graph_nor_activation_alive() -> None:
    model = small()
    held: list[ref[Tensor]] = []

    def remember(module: Any, args: Any, output: Tensor) -> None:
        held.append(ref(output))

    model.act.register_forward_hook(remember)
    when = gs.Threshold(0.0, source="output:act")
    with attached(model, gs.Scale(1.0), when=when) as live:
        y = model(torch.ones(2, 6))
        (observation,) = live.clock.observations.values()
        assert isinstance(observation, Tensor)
        assert (observation.grad_fn, observation.requires_grad) == (None, False)
        del y
        gc.collect()
        assert held[0]() is None
        backward(model)
