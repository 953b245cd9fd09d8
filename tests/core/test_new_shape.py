"""The new shape of the core against the present one, and against hooks written in plain PyTorch."""

import copy
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields
from typing import Any, Protocol
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from gradsurg.core.attachment import Attachment
from gradsurg.core.intervention import Intervention
from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import Ledger
from gradsurg.sites import new_inputs, new_nodes, new_outputs, new_parameters
from gradsurg.sites.base import Selector
from gradsurg.sites.combined import Combined
from gradsurg.sites.new_combined import Combined as NewCombined
from gradsurg.sites.places import Query
from tests.nets import num_hooks

pytestmark = pytest.mark.filterwarnings(
    "ignore::gradsurg.effects.ledger.SurgeryWarning",
    "ignore:None of the inputs have requires_grad",
    "ignore:`torch.jit.script` is deprecated",
)

QUERIES: dict[type[Selector], Callable[..., Query]] = {
    gs.Parameters: new_parameters.Parameters,
    gs.Outputs: new_outputs.Outputs,
    gs.Inputs: new_inputs.Inputs,
    gs.Nodes: new_nodes.Nodes,
}

KINDS: dict[str, Selector] = {
    "Parameters": gs.Parameters(stage="backward"),
    "Outputs": gs.Outputs(),
    "Inputs branch": gs.Inputs(),
    "Inputs total": gs.Inputs(path="total"),
    "Nodes enter": gs.Nodes("re:Addmm|Relu|Tanh|Add"),
    "Nodes leave": gs.Nodes("re:Relu|Mul", side="leave"),
}

TRANSFORMS: dict[str, tuple[Any, gs.Trigger]] = {
    "without state": (gs.Clip(0.01), gs.Always()),
    "state": (gs.Momentum(0.9), gs.Always()),
    "random": (gs.AddNoise(sigma=0.01), gs.Always()),
    "chain": (gs.Chain(gs.Momentum(0.5), gs.ClipNorm(0.2)), gs.Always()),
    "function": (lambda grad: grad * 0.5, gs.Always()),
    "value": (gs.ScaleBySign(2.0, 0.5, of="value"), gs.Always()),
    "step trigger": (gs.Chain(gs.Scale(0.5), gs.Momentum(0.9)), gs.Every(2)),
    "tensor trigger": (
        gs.Chain(gs.Scale(0.5), gs.Momentum(0.9)),
        gs.Threshold(above=0.1, measure="norm", release=0.05),
    ),
    "random trigger": (gs.Clip(0.01), gs.Probability(0.5, per="site")),
}


class Handle(Protocol):
    """An attached surgery, of either core."""

    @property
    def effects(self) -> Effects: ...

    @property
    def ledger(self) -> Ledger: ...

    def add(self, item: Intervention) -> object: ...

    def remove(self, label: str) -> None: ...

    def set(self, label: str, *, when: gs.Trigger | None = None, **changes: Any) -> None: ...


Core = Callable[..., AbstractContextManager[Any]]


