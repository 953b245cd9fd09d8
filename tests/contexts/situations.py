"""Situations that every kind of site meets: functions of a row that assert the outcome.

A row lists by situation what its kind does differently.
"""

import copy
import gc
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as process

import gradsurg as gs
from gradsurg.sites.base import Selector
from gradsurg.torch_internals import autograd
from gradsurg.torch_internals.module_hooks import TABLES
from gradsurg.transforms.base import Transform
from tests.contexts.kinds import Net
from tests.nets import FEATURES, attached, batch, noisy, num_hooks, sgd, weights
from tests.sites.points import Acts, met, recomputed

DOUBLE = gs.Scale(2.0)
WEIGHED = ("first", "last")
STAGES = gs.Parameters.stages
OF_SUMS = ("accumulated", "sent", "reduced")
"""The stages that act on the sum of gradients in `.grad`, during the backward pass."""
MADE = {"first": "Addmm", "act": "Relu", "last": "Mm", "shared": "Addmm"}
SAVED = {"first": "mat1", "act": "result", "last": "self", "shared": "mat1"}
"""The node that each layer makes, and PyTorch's name of the activation that it saves."""


@dataclass(frozen=True)
class Row:
    """A kind of site: the name of its class, the ids of its sites, and its fields.

    `gives` tells whether transforms may need the value, or all gradients of a group. `differs`
    names what the kind does differently, by situation.
    """

    cls: str
    site: str
    gives: str = ""
    differs: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)  # Any: fields have types

    def at(self, name: str) -> Selector:
        if self.cls == "Nodes":
            return gs.Nodes("re:Addmm|Mm|Relu", module=name)
        pattern = self.site.replace("#", "/").partition("/")[0].format(name)
        return getattr(gs, self.cls)(pattern, **self.fields)

    @property
    def of_modules(self) -> bool:
        return "#" in self.site

    def sites(self, *names: str) -> set[str]:
        return {self.site.format(name, node=MADE[name], saved=SAVED[name]) for name in names}

    @property
    def all_sites(self) -> set[str]:
        return self.sites("first", "act", "last") if self.of_modules else self.sites(*WEIGHED)

    def has(self, situation: str, difference: str) -> bool:
        return self.differs.get(situation) == difference


WEIGHT, OUTPUT, INPUT, NODE = "{}.weight", "{}#0", "{}#0.input", "{}#0/{node}Backward[0]"
BOTH = "value, group"
# What a row does differently, by situation.
FLOWS = {"outlives": "acts", "without_gradients": "acts", "checkpointed": "twice"}
WAITS = {"without_gradients": "(frozen)"}  # it may be trained later
NEEDS = {"without_gradients": "needs no gradient"}
NO_NODE = {"without_gradients": "no node"}
UNSAVED = {"without_gradients": "saves no such tensor"}
REFUSED = NO_NODE | {"checkpointed": "refuses the hooks of others", "order": "takes one alone"}
OWN_THREAD = {"threads": "reported", "checkpointed": "refused by PyTorch"}
EDITS = {"interrupted": "edits"}
PICKED = {"node": "re:Addmm|Mm|Relu"}
STRAIGHT = {"side": "input", "backward": "straight"}

