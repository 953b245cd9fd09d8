"""Batched backward passes: `autograd.grad(is_grads_batched=True)`, `vmap` and `vmap(grad)`."""

from collections.abc import Callable
from io import BytesIO
from itertools import product
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import gradsurg as gs
from gradsurg.plugins.registry import name_of
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import Transform
from gradsurg.transforms.chain import links_of
from tests.nets import attached, states_of
from tests.transforms.cases import build, config, names

Mode = Literal["is_grads_batched", "vmap"]
MODES = ("is_grads_batched", "vmap")
DRAWS = ("add_noise", "noise", "placebo", "qsgd", "quantize", "random_mask", "terngrad")
# No gradient of a batched backward is part of a group.
GROUPS = tuple(n for n in names() if build(n).scope == "group")
UPDATES = [name for name in names() if "gradient" in build(name).needs]  # act in no backward pass
WITH_STATE = [n for n in names() if n not in GROUPS and build(n).init(torch.zeros(2, 3))]
STATEFUL = [name for name in WITH_STATE if name not in UPDATES]
RERUNS = ("lrp",)  # runs a module again, with one gradient
OTHERS = (*STATEFUL, *DRAWS, *GROUPS, *UPDATES, *RERUNS)
STATELESS = [name for name in names() if name not in OTHERS]
EXAMPLES = 5

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not linear:gradsurg.SurgeryWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    return nn.Sequential(*layers)


def _site(transform: Transform) -> Selector:
    if transform.needs & {"error", "labels"}:
        return gs.Outputs("2")
    if "entering" in transform.needs:
        return gs.Nodes("Addmm", module="2", side="leave", edge=1)
    return gs.Parameters("0.weight")


def _each(outputs: Tensor, weight: Tensor, vectors: Tensor) -> Tensor:
    """The gradient of each vector by itself."""
    rows = (torch.autograd.grad(outputs, weight, row, retain_graph=True)[0] for row in vectors)
    return torch.stack([*rows])


def _batched(mode: str, outputs: Tensor, weight: Tensor, vectors: Tensor, **fields: str) -> Tensor:
    """The gradients of all vectors at once."""
    if mode == "vmap":
        one: Callable[[Tensor], Tensor]
        one = lambda row: torch.autograd.grad(outputs, weight, row, retain_graph=True)[0]  # noqa: E731
        return vmap(one, **fields)(vectors)
    how = {"is_grads_batched": True, "retain_graph": True}
    return torch.autograd.grad(outputs, weight, vectors, **how)[0]


@pytest.mark.parametrize(("name", "mode"), [*product(STATELESS, MODES[1:]), ("clip", MODES[0])])
def test_a_transform_without_state_gives_the_gradients_of_a_loop(name: str, mode: Mode) -> None:
    model, transform = _model(), build(name)
    vectors = torch.randn(EXAMPLES, 6, 2) * 3
    with attached(model, transform, _site(transform)) as live:
        live.set_example_labels(torch.arange(6))
        outputs = model(torch.randn(6, 3))
        batched = _batched(mode, outputs, model[0].weight, vectors)
        assert [entry.fired for entry in live.ledger] == [1]
        looped = _each(outputs, model[0].weight, vectors)
        assert {row["sampled"] for row in live.effects.rows()} == {EXAMPLES}  # of the loop alone
    # orthogonalize enlarges a rounding of small singular values by up to 3.44 ** 5
    torch.testing.assert_close(batched, looped, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", STATELESS)
def test_the_gradients_of_examples_are_those_of_a_loop(name: str) -> None:
    """`vmap(grad)`: here the tensors of the forward are batched too."""
    transform = build(name)
    if "entering" in transform.needs:
        pytest.skip("inside vmap a linear layer has another node")
    model, inputs = _model(), torch.randn(EXAMPLES, 6, 3)
    params = {key: param.detach() for key, param in model.named_parameters()}

    def loss(own: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, own, (x,)).square().sum()

    with attached(model, transform, gs.Outputs("2")) as live:
        live.set_example_labels(torch.arange(6))
        batched = vmap(grad(loss), (None, 0))(params, inputs)
        looped = [grad(loss)(params, x) for x in inputs]
    for key, rows in batched.items():
        expected = torch.stack([row[key] for row in looped])
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "mode"), [*product(STATEFUL, MODES[1:]), ("grokfast_ema", MODES[0])]
)
def test_a_transform_with_a_state_is_refused_by_name_and_keeps_nothing(
    name: str, mode: Mode
) -> None:
    vectors = torch.randn(EXAMPLES, 6, 2)
    results = []
    for with_batch in (False, True):
        model, transform = _model(), build(name)
        outputs = model(torch.linspace(-1, 1, 18).view(6, 3))
        surgery = gs.Surgery(gs.Intervention(transform, gs.Parameters("0.weight")))
        with surgery.attach(model):
            for before in (False, True):  # without a state and with one
                if with_batch:
                    name = type(links_of(transform)[0]).__name__
                    text = rf"site '0.weight': {name}\(.*one state"
                    with pytest.raises(RuntimeError, match=text):
                        _batched(mode, outputs, model[0].weight, vectors)
                results.append(_each(outputs, model[0].weight, vectors[:2]))
                assert bool(states_of(surgery)) or not before
            states = states_of(surgery)
        results.append(torch.cat([own.float().view(-1) for own in _tensors(states)]))
    half = len(results) // 2
    for plain, after in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(after, plain)


