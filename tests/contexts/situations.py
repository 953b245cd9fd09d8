"""Situations that every kind of site meets: functions of a row that assert the outcome.

A row lists by situation what its kind does differently.
"""

import copy
import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
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
from tests.sites.points import Acts, recomputed

DOUBLE = gs.Scale(2.0)
WEIGHED = ("first", "last")
MADE = {"first": "Addmm", "act": "Relu", "last": "Mm", "shared": "Addmm"}
SAVED = {"first": "mat1", "act": "result", "last": "self", "shared": "mat1"}
"""The node that each layer makes, and PyTorch's name of the activation that it saves."""


@dataclass(frozen=True)
class Row:
    """A kind of site: its selector of a module, or of its weight, and the ids of its sites.

    `value` and `group` tell whether transforms may need the value, or all gradients of a group.
    """

    at: Callable[[str], Selector]
    site: str
    value: bool
    group: bool
    differs: Mapping[str, str]

    @property
    def of_modules(self) -> bool:
        return ".weight" not in self.site

    def sites(self, *names: str) -> set[str]:
        return {self.site.format(name, node=MADE[name], saved=SAVED[name]) for name in names}

    @property
    def all_sites(self) -> set[str]:
        return self.sites("first", "act", "last") if self.of_modules else self.sites(*WEIGHED)


def _row(
    cls: str,
    site: str,
    gives: str = "",
    differs: Mapping[str, str] | None = None,
    **fields: Any,  # Any: fields have types
) -> Row:
    make, end = getattr(gs, cls), ".weight" if site.startswith("{}.weight") else ""

    def at(name: str) -> Selector:
        if make is gs.Nodes:
            return gs.Nodes("re:Addmm|Mm|Relu", module=name)
        return make(f"{name}{end}", **fields)

    return Row(at, site, "value" in gives, "group" in gives, differs or {})


WEIGHT, OUTPUT, INPUT, NODE = "{}.weight", "{}#0", "{}#0.input", "{}#0/{node}Backward[0]"
BOTH = "value, group"
# What a row does differently, by situation.
FLOWS = {
    "outlives": "acts",
    "without_gradients": "acts",
    "checkpointed": "twice",
}
WAITS = {"without_gradients": r"\(frozen\)"}  # it may be trained later
NEEDS = {"without_gradients": "needs no gradient"}
NO_NODE = {"without_gradients": "no node"}
UNSAVED = {"without_gradients": "saves no such tensor"}
REFUSED = NO_NODE | {"checkpointed": "refuses the hooks of others", "order": "takes one alone"}
OWN_THREAD = {"threads": "reported", "checkpointed": "refused by PyTorch"}
EDITS = {"interrupted": "edits"}

ROWS = {
    "Parameters backward": _row("Parameters", WEIGHT, "value", stage="backward"),
    "Parameters accumulated": _row("Parameters", WEIGHT, "value", stage="accumulated"),
    "Parameters backward_end": _row("Parameters", WEIGHT, BOTH, stage="backward_end"),
    "Parameters step": _row("Parameters", WEIGHT, BOTH, WAITS, stage="step"),
    "Buckets sent": _row("Buckets", WEIGHT, "value"),
    "Buckets reduced": _row("Buckets", WEIGHT, "value", stage="reduced"),
    "Weights step": _row("Weights", WEIGHT, "group", WAITS),
    "Weights forward": _row("Weights", WEIGHT, "group", EDITS, stage="forward"),
    "Updates": _row("Updates", WEIGHT, BOTH, WAITS),
    "Captured": _row("Captured", WEIGHT, "value", OWN_THREAD),
    "Uses": _row("Uses", "{}.weight/use[0]"),
    "Outputs": _row("Outputs", OUTPUT, "value", NEEDS),
    "Inputs branch": _row("Inputs", INPUT, "value", NEEDS),
    "Inputs total": _row("Inputs", INPUT, "value", NEEDS, path="total"),
    "Nodes": _row("Nodes", NODE, "", NO_NODE),
    "ModuleGradients pre": _row("ModuleGradients", OUTPUT, "", NEEDS),
    "ModuleGradients": _row("ModuleGradients", INPUT, "", NEEDS, kind="full_backward"),
    "EveryModule forward pre": _row("EveryModule", INPUT, "", FLOWS, kind="forward_pre"),
    "EveryModule forward": _row("EveryModule", OUTPUT, "", FLOWS),
    "EveryModule backward pre": _row("EveryModule", OUTPUT, "", NEEDS, kind="full_backward_pre"),
    "EveryModule backward": _row("EveryModule", INPUT, "", NEEDS, kind="full_backward"),
    "Activations": _row("Activations", OUTPUT, "", FLOWS),
    "Activations input": _row("Activations", INPUT, "", FLOWS, side="input", backward="straight"),
    "SavedTensors": _row("SavedTensors", "{}#0.0", "", UNSAVED),
    "SavedTensors node": _row(
        "SavedTensors", NODE + ".{saved}", "", REFUSED, node="re:Addmm|Mm|Relu"
    ),
}


