"""Compiled models: hooks act the same as in eager, and a hook that comes too late warns."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites.places import Selector
from tests.nets import COMPILES_LAYERS, attached, backward, batch, gradients, num_hooks, sgd, small
from tests.sites.points import calls_of

pytestmark = [  # Dynamo's own, while it traces
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]

Compile = Callable[[nn.Module, str], nn.Module]
LATE = r"call torch.compiler.reset\(\) in the block"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _whole(model: nn.Module, backend: str) -> nn.Module:
    compiled = torch.compile(model, backend=backend)
    assert isinstance(compiled, nn.Module)
    return compiled


def _in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def _last(model: nn.Module, backend: str) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    model.last = _whole(model.last, backend)
    return model


def _gradients(model: nn.Module) -> list[Tensor]:
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return grads


def _as_in_eager(model: nn.Module, at: Selector) -> None:
    """A backward of the model, which is attached to, is that of one that is not compiled."""
    plain = small()
    with attached(plain, gs.Scale(10.0), at):
        backward(plain)
    for left, right in zip(_gradients(model), gradients(plain).values(), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiling", [_whole, _in_place, _last])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("at", [gs.Outputs("first"), gs.Uses("act"), gs.Nodes("Relu")])
def test_sites_act_in_a_compiled_model_as_in_eager_or_are_reported(
    backend: str, compiling: Compile, called: bool, at: Selector
) -> None:
    model = compiling(small(), backend)
    if called:
        backward(model)
        model.zero_grad()
    late = called and compiling is _whole
    # A model compiled in place runs in eager once there are hooks that it has not seen.
    unseen = called and compiling is _in_place
    one_node = isinstance(at, gs.Nodes) and backend == "aot_eager" and compiling is not _last
    if one_node and not late and not unseen:
        with (
            pytest.raises(LookupError, match="Compiled code runs as one node: use Outputs"),
            attached(model, gs.Scale(10.0), at),
        ):
            backward(model)
        return
    if late:
        with pytest.warns(gs.SurgeryWarning, match=LATE), attached(model, gs.Scale(10.0), at):
            backward(model)
        return
    # `Nodes` cannot know what is in a compiled part.
    hidden = isinstance(at, gs.Nodes) and compiling is _last and backend == "aot_eager"
    # After a first call the model runs without hooks on its modules, like a compiled part does.
    part = "root" if called else "last"
    told = pytest.warns(gs.SurgeryWarning, match=f"inside {part}: torch.compile has")
    with told if hidden else nullcontext(), attached(model, gs.Scale(10.0), at) as live:
        backward(model)
    assert set(calls_of(live).values()) == {1}
    _as_in_eager(model, at)
    assert num_hooks(model) == 0


@pytest.mark.parametrize("compiling", [_whole, _last])
def test_after_a_compiler_reset_the_hooks_act(compiling: Compile) -> None:
    model, at = compiling(small(), "eager"), gs.Outputs("last")
    backward(model)
    model.zero_grad()
    with attached(model, gs.Scale(10.0), at) as live:
        torch.compiler.reset()
        backward(model)
    assert calls_of(live) == {"last#0": 1}
    _as_in_eager(model, at)


def test_a_submodule_compiled_before_the_block_is_named() -> None:
    model = _last(small(), "eager")
    model(batch()[0])
    with (
        pytest.warns(gs.SurgeryWarning, match="at: last#0. Compiled before attaching: 'last'"),
        attached(model, gs.Scale(10.0), gs.Outputs("last")),
    ):
        backward(model)


def test_code_compiled_elsewhere_is_not_blamed_for_a_module_that_is_not_called() -> None:
    _whole(small(1), "eager")(batch()[0])
    model = small()
    with (
        pytest.warns(gs.SurgeryWarning, match=r"no gradient ever passed at: last#0$"),
        attached(model, gs.Scale(10.0), gs.Outputs("*")),
    ):
        model[1](model[0](batch()[0])).sum().backward()


@pytest.mark.parametrize(
    ("at", "message"),
    [
        pytest.param(
            gs.Nodes("*"),
            r"code that torch\.compile compiled",
            marks=pytest.mark.skipif(not COMPILES_LAYERS, reason="the layers run in eager"),
        ),
        (gs.SavedTensors("act"), r"torch\.compile compiled chooses which tensors"),
        (gs.SavedTensors("block"), r"torch\.compile compiled chooses which tensors"),
    ],
    ids=repr,
)
def test_what_the_compiler_makes_is_warned_about(at: Selector, message: str) -> None:
    model = small()
    with pytest.warns(gs.SurgeryWarning, match=message), attached(model, gs.Scale(10.0), at):
        backward(_whole(model, "aot_eager"))


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_the_wrapper_of_a_compiled_module_is_not_a_module_of_the_process(kind: str) -> None:
    model = _whole(small(), "eager")
    with attached(model, gs.Scale(1.0), gs.EveryModule(kind=kind)) as live:  # pyright: ignore[reportArgumentType]
        backward(model)
    assert not [site for site in calls_of(live) if "Optimized" in site]


@pytest.mark.parametrize("source", ["batch", "output:act"])
def test_a_trigger_sees_the_forward_of_a_compiled_model(source: str) -> None:
    def counts(compiling: bool) -> dict[str, int]:
        model = small()
        when = gs.Threshold(above=0.73 if source == "batch" else 0.17, source=source)
        item = gs.Intervention(gs.Scale(1.5), at=gs.Outputs("*"), when=when)
        with gs.Surgery(item).attach(model, sgd(model)) as live:
            called = _whole(model, "eager") if compiling else model
            for step in range(4):
                backward(called, step)
        return {entry.site: entry.all_fired for entry in live.ledger}

    assert counts(True) == counts(False) == dict.fromkeys(["first#0", "act#0", "last#0"], 2)


def test_a_compiled_submodule_keeps_its_own_name() -> None:
    model, plain = _last(small(), "eager"), small()
    for at in (gs.Outputs("*"), gs.Parameters("*"), gs.Uses("*"), gs.Inputs("*"), gs.Weights("*")):
        assert at.find(model) == at.find(plain)
    with pytest.raises(LookupError, match=r"There are: first, act, last\.$"):
        gs.Outputs("lsat").find(model)
    with attached(model, gs.Scale(1.0), gs.Outputs("*") | gs.Parameters("*")) as live:
        backward(model)
    assert calls_of(live).keys() == {
        *("first#0", "act#0", "last#0"),
        *("first.weight", "first.bias", "last.weight", "last.bias"),
    }
    assert "_orig_mod" not in str(gs.sites.tree(model, batch()[0], gs.Parameters("*")))