def _tensors(node: object) -> list[Tensor]:
    if isinstance(node, dict):
        return [tensor for value in node.values() for tensor in _tensors(value)]
    return [node] if isinstance(node, Tensor) else []


RELEASED = gs.Threshold(above=1e-3, measure="norm", release=1e-4)


@pytest.mark.parametrize(
    ("name", "when"), [*product(STATEFUL, [gs.Always()]), ("grokfast_ema", RELEASED)], ids=str
)
def test_a_state_made_inside_functional_grad_can_be_saved(name: str, when: gs.Trigger) -> None:
    inputs = torch.linspace(-1, 1, 18).view(6, 3)

    def final_states(functional: bool) -> object:
        model = _model()
        params = {key: param.detach() for key, param in model.named_parameters()}

        def loss(params: dict[str, Tensor]) -> Tensor:
            return functional_call(model, params, (inputs,)).square().sum()

        surgery = gs.Surgery(gs.Intervention(build(name), at=gs.Outputs("2"), when=when))
        with surgery.attach(model):
            for _ in range(2):
                if functional:
                    grad(loss)(params)
                else:
                    model(inputs).square().sum().backward()
        return surgery.state_dict()

    stored = BytesIO()
    torch.save(final_states(functional=True), stored)
    stored.seek(0)
    states, plain = map(_tensors, (torch.load(stored), final_states(functional=False)))
    assert states
    for tensor, expected in zip(states, plain, strict=True):
        torch.testing.assert_close(tensor, expected)


def test_a_state_is_refused_where_only_the_value_is_batched() -> None:
    """The gradient of a sum is the same for all examples of `vmap(grad)`."""
    model, inputs = nn.Sequential(nn.Linear(3, 4)), torch.randn(EXAMPLES, 6, 3)

    def loss(x: Tensor) -> Tensor:
        return model(x).sum()

    with (
        attached(model, gs.GrokfastEMA(), gs.Outputs("0")),
        pytest.raises(RuntimeError, match=r"site '0#0': GrokfastEMA\(.*one state"),
    ):
        vmap(grad(loss))(inputs)


@pytest.mark.parametrize("name", DRAWS)
def test_a_transform_that_draws_is_refused_as_a_raw_hook_that_draws(name: str) -> None:
    model, vectors = _model(), torch.ones(EXAMPLES, 6, 2)
    with attached(model, build(name), gs.Parameters("0.weight")):
        outputs = model(torch.ones(6, 3))
        for mode in MODES:
            with pytest.raises(RuntimeError, match="vmap: .*random") as caught:
                _batched(mode, outputs, model[0].weight, vectors)
            assert f"{name_of(config(name))} acted at site '0.weight'" in caught.value.__notes__[0]
        outputs.sum().backward()


def test_randomness_of_vmap_says_whether_the_examples_draw_alike() -> None:
    model, vectors = _model(), torch.ones(EXAMPLES, 6, 2)
    with attached(model, gs.AddNoise(sigma=1.0), gs.Parameters("0.weight")):
        outputs, weight = model(torch.ones(6, 3)), model[0].weight
        same = _batched("vmap", outputs, weight, vectors, randomness="same")
        different = _batched("vmap", outputs, weight, vectors, randomness="different")
    assert torch.equal(same, same[:1].expand_as(same))
    assert len(different.flatten(1).unique(dim=0)) == EXAMPLES


@pytest.mark.parametrize("mode", MODES)
def test_a_trigger_on_the_gradient_decides_for_each_example(mode: Mode) -> None:
    model = _model()
    vectors = torch.randn(EXAMPLES, 6, 2) * torch.arange(EXAMPLES).view(-1, 1, 1)
    when = gs.Threshold(above=2.0, measure="norm")
    with attached(model, gs.Zero(), gs.Parameters("0.weight"), when=when):
        outputs = model(torch.randn(6, 3))
        batched = _batched(mode, outputs, model[0].weight, vectors)
        looped = _each(outputs, model[0].weight, vectors)
    torch.testing.assert_close(batched, looped, rtol=1e-6, atol=1e-6)
    zeros = [not row.any() for row in batched[1:]]
    assert True in zeros
    assert False in zeros


def test_a_trigger_with_a_state_is_refused_and_keeps_nothing() -> None:
    model, vectors = _model(), torch.randn(EXAMPLES, 6, 2)
    when = gs.Threshold(above=2.0, measure="norm", release=1.0)
    surgery = gs.Surgery(gs.Intervention(gs.Zero(), gs.Parameters("0.weight"), when))
    with surgery.attach(model):
        outputs = model(torch.ones(6, 3))
        for mode in MODES:
            with pytest.raises(RuntimeError, match=r"site '0.weight': Threshold.*one state"):
                _batched(mode, outputs, model[0].weight, vectors)
            assert not states_of(surgery)
        outputs.sum().backward()
