"""A surgery without a `with` block: start, bind, several optimizers, steps by hand, and the end."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import gradsurg as gs
from gradsurg.transforms.base import Transform
from tests.nets import backward, num_hooks, sgd, small, trainee
from tests.sites.points import Sums


def at_step(transform: Transform, pattern: str = "*") -> gs.Surgery:
    return gs.Surgery(gs.Intervention(transform, gs.Parameters(pattern, stage="step")))


def step(model: nn.Module, optimizer: Any, x: float = 1.0) -> float:
    """Make one step, and return what was added to the weight."""
    before = model.w.item()
    model.zero_grad()
    model(x).backward()
    optimizer.step()
    return round(model.w.item() - before, 6)


def test_start_acts_until_close() -> None:
    model = Sums()
    optimizer = sgd(model, lr=1.0)
    surgery = at_step(gs.Scale(2.0))
    live = surgery.start(model, optimizer)
    assert step(model, optimizer) == -2.0
    live.close()
    live.close()
    assert step(model, optimizer) == -1.0
    assert num_hooks(model, optimizer) == 0
    with surgery.attach(model, optimizer):
        assert step(model, optimizer) == -2.0


def test_close_warns_of_what_never_acted_and_an_error_in_the_block_does_not() -> None:
    model = small()
    surgery = gs.Surgery(gs.Intervention(gs.Zero()))
    live = surgery.start(model)
    with pytest.warns(gs.SurgeryWarning, match="no gradient ever passed") as caught:
        live.close()
    assert caught[0].filename == __file__
    with pytest.raises(KeyError), surgery.attach(model):
        raise KeyError
    assert num_hooks(model) == 0


def test_the_optimizer_may_come_later_wrapped_and_be_replaced() -> None:
    model = Sums()
    surgery = at_step(gs.Momentum(0.5))
    live = surgery.start(model)
    optimizer = sgd(model, lr=1.0)
    assert step(model, optimizer) == -1.0  # not bound yet
    wrapper = SimpleNamespace(optimizer=optimizer, step=optimizer.step)  # as of Accelerate
    live.bind(wrapper)
    assert [step(model, wrapper) for _ in range(2)] == [-1.0, -1.5]
    later = sgd(model, lr=1.0)
    live.bind(later)
    assert num_hooks(nn.Module(), optimizer) == 0
    assert step(model, later) == -1.75  # the state is kept
    assert live.step == 3
    live.close()


def test_of_two_optimizers_each_has_its_parameters_and_one_counts() -> None:
    model = small()
    first = SGD(model.first.parameters(), lr=1.0)
    last = SGD(model.last.parameters(), lr=1.0)
    live = at_step(gs.Zero()).start(model, [first, last], clock=last)
    before = [param.clone() for param in model.parameters()]
    for optimizer, num_steps in ((first, 0), (last, 1)):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        assert live.step == num_steps
    assert all(map(torch.equal, before, model.parameters()))
    live.close()


def test_before_step_acts_before_the_clipping_of_a_framework_and_only_once() -> None:
    model = Sums()
    optimizer = sgd(model, lr=1.0)
    with at_step(gs.Scale(10.0)).attach(model, optimizer) as live:
        model(1.0).backward()
        live.before_step()
        nn.utils.clip_grad_value_(model.parameters(), 3.0)
        optimizer.step()
        assert model.w.item() == -3.0
        assert step(model, optimizer) == -10.0  # not called: the optimizer's own hook acts


@pytest.mark.parametrize("enabled", [False, True])
def test_before_step_acts_on_gradients_that_are_not_scaled_anymore(enabled: bool) -> None:
    model = Sums()
    optimizer = sgd(model, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
    with at_step(gs.Clip(0.5)).attach(model, optimizer, scaler=scaler) as live:
        scaler.scale(model(1.0)).backward()
        if enabled:
            with pytest.raises(RuntimeError, match=r"call scaler\.unscale_\(optimizer\)"):
                live.before_step()
            scaler.unscale_(optimizer)
        live.before_step()
        scaler.step(optimizer)
    assert model.w.item() == -0.5


class Doubled(SGD):
    """Calls the step that it extends, like DeMo and MuonClip of pytorch_optimizer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_inside_a_step_acts_and_counts_once() -> None:
    model = Sums()
    SGD(model.parameters(), lr=1.0)  # so that the class it extends has hooks of its own
    optimizer = Doubled(model.parameters(), lr=1.0)
    edit = gs.Intervention(gs.Scale(2.0), gs.Weights())
    surgery = gs.Surgery(*at_step(gs.Scale(3.0)).interventions, edit)
    with surgery.attach(model, optimizer) as live:
        assert step(model, optimizer) == -6.0
        assert live.step == 1
        assert step(model, optimizer) == -12.0
        assert live.step == 2