class New:
    """The handle of a surgery that is attached by the new core."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, *items: Intervention) -> None:
        self.attachment = Attachment(model, Effects(1))
        self.effects, self.ledger = self.attachment.effects, self.attachment.ledger
        try:
            if optimizer is not None:
                self.attachment.bind(optimizer)
            self.attachment.add(*((item, query_of(item.at)) for item in items))
        except BaseException:
            self.attachment.close()
            raise

    def add(self, item: Intervention) -> None:
        self.attachment.add((item, query_of(item.at)))

    def remove(self, label: str) -> None:
        self.attachment.remove(label)

    def set(self, label: str, *, when: gs.Trigger | None = None, **changes: Any) -> None:
        operation = next(each for each in self.attachment.operations if label in each.labels)
        new = operation.intervention.changed(operation.labels, label, when, changes)
        self.attachment.set(operation.label, new)


def query_of(at: Selector) -> Query:
    """Return the query of the new shape with the fields of a selector."""
    given = {each.name: getattr(at, each.name) for each in fields(at)}  # pyright: ignore[reportArgumentType] - a dataclass
    if isinstance(at, Combined):
        del given["stage"]
        return NewCombined(**given | {"of": tuple(query_of(part) for part in at.of)})
    return QUERIES[type(at)](**given)


@contextmanager
def by_new(model: nn.Module, optimizer: Optimizer | None, *items: Intervention) -> Iterator[Handle]:
    live = New(model, optimizer, *items)
    try:
        yield live
    finally:
        live.attachment.close()


def by_present(
    model: nn.Module, optimizer: Optimizer | None, *items: Intervention
) -> AbstractContextManager[Any]:
    return gs.Surgery(*items).attach(model, optimizer)


# The models and the situations.


class Net(nn.Module):
    """A module with two names, one that is called twice, a tied weight, an identity, a sum."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.act = nn.ReLU()
        self.one = nn.Linear(6, 6)
        self.two = self.one
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.one.weight
        self.same = nn.Identity()
        self.tail = nn.Sequential(OrderedDict(lin=nn.Linear(6, 6), tanh=nn.Tanh()))
        self.last = nn.Linear(6, 3)
        self.reentrant = reentrant
        self.fails = False

    def inner(self, x: Tensor) -> Tensor:
        h = self.act(self.one(self.act(self.first(x))))
        h = self.two(h) + self.same(h)
        if self.fails:
            raise ArithmeticError("in the forward")
        return self.tail(self.tied(h)) * h

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.last(self.inner(x))
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 4, generator=generator).requires_grad_()


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def step(model: nn.Module, optimizer: Optimizer, number: int) -> list[Tensor]:
    """Train a step; return the gradients of the parameters and of the input."""
    optimizer.zero_grad()
    x = batch(number)
    model(x).square().sum().backward()
    optimizer.step()
    return [p.grad.clone() for p in (*model.parameters(), x) if p.grad is not None]


def steps(model: nn.Module, optimizer: Optimizer, live: Handle) -> list[Tensor]:
    return [grad for number in range(4) for grad in step(model, optimizer, number)]


def evaluated(model: nn.Module, optimizer: Optimizer, live: Handle) -> list[Tensor]:
    with torch.no_grad():
        model(batch(7))
    found = step(model, optimizer, 0)
    with torch.no_grad():
        model(batch(8))
    model.get_submodule("tail")(batch(9) @ torch.ones(4, 6)).sum().backward()  # outside the forward
    return [*found, *step(model, optimizer, 1)]


def failed(model: Any, optimizer: Optimizer, live: Handle) -> list[Tensor]:
    found = step(model, optimizer, 0)
    model.fails = True
    with suppress(ArithmeticError):
        model(batch(1))
    model.fails = False
    return [*found, *step(model, optimizer, 1)]


def threads(model: nn.Module, optimizer: Optimizer, live: Handle) -> list[Tensor]:
    """Two threads call the model at once, and their backward passes follow one another.

    Not at first: the present core may make two hooks of a site that two threads are the first to
    meet, and act twice there.
    """
    model(batch(0))
    barrier, turns = threading.Barrier(2), [threading.Event(), threading.Event()]
    found: dict[int, list[Tensor]] = {}

    def work(index: int) -> None:
        found[index] = []
        for number in range(3):
            barrier.wait()
            loss = model(batch(index + 2 * number)).square().sum()
            barrier.wait()
            if index:
                turns[0].wait()
                turns[0].clear()
            found[index] += torch.autograd.grad(loss, [*model.parameters()])
            turns[index].set()

    running = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    return found[0] + found[1]


def copied(model: nn.Module, optimizer: Optimizer, live: Handle) -> list[Tensor]:
    found = step(model, optimizer, 0)
    twin = copy.deepcopy(model)
    found += step(twin, sgd(twin), 1)
    return [*found, *step(model, optimizer, 1)]


def changed(model: nn.Module, optimizer: Optimizer, live: Handle) -> list[Tensor]:
    found = step(model, optimizer, 0)
    loss = model(batch(1)).square().sum()  # a graph that is there when interventions change
    live.add(gs.Intervention(gs.Scale(3.0), at=gs.Outputs("act"), names=("late",)))
    live.add(gs.Intervention(gs.Sign(), at=gs.Parameters("last.*", stage="backward")))
    loss.backward()
    found += step(model, optimizer, 2)
    live.set("late", factor=0.5)
    found += step(model, optimizer, 3)
    loss = model(batch(4)).square().sum()
    live.remove("sign")
    loss.backward()
    return [*found, *step(model, optimizer, 5)]


SITUATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Tensor]]]] = {
    "plain": (Net, steps),
    "checkpoint": (lambda: Net(False), steps),
    "reentrant checkpoint": (lambda: Net(True), steps),
    "evaluation": (Net, evaluated),
    "evaluation, reentrant checkpoint": (lambda: Net(True), evaluated),
    "exception in a forward": (Net, failed),
    "exception in a checkpoint": (lambda: Net(True), failed),
    "threads": (Net, threads),
    "a deepcopy": (Net, copied),
    "changes": (Net, changed),
}


def outcome(core: Core, situation: str, *items: Intervention) -> dict[str, Any]:
    """Run a situation; return gradients, counts of sites, other names, and rows of effects."""
    make, run = SITUATIONS[situation]
    model = make()
    optimizer = sgd(model)
    with core(model, optimizer, *items) as live:
        grads = run(model, optimizer, live)
        seen = [entry for entry in live.ledger if entry.all_calls]
        return {
            "gradients": grads,
            "counts": {(e.intervention, e.site): (e.all_calls, e.all_fired) for e in seen},
            "aliases": {(e.intervention, e.site): sorted(e.aliases) for e in seen},
            "effects": sorted(map(str, live.effects.rows())),
        }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if name == "gradients":
            assert len(found[name]) == len(value)
            assert all(map(torch.equal, found[name], value))
        else:
            assert found[name] == value


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_sites_and_effects_are_those_of_the_present_core(kind, situation) -> None:
    plain = outcome(by_present, situation)["gradients"]
    for name, (transform, when) in TRANSFORMS.items():
        if name == "value" and kind.startswith("Nodes"):
            continue
        item = gs.Intervention(transform, at=KINDS[kind], when=when)
        expected = outcome(by_present, situation, item)
        assert not all(map(torch.equal, expected["gradients"], plain)), f"{name} does not act"
        assert_equal(outcome(by_new, situation, item), expected)


# Hooks written by hand.


def clamp(grad: Tensor) -> Tensor:
    return grad.clamp(-0.01, 0.01)


def by_hand(kind: str, model: nn.Module, f: Callable[[Tensor], Tensor]) -> None:
    """Hook a model in plain PyTorch: what a kind does, without checks, names and counts."""
    parts = [part for part in model.modules() if part is not model]

    def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output = output[...] if output is args[0] else output  # an identity returns its input
        if output.requires_grad and not output._backward_hooks:  # a container and its last child
            output.register_hook(f)
        return output

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = args[0][...] if kind == "Inputs branch" else args[0]
        if given.requires_grad and not given._backward_hooks:
            given.register_hook(f)
        return (given,)

    def hook_graph(module: nn.Module, args: object, output: Tensor) -> None:
        seen, found = set[object](), [output.grad_fn]
        while found:
            node = found.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            found += [source for source, _ in node.next_functions]
            if kind == "Nodes enter" and node.name() in ("AddmmBackward0", "ReluBackward0"):
                node.register_prehook(lambda grads: tuple(g if g is None else f(g) for g in grads))
            if kind == "Nodes leave" and node.name() in ("ReluBackward0", "MulBackward0"):
                node.register_hook(lambda grads, _: tuple(g if g is None else f(g) for g in grads))

    if kind == "Parameters":
        for param in model.parameters():
            param.register_hook(f)
    elif kind.startswith("Nodes"):
        model.register_forward_hook(hook_graph)
    for part in parts if kind == "Outputs" else []:
        part.register_forward_hook(after)
    for part in parts if kind.startswith("Inputs") else []:
        part.register_forward_pre_hook(before)


BY_HAND: dict[str, Selector] = {**KINDS, "Nodes enter": gs.Nodes("re:Addmm|Relu")}