class Fragile(nn.Module):
    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x.tanh()


class Shared(nn.Module):
    """Calls a layer twice; what is between the calls may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.between = Fragile()
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(self.between(self.shared(x))))


class Saved(nn.Module):
    """A net, perhaps in a checkpoint."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.inner, self.reentrant = Net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.inner(x)
        return recomputed(self.inner, x, self.reentrant)


def _ready(make: Callable[[], nn.Module] = Net) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(0)
    model = make()
    return model, sgd(model)


def _x(step: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()


def _backward(at: Selector, model: nn.Module, loss: Tensor) -> None:
    if any(isinstance(kind, gs.Captured) for kind in at.kinds):
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad
    else:
        loss.backward()


def _step(at: Selector, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    optimizer.zero_grad()
    x = batch(step)[0].view(-1, 2, FEATURES // 2) if hasattr(model, "conv") else _x(step)
    _backward(at, model, model(x).square().sum())
    optimizer.step()


def _same(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, weights(first), weights(second)))


class Hooks(NamedTuple):
    """All that an attachment may leave behind."""

    of_model: int
    of_process: int
    modes: int
    saved: object
    flags: list[bool | None]
    filters: int

    @classmethod
    def now(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> "Hooks":
        return cls(
            num_hooks(model, optimizer),
            sum(len(vars(process)[table]) for table in TABLES),
            len(autograd.function_modes()),
            autograd.saved_tensor_hooks(),
            [process._global_is_full_backward_hook]
            + [module._is_full_backward_hook for module in model.modules()],
            len(warnings.filters),
        )


@contextmanager
def _hooks_gone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Hooks]:
    before = Hooks.now(model, optimizer)
    yield before
    assert Hooks.now(model, optimizer) == before


def _met(live: gs.Live) -> dict[str, int]:
    """Return the number of calls at each site that has seen any."""
    return {entry.site: entry.calls for entry in live.ledger if entry.calls}


def _trained(
    at: Selector,
    *transforms: Transform,
    make: Callable[[], nn.Module] = Net,
    steps: int = 2,
    before: Callable[[nn.Module, int], object] = lambda model, step: None,
    shadow: bool = False,
) -> tuple[nn.Module, gs.Live]:
    """Train a model with these transforms, calling `before` in the block before each step."""
    model, optimizer = _ready(make)
    surgery = gs.Surgery(*(gs.Intervention(transform, at) for transform in transforms))
    with _hooks_gone(model, optimizer), surgery.attach(model, optimizer, shadow=shadow) as live:
        for step in range(steps):
            before(model, step)
            _step(at, model, optimizer, step)
    return model, live


# The situations


def no_op(row: Row) -> None:
    """A surgery that changes nothing, or in shadow, leaves training bit-identical."""

    def seed(model: nn.Module, step: int) -> None:
        if not step:
            torch.manual_seed(1)

    model, optimizer = _ready(noisy)
    for step in range(3):
        seed(model, step)
        _step(row.at("*"), model, optimizer, step)
    for transform, shadow, is_same in (
        (gs.Identity(), False, True),
        (DOUBLE, True, True),
        (DOUBLE, False, False),
    ):
        other, _ = _trained(row.at("*"), transform, make=noisy, steps=3, before=seed, shadow=shadow)
        assert _same(other, model) == is_same


def hooks(row: Row) -> None:
    """Hooks are gone after the block, and after an exception in it or in the forward."""
    model, optimizer = _ready(Shared)
    with _hooks_gone(model, optimizer) as before:
        with attached(model, gs.Identity(), row.at("shared"), optimizer):
            _step(row.at("*"), model, optimizer)
            assert Hooks.now(model, optimizer) != before
        for fails in (False, True):
            with (
                pytest.raises(OSError, match="gone"),
                attached(model, gs.Identity(), row.at("shared"), optimizer),
            ):
                _step(row.at("*"), model, optimizer)
                model.between.error = OSError("gone") if fails else None
                _step(row.at("*"), model, optimizer)
                raise OSError("gone")
            model.between.error = None


def error_in_the_transform(row: Row) -> None:
    """An error of the transform, or a result of another shape, names the site."""

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("wrong")

    (site,) = row.sites("first")
    for function, expected in ((fail, ArithmeticError), (lambda grad: grad[:1], TypeError)):
        model, optimizer = _ready()
        with (
            _hooks_gone(model, optimizer),
            pytest.raises(expected) as caught,
            attached(model, Acts(function), row.at("first"), optimizer),
        ):
            _step(row.at("*"), model, optimizer)
        assert f"site '{site}'" in f"{caught.value} {getattr(caught.value, '__notes__', '')}"


def kept_alive(row: Row) -> None:
    """Neither tensors of a step nor the model are kept alive."""
    (model, optimizer), held = _ready(), list[ref[Any]]()  # Any: tensors, modules
    model.act.register_forward_hook(lambda *given: held.append(ref(given[2])))
    transform = gs.ScaleBySign(of="value") if row.value else DOUBLE
    with attached(model, transform, row.at("*"), optimizer) as live:
        for is_read in (True, True, False):
            x = _x()
            y = model(x)
            held += [ref(x), ref(y)]
            if is_read:
                _backward(row.at("*"), model, y.sum())
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
        _step(row.at("*"), model, optimizer)
        optimizer.zero_grad()
        loss = model(_x()).square().sum()
    plain = copy.deepcopy(model)
    _backward(row.at("*"), model, loss)
    optimizer.step()
    _step(row.at("*"), plain, sgd(plain))
    assert _same(model, plain) == (row.differs.get("outlives") != "acts")


def interrupted(row: Row) -> None:
    """A forward pass that raises leaves no trace in the next one."""

    def fail(model: nn.Module, step: int) -> None:
        for error in (OSError, KeyboardInterrupt) if not step else ():
            model.between.error = error("gone")
            with pytest.raises(error):
                model(_x())
        model.between.error = None

    model, live = _trained(row.at("shared"), DOUBLE, make=Shared, before=fail)
    plain, expected = _trained(row.at("shared"), DOUBLE, make=Shared)
    assert {*_met(live)} == {*_met(expected)}
    if row.differs.get("interrupted") != "edits":
        assert _same(model, plain)


def evaluation(row: Row) -> None:
    """An evaluation without gradients changes neither training nor the reasons in the ledger."""

    def evaluate(model: nn.Module, step: int) -> None:
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                model.eval()(_x().detach())
                model.train()

    model, live = _trained(row.at("*"), DOUBLE, before=evaluate)
    plain, expected = _trained(row.at("*"), DOUBLE)
    assert "needs no gradient" not in live.ledger.table()
    assert {*_met(live)} == {*_met(expected)} == row.all_sites
    assert _same(model, plain)


def order(row: Row) -> None:
    """Interventions at one site act one after the other."""
    signed, reverse = gs.ScaleBySign(positive=3.0, negative=1.0), gs.Scale(-1.0)

    def trained(*transforms: Transform) -> nn.Module:
        return _trained(row.at("last"), *transforms, steps=1)[0]

    if row.differs.get("order") == "takes one alone":
        with pytest.raises(RuntimeError, match="one pair alone"):
            trained(signed, reverse)
        return
    chained = trained(gs.Chain(signed, reverse))
    torch.testing.assert_close(weights(trained(signed, reverse)), weights(chained))
    assert not _same(chained, trained(reverse, signed))


def added(row: Row) -> None:
    """An intervention can be added and removed between two steps."""
    (model, optimizer), (other, of_other) = _ready(), _ready()
    with attached(model, gs.Identity(), gs.Parameters(), optimizer) as live:
        _step(row.at("*"), model, optimizer)
        label = live.add(gs.Intervention(DOUBLE, row.at("*")))
        _step(row.at("*"), model, optimizer)
        live.remove(label)
        _step(row.at("*"), model, optimizer)
    _step(row.at("*"), other, of_other)
    with attached(other, DOUBLE, row.at("*"), of_other):
        _step(row.at("*"), other, of_other)
    _step(row.at("*"), other, of_other)
    assert _same(model, other)


def effects(row: Row) -> None:
    """The norms before and after a transform are measured at each site."""
    _, live = _trained(row.at("*"), DOUBLE, steps=1)
    rows = {str(one["site"]): one for one in live.effects.rows()}
    assert {*rows} == row.all_sites
    for one in rows.values():
        before = float(str(one["norm_before"]))
        assert before > 0
        assert one["norm_after"] == pytest.approx(2 * before, rel=1e-5)


def combined(row: Row) -> None:
    """Selectors of the kind combine as sets, and their sites are counted."""

    def met(at: Selector) -> set[str]:
        calls = _met(_trained(at, gs.Identity(), steps=1)[1])
        assert {*calls.values()} == {1}
        return {*calls}

    at, sites = row.at, row.sites
    everything = row.all_sites
    assert met(at("*")) == everything
    assert met(at("first") | at("last")) == sites("first", "last")
    assert met(at("*") & ~at("first")) == everything - sites("first")
    assert met(at("*") & at("last")) == sites("last")
    assert met(at("*").first(1)) == sites("first")
    assert met(at("*").where(lambda place: "last" in place.name)) == sites("last")
    assert met(at("*").expect(len(everything))) == everything
    with pytest.raises(LookupError, match="sites were expected"):
        met(at("*").expect(len(everything) + 1))


def nothing_matches(row: Row) -> None:
    """A name that nothing has is refused with the nearest one, and no hook remains."""
    model, optimizer = _ready()
    with _hooks_gone(model, optimizer):
        if isinstance(row.at("*"), gs.EveryModule):  # a module outside the model may have it
            with (
                pytest.warns(gs.SurgeryWarning, match="none of its sites was met"),
                attached(model, gs.Identity(), row.at("frist"), optimizer),
            ):
                _step(row.at("*"), model, optimizer)
            return
        with pytest.raises(LookupError, match="Did you mean 'first"):
            attached(model, gs.Identity(), row.at("frist"), optimizer)


def without_gradients(row: Row) -> None:
    """A frozen parameter is skipped, and refused alone; other sites there are reported."""
    model, optimizer = _ready()
    model.first.requires_grad_(False)

    def train(at: Selector) -> gs.Live:
        with attached(model, DOUBLE, at, optimizer) as live:
            optimizer.zero_grad()
            params = [param for param in model.parameters() if param.requires_grad]
            loss = model(_x().detach()).square().sum()
            if isinstance(at, gs.Captured):
                torch.autograd.grad(loss, params)
            else:
                loss.backward()
            optimizer.step()
        return live

    match row.differs.get("without_gradients", "frozen"):
        case "frozen":
            live = train(row.at("*"))
            assert {*_met(live)} == row.sites("last")
            assert "frozen" in {entry.skipped for entry in live.ledger}
            with pytest.raises(LookupError, match="frozen"):
                train(row.at("first"))
        case "acts":
            assert {*_met(train(row.at("first")))} == row.sites("first")
        case "no node":
            with pytest.raises(LookupError):
                train(row.at("first"))
        case reason:
            with pytest.warns(gs.SurgeryWarning, match=reason):
                train(row.at("first"))


def needs(row: Row) -> None:
    """A transform that needs more than the kind gives is refused, as is a stage of another."""
    for given, transform in ((row.value, gs.AGC()), (row.group, gs.ClipGlobalNorm())):
        with nullcontext() if given else pytest.raises(ValueError, match="needs"):
            gs.Intervention(transform, row.at("first"))
    stage = "captured" if not isinstance(row.at("*"), gs.Captured) else "step"
    with pytest.raises(ValueError, match=f"cannot have stage '{stage}'"):
        gs.Intervention(gs.Zero(), replace(row.at("first"), stage=stage))


def threads(row: Row) -> None:
    """Forward passes in two threads at once have the sites and gradients of one after another."""

    def trained(at_once: bool) -> tuple[dict[str, int], list[Tensor]]:
        (model, optimizer), barrier, grads = _ready(Shared), threading.Barrier(2), list[Tensor]()

        def wait(*given: object) -> None:
            if at_once:
                barrier.wait(timeout=10)

        def work() -> None:
            x = _x()
            model(x).square().sum().backward()
            assert x.grad is not None
            grads.append(x.grad)

        model.shared.register_forward_hook(wait)
        transform = DOUBLE if row.of_modules else gs.Identity()
        with attached(model, transform, row.at("shared"), optimizer, effects_every=0) as live:
            workers = [threading.Thread(target=work) for _ in range(2)]
            for worker in workers:
                worker.start() if at_once else worker.run()
            for worker in workers if at_once else ():
                worker.join()
            optimizer.step()
        return _met(live), grads

    if row.differs.get("threads") == "reported":
        with pytest.warns(gs.SurgeryWarning, match="no gradient ever passed"):
            trained(True)
        return
    (met, grads), (expected, serial) = trained(True), trained(False)
    assert met == expected
    assert met
    torch.testing.assert_close(grads, serial)


def checkpointed(row: Row) -> None:
    """A checkpoint changes neither gradients nor sites; a value is changed again in it."""

    def trained(reentrant: bool | None) -> tuple[dict[str, int], nn.Module]:
        model, live = _trained(row.at("inner.first"), DOUBLE, make=lambda: Saved(reentrant))
        return _met(live), model

    met, model = trained(None)
    difference = row.differs.get("checkpointed")
    for reentrant in (False, True):
        if difference == ("refused by PyTorch" if reentrant else "refuses the hooks of others"):
            with pytest.raises(RuntimeError):
                trained(reentrant)
            continue
        again, other = trained(reentrant)
        factor = 2 if difference == "twice" else 1
        assert again == {site: factor * calls for site, calls in met.items()}
        torch.testing.assert_close(weights(other), weights(model))


def calls(row: Row) -> None:
    """Calls of a shared module are sites, `call` picks one, and outside the model it is call 0."""
    if not row.of_modules:
        return
    (site,) = row.sites("shared")
    both = {site, site.replace("#0", "#1")}

    def met(act: Callable[[nn.Module, Tensor], Tensor], **fields: int) -> dict[str, int]:
        model, optimizer = _ready(Shared)
        at = replace(row.at("shared"), **fields) if fields else row.at("shared")
        with _hooks_gone(model, optimizer), attached(model, DOUBLE, at, optimizer) as live:
            for step in range(2):
                act(model, _x(step)).square().sum().backward()
        return _met(live)

    assert met(lambda model, x: model(x)) == dict.fromkeys(both, 2)
    assert met(lambda model, x: model.shared(x)) == {site: 2}
    if hasattr(row.at("*"), "call"):
        assert met(lambda model, x: model(x), call=0) == {site: 2}
        assert met(lambda model, x: model(x), call=1) == dict.fromkeys(both - {site}, 2)
        with pytest.raises(LookupError):
            met(lambda model, x: model(x), call=7)


SITUATIONS: dict[str, Callable[[Row], None]] = {
    function.__name__: function
    for function in (
        *(no_op, hooks, error_in_the_transform, kept_alive, outlives, interrupted, evaluation),
        *(order, added, effects, combined, nothing_matches, without_gradients, needs, threads),
        *(checkpointed, calls),
    )
}