KINDS = (
    *(Row("Parameters", WEIGHT, "value", {}, {"stage": name}) for name in STAGES[:2]),
    Row("Parameters", WEIGHT, BOTH, {}, {"stage": "backward_end"}),
    Row("Parameters", WEIGHT, BOTH, WAITS, {"stage": "step"}),
    *(Row("Buckets", WEIGHT, "value", {}, {"stage": name}) for name in ("sent", "reduced")),
    Row("Weights", WEIGHT, "group", WAITS, {"stage": "step"}),
    Row("Weights", WEIGHT, "group", EDITS, {"stage": "forward"}),
    Row("Updates", WEIGHT, BOTH, WAITS),
    Row("Captured", WEIGHT, "value", OWN_THREAD),
    Row("Uses", "{}.weight/use[0]"),
    Row("Outputs", OUTPUT, "value", NEEDS),
    *(Row("Inputs", INPUT, "value", NEEDS, {"path": path}) for path in ("branch", "total")),
    Row("Nodes", NODE, "", NO_NODE),
    Row("ModuleGradients", OUTPUT, "", NEEDS, {"kind": "full_backward_pre"}),
    Row("ModuleGradients", INPUT, "", NEEDS, {"kind": "full_backward"}),
    Row("EveryModule", INPUT, "", FLOWS, {"kind": "forward_pre"}),
    Row("EveryModule", OUTPUT, "", FLOWS, {"kind": "forward"}),
    Row("EveryModule", OUTPUT, "", NEEDS, {"kind": "full_backward_pre"}),
    Row("EveryModule", INPUT, "", NEEDS, {"kind": "full_backward"}),
    Row("Activations", OUTPUT, "", FLOWS),
    Row("Activations", INPUT, "", FLOWS, STRAIGHT),
    Row("SavedTensors", "{}#0.0", "", UNSAVED),
    Row("SavedTensors", NODE + ".{saved}", "", REFUSED, PICKED),
)
ROWS = {" ".join([row.cls, *map(str, row.fields.values())]): row for row in KINDS}


class Shared(nn.Module):
    """Calls a layer twice, and raises `error` between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 1, bias=False)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        if self.error is not None:
            raise self.error
        return self.last(self.shared(x.tanh()))


class Saved(nn.Module):
    """A net, perhaps in a checkpoint."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.inner, self.reentrant = Net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.inner(x) if self.reentrant is None else recomputed(self.inner, x, self.reentrant)
        )


def _ready(make: Callable[[], nn.Module] = Net) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(0)
    model = make()
    return model, sgd(model)