@pytest.mark.parametrize("make", [Net, lambda: Net(False)], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("kind", BY_HAND)
def test_gradients_are_those_of_hooks_by_hand(kind: str, make: Callable[[], nn.Module]) -> None:
    hooked, model = make(), make()
    by_hand(kind, hooked, clamp)
    optimizer, other = sgd(model), sgd(hooked)
    with by_new(model, optimizer, gs.Intervention(clamp, at=BY_HAND[kind])):
        for number in range(3):
            pairs = zip(step(model, optimizer, number), step(hooked, other, number), strict=True)
            assert all(torch.equal(found, expected) for found, expected in pairs)


class Nested(nn.Module):
    """A linear layer, called twice in a checkpoint, perhaps inside another one."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.act, self.depth = nn.Linear(4, 4), nn.Tanh(), depth

    def twice(self, x: Tensor) -> Tensor:
        return self.act(self.lin(self.act(self.lin(x))))

    def forward(self, x: Tensor) -> Any:
        def nest(depth: int, x: Tensor) -> Any:
            return checkpoint(nest, depth - 1, x, use_reentrant=True) if depth else self.twice(x)

        return nest(self.depth, x)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "at", [gs.Outputs("lin", call=1), gs.Outputs("lin", call=0), gs.Inputs("act", call=1)]
)
def test_a_call_in_nested_reentrant_checkpoints_is_the_one_of_the_forward(at, depth: int) -> None:
    found: list[Tensor] = []
    for model in (Nested(0), Nested(depth)):
        with by_new(model, None, gs.Intervention(gs.Clip(0.01), at=at)):
            x = batch(0)
            model(x).square().sum().backward()
        found.append(torch.cat([model.lin.weight.grad, x.grad]))
    plain, x = Nested(0), batch(0)
    plain(x).square().sum().backward()
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.cat([plain.lin.weight.grad, x.grad]))


# Queries.

SELECTIONS: list[Selector] = [
    gs.Parameters("tied.*"),
    ~gs.Parameters("two.*"),
    gs.Parameters("*.bias") & gs.Parameters().first(3),
    gs.Parameters(ndim=2, size=(1, 30)),
    gs.Parameters(types="Linear", depth=2),
    gs.Outputs("two"),
    gs.Outputs("re:one|two", call=0),
    gs.Outputs().first(4),
    ~gs.Outputs().first(3),
    gs.Outputs() & ~gs.Outputs("act"),
    gs.Outputs("tail.tanh") | gs.Outputs("tail"),
    gs.Outputs(types="Linear", depth=2) | gs.Outputs("act"),
    gs.Outputs().where(lambda place: isinstance(place.thing, nn.ReLU)),
    (gs.Parameters("last.*") | gs.Outputs("act")).expect(4),
    gs.Inputs("act", call=1) | gs.Nodes("Addmm", module="tail.*"),
    gs.Nodes("rectifier", occurrence=0),
    gs.Nodes("Add", side="leave", edge="residual"),
    gs.Nodes("Mul", side="leave", edge=1),
]


@pytest.mark.parametrize("at", SELECTIONS, ids=map(str, range(len(SELECTIONS))))
def test_a_query_picks_the_sites_of_the_present_selector(at: Selector) -> None:
    item = gs.Intervention(gs.Scale(0.5), at=at)
    expected = outcome(by_present, "plain", item)
    assert expected["counts"]
    assert_equal(outcome(by_new, "plain", item), expected)


@pytest.mark.parametrize(
    ("at", "name"),
    [
        (gs.Outputs("fist"), "first"),
        (gs.Parameters("first.wieght"), "first.weight"),
        (gs.Outputs("act") | gs.Outputs("fist"), "first"),
        (gs.Outputs("act") & gs.Outputs("first"), "nothing is selected"),
        (gs.Nodes("Relu", module="fist"), "first"),
        (gs.Outputs(types="Linar"), "Linear"),
        (gs.Parameters(), "frozen"),
        (gs.Outputs("act", call=7), "act#0"),
        (gs.Nodes("Tahn"), "Tanh"),
        (gs.Parameters("*.bias").expect(2), "first.bias"),
        (gs.Outputs().expect(2), "act#0"),
    ],
)
def test_a_query_that_picks_nothing_names_the_choices(at: Selector, name: str) -> None:
    told: list[str] = []
    for core in (by_present, by_new):
        model = Net()
        model.requires_grad_(name != "frozen")
        before = num_hooks(model)
        with (
            pytest.raises(LookupError, match=name) as caught,
            core(model, None, gs.Intervention(gs.Zero(), at=at)),
        ):
            model(batch(0))
        told.append(type(caught.value).__name__)
        assert num_hooks(model) == before
    assert told[0] == told[1]


def test_interventions_at_one_place_act_in_order_and_share_a_hook() -> None:
    items = [
        gs.Intervention(transform, at=at)
        for at in KINDS.values()
        for transform in (gs.Clip(0.01), gs.Scale(20.0), gs.Sign())
    ]
    assert_equal(outcome(by_new, "plain", *items), outcome(by_present, "plain", *items))
    model = Net()
    with by_new(model, None, *(each for each in items if each.at == KINDS["Parameters"])):
        assert all(len(param._backward_hooks or ()) == 1 for param in model.parameters())


@pytest.mark.parametrize("pattern", ["typo", "scripted"])
def test_an_add_that_fails_leaves_the_others_as_they_were(pattern: str) -> None:
    found: list[list[Tensor]] = []
    for fails in (False, True):
        model = Net()
        model.scripted = torch.jit.script(nn.Linear(1, 1))  # refused when it is to be hooked
        optimizer = sgd(model)
        with by_new(model, optimizer, gs.Intervention(gs.Zero(), at=gs.Outputs("act"))) as live:
            if fails:
                with pytest.raises(ValueError, match=pattern):
                    live.add(gs.Intervention(gs.Zero(), at=gs.Outputs(pattern)))
            found.append(step(model, optimizer, 0))
    assert all(map(torch.equal, *found))
    assert any(not grad.any() for grad in found[0])


def test_a_loaded_state_and_step_are_used_from_the_next_gradient_on() -> None:
    # Random numbers depend on the step, and on the number of gradients before it in the step.
    transform = gs.Chain(gs.Momentum(0.9), gs.AddNoise(sigma=0.1))

    def gradients(begins_late: bool) -> list[Tensor]:
        model = Net()
        live = New(model, None, gs.Intervention(transform, at=gs.Outputs("act")))
        if begins_late:
            model(batch(5)).sum().backward()
            model.zero_grad()
        live.attachment.states.clear()
        live.attachment.states["momentum/act#0"] = {"momentum": torch.ones(5, 6)}
        live.attachment.load_states()
        try:
            return step(model, sgd(model), 6)
        finally:
            live.attachment.close()

    found = gradients(begins_late=False)
    assert all(map(torch.equal, found, gradients(begins_late=True)))
    plain = Net()
    assert not all(map(torch.equal, found, step(plain, sgd(plain), 6)))


def test_the_states_of_an_intervention_go_with_it() -> None:
    model, at = Net(), gs.Outputs("act")
    items = [gs.Intervention(gs.Momentum(0.9), at=at, names=(name,)) for name in ("a", "b")]
    live = New(model, None, *items)
    model(batch(0)).sum().backward()
    assert {key.partition("/")[0] for key in live.attachment.states} == {"a", "b"}
    live.remove("a")
    assert {key.partition("/")[0] for key in live.attachment.states} == {"b"}
    live.add(gs.Intervention(gs.Momentum(0.9), at=at, names=("silent",)))
    model(batch(0))
    live.remove("silent")
    assert live.ledger.of("a")
    assert not live.ledger.of("silent")
    live.attachment.close()
    for change in (live.add, live.attachment.set):
        with pytest.raises(RuntimeError, match="the block has ended"):
            change(*([items[0]] if change == live.add else ["b", items[1]]))


# Lifetimes: nothing waits for the garbage collector.


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [None, True])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_hold_neither_the_model_nor_themselves(kind: str, reentrant: bool | None) -> None:
    with without_collector():
        model = Net(reentrant)
        live = New(model, None, gs.Intervention(gs.Momentum(0.9), at=KINDS[kind]))
        model(batch(0)).sum().backward()
        held = ref(model)
        del model
        assert held() is None, "a model is freed while a surgery is attached"
        live.attachment.close()
        model, before = Net(reentrant), num_hooks(Net(reentrant))
        live = New(model, None, gs.Intervention(gs.Momentum(0.9), at=KINDS[kind]))
        x = batch(0)
        loss = model(x).sum()
        attachment, operation = ref(live.attachment), ref(live.attachment.operations[0])
        live.attachment.close()
        del live
        assert attachment() is None, "a graph holds a surgery that was closed"
        assert num_hooks(model) == before
        assert not x._backward_hooks
        plain = Net(reentrant)
        plain(batch(0)).sum().backward()
        loss.backward()
        del loss
        assert operation() is None, "an intervention refers to itself"
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.grad is not None
        assert other.grad is not None
        assert torch.equal(param.grad, other.grad), "hooks on a graph pass gradients unchanged"