def test_scale_multiplies_the_update_and_losses_keep_their_values() -> None:
    updates = []
    for parts, scale in ((1, 1.0), (4, 0.25)):
        torch.manual_seed(0)
        model = small()
        surgery = gs.Surgery(gs.Intervention(gs.DWA(), at=gs.SharedParameters()))
        x = torch.randn(8, 6)
        with surgery.attach(model, sgd(model)) as live:
            for batch in x.chunk(parts):
                out = model(batch)
                losses = {"a": out.square().mean(), "b": (out - 1).abs().mean()}
                live.backward(losses, scale=scale)
            live.tick()
        updates.append([param.grad for param in model.parameters()])
    for one, four in zip(*updates, strict=True):
        torch.testing.assert_close(one, four)


@pytest.mark.slow
def test_a_fresh_process_imports_what_it_needs_and_open_surgeries_warn_at_its_end() -> None:
    """In one process, as its imports take seconds."""
    code = """
import sys, gradsurg as gs, torch
model = torch.nn.Linear(2, 1)
surgery, other = gs.Surgery(gs.Intervention(gs.Zero())), gs.Surgery(gs.Intervention(gs.Clip()))
state = torch.get_rng_state()
with gs.Surgery(gs.Intervention(gs.Clip(0.1))).attach(model) as live:
    print("numba" in sys.modules)
    model(torch.ones(1, 2)).sum().backward()
    live.tick()
print("numba" in sys.modules, torch.equal(state, torch.get_rng_state()))
print([name for name in sys.modules if name.startswith("gradsurg.multitask")])
live = surgery.start(model)
never_entered = other.attach(model)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    has_numba = str(find_spec("numba") is not None)
    assert ended.stdout.split("\n") == ["False", f"{has_numba} True", "[]", ""]
    assert "zero: attached, but no gradient ever passed at: weight, bias" in ended.stderr
    assert "surgery.attach in <string>, line 13, was used without `with`" in ended.stderr
    assert "live = surgery.start(...)" in ended.stderr


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("begin", ["start", "attach"])
def test_what_nobody_holds_is_detached_and_an_attach_without_with_says_so(begin: str) -> None:
    model, optimizer = trainee()
    live = getattr(gs.Surgery(gs.Intervention(gs.Scale(1.0))), begin)(model, optimizer)
    backward(model)
    text = r"test_start.py, line \d+, was used without"
    with pytest.warns(gs.SurgeryWarning, match=text) if begin == "attach" else nullcontext():
        del live
    assert num_hooks(model, optimizer) == 0


@pytest.mark.usefixtures("no_collector")
def test_without_its_handle_a_surgery_stays_attached_while_something_refers_to_it() -> None:
    model = Sums()
    surgery = gs.Surgery(gs.Intervention(gs.Scale(2.0)))
    surgery.start(model)
    assert (num_hooks(model), surgery.is_attached) == (1, True)
    del surgery
    assert num_hooks(model) == 0


TWICE: dict[str, gs.Intervention] = {
    "tensor": gs.Intervention(gs.Scale(2.0)),
    "group": gs.Intervention(gs.ClipGlobalNorm(1e-3), gs.Parameters(stage="backward_end")),
    # The later surgery is the second one at the output, and the first one at the input.
    "both ends": gs.Intervention(gs.Scale(2.0), gs.Inputs("last") | gs.Outputs("last")),
}


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("has_acted", [False, True])
def test_equal_surgeries_on_one_model_are_told_once_when_both_change_a_gradient(
    has_acted: bool, name: str
) -> None:
    model = small()
    first = gs.Surgery(TWICE[name]).start(model)
    if has_acted:
        backward(model)
    second = gs.Surgery(TWICE[name]).start(model)
    text = ": two surgeries with this intervention are attached, and both changed the gradient at '"
    with pytest.warns(gs.SurgeryWarning, match=text) as caught:
        for _ in range(2):
            backward(model)
    assert len(caught) == 1
    second.close()
    first.close()


@pytest.mark.parametrize("what", ["closed", "shadow", "in shadow", "model", "transform", "trigger"])
def test_two_surgeries_that_do_not_change_a_gradient_twice_are_not_told(what: str) -> None:
    model, item = small(), gs.Intervention(gs.Scale(2.0), when=gs.Steps(stop=1))
    other = small() if what == "model" else model
    first = gs.Surgery(item).start(other, shadow=what == "shadow")
    backward(other)
    if what == "closed":
        first.abort()
    if what == "transform":
        first.set("scale", factor=3.0)
    if what == "trigger":
        first.tick()
    second = gs.Surgery(item).start(model, shadow=what == "in shadow")
    backward(model)  # a warning would be an error
    second.abort()  # not close(), which warns of a clock that stands still
    first.abort()


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping", "no_collector")
@pytest.mark.parametrize("at", [gs.Parameters(), gs.Outputs("act")], ids=["params", "outputs"])
def test_pytorch_refuses_to_swap_parameters_in_the_block_and_swaps_them_after_it(at: Any) -> None:
    model, saved = small(), small(seed=1).state_dict()
    with gs.Surgery(gs.Intervention(gs.Scale(2.0), at)).attach(model):
        backward(model)
        with pytest.raises(RuntimeError, match="Couldn't swap"):
            model.double()
        with pytest.raises(RuntimeError, match="While swapping the parameter"):
            model.load_state_dict(saved)
        assert model.first.weight.dtype is torch.float32
    model.load_state_dict(saved)
    assert torch.equal(model.first.weight, saved["first.weight"])
    assert model.double().first.weight.dtype is torch.float64


def test_numbers_are_those_since_the_last_call_under_names_for_any_logger() -> None:
    model = small()
    surgery = gs.Surgery(
        gs.Intervention(gs.Scale(2.0), gs.Parameters("first.bias")),
        gs.Intervention(gs.PCGrad(), gs.SharedParameters()),
    )
    with surgery.attach(model, sgd(model)) as live:
        out = model(torch.ones(2, 6))
        live.backward({"a": out.sum(), "b": out.square().sum()})
        effects = live.effects.numbers("surgery")
        row = live.effects.rows()[0]
        assert effects["surgery/scale/first.bias/norm_after"] == row["norm_after"]
        assert effects["surgery/scale/first.bias/calls"] == 2
        conflicts = live.conflicts.numbers()
        assert all(type(value) is float for value in (effects | conflicts).values())
        assert -1 <= conflicts["conflict/pcgrad/shared/cosine/a~b"] <= 1
        assert live.effects.numbers() == live.conflicts.numbers() == {}


@pytest.mark.parametrize(
    "site",
    [kind("0") for kind in (gs.Outputs, gs.Inputs, gs.Activations, gs.SavedTensors)]
    + [gs.Nodes("Relu"), gs.ModuleGradients("1"), gs.Weights(stage="forward"), gs.Parameters()],
    ids=lambda site: type(site).__name__,
)
def test_a_copy_and_a_pickle_made_inside_the_block_are_plain_models(site: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    nn.init.ones_(model[0].weight)
    x = torch.ones(2, 3, requires_grad=True)
    with gs.Surgery(gs.Intervention(gs.Scale(0.0), at=site)).attach(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        copies += [pickle.loads(pickle.dumps(copies[0]))]
        model(x).sum().backward()
    for twin in copies:
        twin(x).sum().backward()
        assert torch.equal(twin[0].weight.grad, torch.full((3, 3), 2.0))