def _x(step: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()


def _backward(row: Row, model: nn.Module, loss: Tensor) -> None:
    if row.cls != "Captured":
        loss.backward()
        return
    params = [param for param in model.parameters() if param.requires_grad]
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad


def _step(row: Row, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    optimizer.zero_grad()
    x = batch(step)[0].view(-1, 2, FEATURES // 2) if hasattr(model, "conv") else _x(step)
    _backward(row, model, model(x).square().sum())
    optimizer.step()


def _same(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, weights(first), weights(second)))


def _hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    """Return all that an attachment may leave behind: hooks, modes, flags and filters."""
    return (
        num_hooks(model, optimizer),
        sum(len(vars(process)[table]) for table in TABLES),
        len(autograd.function_modes()),
        autograd.saved_tensor_hooks(),
        process._global_is_full_backward_hook,
        [module._is_full_backward_hook for module in model.modules()],
        len(warnings.filters),
    )


@contextmanager
def _hooks_gone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before = _hooks(model, optimizer)
    yield
    assert _hooks(model, optimizer) == before


def _trained(
    row: Row,
    at: Selector | str,
    *transforms: Transform,
    make: Callable[[], nn.Module] = Net,
    steps: int = 2,
    before: Callable[[nn.Module, int], object] = lambda model, step: None,
    shadow: bool = False,
) -> tuple[nn.Module, gs.Live]:
    """Train a model with these transforms, calling `before` in the block before each step."""
    model, optimizer = _ready(make)
    at = row.at(at) if isinstance(at, str) else at
    surgery = gs.Surgery(*(gs.Intervention(transform, at) for transform in transforms))
    with _hooks_gone(model, optimizer), surgery.attach(model, optimizer, shadow=shadow) as live:
        for step in range(steps):
            before(model, step)
            _step(row, model, optimizer, step)
    return model, live


# The situations


def no_op(row: Row) -> None:
    """A surgery that changes nothing, or in shadow, leaves training bit-identical."""

    def trained(*transforms: Transform, shadow: bool = False) -> nn.Module:
        def seed(model: nn.Module, step: int) -> None:
            torch.manual_seed(step)

        given = {"make": noisy, "steps": 3, "before": seed, "shadow": shadow}
        return _trained(row, "*", *transforms, **given)[0]

    plain = trained()
    assert _same(trained(gs.Identity()), plain)
    assert _same(trained(DOUBLE, shadow=True), plain)
    assert not _same(trained(DOUBLE), plain)


def hooks(row: Row) -> None:
    """Hooks are gone after an exception in the block, or in the forward."""
    model, optimizer = _ready(Shared)
    before = _hooks(model, optimizer)
    for error in (None, OSError("gone")):
        with (
            _hooks_gone(model, optimizer),
            pytest.raises(OSError, match="gone"),
            attached(model, gs.Identity(), row.at("shared"), optimizer),
        ):
            _step(row, model, optimizer)
            assert _hooks(model, optimizer) != before
            model.error = error
            _step(row, model, optimizer)
            raise OSError("gone")
        model.error = None


def error_in_the_transform(row: Row) -> None:
    """An error of the transform, or a result of another shape, names the site."""
    (site,) = row.sites("first")
    for function, expected in (
        (lambda grad: 1 // 0, ArithmeticError),
        (lambda g: g[:1], TypeError),
    ):
        model, optimizer = _ready()
        with (
            _hooks_gone(model, optimizer),
            pytest.raises(expected) as caught,
            attached(model, Acts(function), row.at("first"), optimizer),
        ):
            _step(row, model, optimizer)
        assert f"site '{site}'" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"


def kept_alive(row: Row) -> None:
    """Neither tensors of a step nor the model are kept alive."""
    (model, optimizer), held = _ready(), list[ref[Any]]()  # Any: tensors, modules
    model.act.register_forward_hook(lambda *given: held.append(ref(given[2])))
    transform = gs.ScaleBySign(of="value") if "value" in row.gives else DOUBLE
    with attached(model, transform, row.at("*"), optimizer) as live:
        for is_read in (True, True, False):
            x = _x()
            y = model(x)
            held += [ref(x), ref(y)]
            if is_read:
                _backward(row, model, y.sum())
                optimizer.step()
            del x, y
            gc.collect()
            assert [one() for one in held] == [None] * len(held)
    held = [ref(model), *map(ref, model.parameters()), ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [one() for one in held] == [None] * len(held)
    assert live.ledger


def outlives(row: Row) -> None:
    """A backward pass after the block is that of PyTorch, unless values were changed in it."""
    model, optimizer = _ready()
    with attached(model, DOUBLE, row.at("*"), optimizer):
        _step(row, model, optimizer)
        optimizer.zero_grad()
        loss = model(_x()).square().sum()
    plain = copy.deepcopy(model)
    _backward(row, model, loss)
    optimizer.step()
    _step(row, plain, sgd(plain))
    assert _same(model, plain) != row.has("outlives", "acts")


def interrupted(row: Row) -> None:
    """A forward pass that raises leaves no trace in the next one."""

    def fail(model: nn.Module, step: int) -> None:
        for error in (OSError, KeyboardInterrupt) if not step else ():
            model.error = error("gone")
            with pytest.raises(error):
                model(_x())
        model.error = None

    model, live = _trained(row, "shared", DOUBLE, make=Shared, before=fail)
    plain, expected = _trained(row, "shared", DOUBLE, make=Shared)
    assert {*met(live)} == {*met(expected)}
    assert _same(model, plain) or row.has("interrupted", "edits")


def evaluation(row: Row) -> None:
    """An evaluation without gradients changes neither training nor the reasons in the ledger."""

    def evaluate(model: nn.Module, step: int) -> None:
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                model.eval()(_x().detach())
                model.train()

    model, live = _trained(row, "*", DOUBLE, before=evaluate)
    plain, expected = _trained(row, "*", DOUBLE)
    assert "needs no gradient" not in live.ledger.table()
    assert {*met(live)} == {*met(expected)} == row.all_sites
    assert _same(model, plain)


def order(row: Row) -> None:
    """Interventions at one site act one after the other."""
    signed, reverse = gs.ScaleBySign(positive=3.0, negative=1.0), gs.Scale(-1.0)
    if row.has("order", "takes one alone"):
        with pytest.raises(RuntimeError, match="one pair alone"):
            _trained(row, "last", signed, reverse)
        return
    both, chained, swapped = (
        _trained(row, "last", *transforms, steps=1)[0]
        for transforms in ((signed, reverse), (gs.Chain(signed, reverse),), (reverse, signed))
    )
    torch.testing.assert_close(weights(both), weights(chained))
    assert not _same(chained, swapped)


def added(row: Row) -> None:
    """An intervention can be added and removed between two steps."""
    (model, optimizer), (other, of_other) = _ready(), _ready()
    with attached(model, gs.Identity(), gs.Parameters(), optimizer) as live:
        _step(row, model, optimizer)
        label = live.add(gs.Intervention(DOUBLE, row.at("*")))
        _step(row, model, optimizer)
        live.remove(label)
        _step(row, model, optimizer)
    _step(row, other, of_other)
    with attached(other, DOUBLE, row.at("*"), of_other):
        _step(row, other, of_other)
    _step(row, other, of_other)
    assert _same(model, other)


def effects(row: Row) -> None:
    """The norms before and after a transform are measured at each site."""
    _, live = _trained(row, "*", DOUBLE, steps=1)
    norms = {one["site"]: (one["norm_before"], one["norm_after"]) for one in live.effects.rows()}
    assert {*norms} == row.all_sites
    for before, after in norms.values():
        assert after == pytest.approx(2 * float(str(before)), rel=1e-5) != 0


def combined(row: Row) -> None:
    """Selectors of the kind combine as sets, and their sites are counted."""
    at, sites, everything = row.at, row.sites, row.all_sites
    for selector, expected in (
        (at("first") | at("last"), sites("first", "last")),
        (at("*") & ~at("first"), everything - sites("first")),
        (at("*").first(1), sites("first")),
        (at("*").where(lambda place: "last" in place.name), sites("last")),
        (at("*").expect(len(everything)), everything),
    ):
        _, live = _trained(row, selector, gs.Identity(), steps=1)
        assert met(live) == dict.fromkeys(expected, 1)
    with pytest.raises(LookupError, match="sites were expected"):
        _trained(row, at("*").expect(len(everything) + 1), gs.Identity(), steps=1)


def nothing_matches(row: Row) -> None:
    """A name that nothing has is refused with the nearest one, and no hook remains."""
    told = pytest.raises(LookupError, match="Did you mean 'first")
    if row.cls == "EveryModule":  # a module outside the model may have it
        told = pytest.warns(gs.SurgeryWarning, match="none of its sites was met")
    with told:
        _trained(row, "frist", gs.Identity(), steps=1)


def without_gradients(row: Row) -> None:
    """A frozen parameter is skipped, and refused alone; other sites there are reported."""

    def train(name: str) -> gs.Live:
        model, optimizer = _ready()
        model.first.requires_grad_(False)
        with attached(model, DOUBLE, row.at(name), optimizer) as live:
            _backward(row, model, model(_x().detach()).square().sum())
            optimizer.step()
        return live

    match row.differs.get("without_gradients", "frozen"):
        case "frozen":
            live = train("*")
            assert {*met(live)} == row.sites("last")
            assert "frozen" in {entry.skipped for entry in live.ledger}
            with pytest.raises(LookupError, match="frozen"):
                train("first")
        case "acts":
            assert {*met(train("first"))} == row.sites("first")
        case "no node":
            with pytest.raises(LookupError):
                train("first")
        case reason:
            with pytest.warns(gs.SurgeryWarning, match=re.escape(reason)):
                train("first")


def needs(row: Row) -> None:
    """A transform that needs more than the kind gives is refused, as is a stage of another."""
    for need, transform in (("value", gs.AGC()), ("group", gs.ClipGlobalNorm())):
        with nullcontext() if need in row.gives else pytest.raises(ValueError, match="needs"):
            gs.Intervention(transform, row.at("first"))
    stage = "captured" if row.cls != "Captured" else "step"
    with pytest.raises(ValueError, match=f"cannot have stage '{stage}'"):
        gs.Intervention(gs.Zero(), replace(row.at("first"), stage=stage))


def threads(row: Row) -> None:
    """Forward passes in two threads at once have the sites and gradients of one after another."""

    def trained(at_once: bool) -> tuple[dict[str, int], list[Tensor]]:
        (model, optimizer), barrier, grads = _ready(Shared), threading.Barrier(2), list[Tensor]()

        def wait(*given: object) -> None:
            barrier.wait(timeout=10)

        # Two backward passes at once would write to a sum of gradients while it is transformed.
        in_turn = threading.Lock() if row.fields.get("stage") in OF_SUMS else nullcontext()

        def work() -> None:
            x = _x()
            loss = model(x).square().sum()
            with in_turn:
                loss.backward()
            assert x.grad is not None
            grads.append(x.grad)

        if at_once:
            model.shared.register_forward_hook(wait)
        transform = DOUBLE if row.of_modules else gs.Identity()
        with attached(model, transform, row.at("shared"), optimizer, effects_every=0) as live:
            workers = [threading.Thread(target=work) for _ in range(2)]
            for worker in workers:
                worker.start() if at_once else worker.run()
            for worker in workers if at_once else ():
                worker.join()
            optimizer.step()
        return met(live), grads

    if row.has("threads", "reported"):
        with pytest.warns(gs.SurgeryWarning, match="no gradient ever passed"):
            trained(True)
        return
    (seen, grads), (expected, serial) = trained(True), trained(False)
    assert seen == expected
    assert seen
    torch.testing.assert_close(grads, serial)


def checkpointed(row: Row) -> None:
    """A checkpoint changes neither gradients nor sites; a value is changed again in it."""
    model, live = _trained(row, "inner.first", DOUBLE, make=Saved)
    factor = 2 if row.has("checkpointed", "twice") else 1
    expected = {site: factor * calls for site, calls in met(live).items()}
    for reentrant, refused in (
        (False, "refuses the hooks of others"),
        (True, "refused by PyTorch"),
    ):
        make = partial(Saved, reentrant)
        if row.has("checkpointed", refused):
            with pytest.raises(RuntimeError):
                _trained(row, "inner.first", DOUBLE, make=make)
            continue
        other, live = _trained(row, "inner.first", DOUBLE, make=make)
        assert met(live) == expected
        torch.testing.assert_close(weights(other), weights(model))


def calls(row: Row) -> None:
    """Calls of a shared module are sites, `call` picks one, and outside the model it is call 0."""
    if not row.of_modules:
        return
    (first,) = row.sites("shared")
    second = first.replace("#0", "#1")

    def seen(act: Callable[[nn.Module, Tensor], Tensor], **fields: int) -> dict[str, int]:
        model, optimizer = _ready(Shared)
        at = replace(row.at("shared"), **fields) if fields else row.at("shared")
        with _hooks_gone(model, optimizer), attached(model, DOUBLE, at, optimizer) as live:
            for step in range(2):
                act(model, _x(step)).square().sum().backward()
        return met(live)

    assert seen(Shared.__call__) == {first: 2, second: 2}
    assert seen(lambda model, x: model.shared(x)) == {first: 2}
    if hasattr(row.at("*"), "call"):
        assert seen(Shared.__call__, call=0) == {first: 2}
        assert seen(Shared.__call__, call=1) == {second: 2}
        with pytest.raises(LookupError):
            seen(Shared.__call__, call=7)


SITUATIONS: dict[str, Callable[[Row], None]] = {
    function.__name__: function
    for function in (
        *(no_op, hooks, error_in_the_transform, kept_alive, outlives, interrupted, evaluation),
        *(order, added, effects, combined, nothing_matches, without_gradients, needs, threads),
        *(checkpointed, calls),
    )
}
