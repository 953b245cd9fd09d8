"""Changes while a surgery runs, and exceptions, at every kind of site."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import gradsurg as gs
from tests.oracle.core_models import Mlp, Twice, batches
from tests.oracle.core_outcome import Cell, Observed
from tests.oracle.core_sites import KINDS
from tests.oracle.core_training import LOSS


class Setup:
    """A model with an optimizer, and steps of training."""

    def __init__(self, observed: Observed, model: nn.Module | None = None) -> None:
        self.observed = observed
        self.model = Mlp() if model is None else model
        self.optimizer: Optimizer = SGD(self.model.parameters(), 0.1, momentum=0.9)
        observed.watch(self.model, self.optimizer)
        self.source = batches(self.model)

    def steps(self, count: int, call: Callable[[Tensor], Tensor] | None = None) -> None:
        for x, y in islice(self.source, count):
            self.optimizer.zero_grad()
            LOSS((call or self.model)(x), y).backward()
            self.optimizer.step()

    def captured_steps(self, count: int) -> None:
        """Steps with the gradients of `autograd.grad`, then as usual."""
        for x, y in islice(self.source, count):
            params = [param for param in self.model.parameters() if param.requires_grad]
            self.optimizer.zero_grad()
            grads = torch.autograd.grad(LOSS(self.model(x), y), params)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            self.optimizer.step()
        self.steps(count)


def of(*transforms: Any, at: Any = None, **fields: Any) -> gs.Surgery:
    items = [gs.Intervention(each, at=at or gs.Parameters(), **fields) for each in transforms]
    return gs.Surgery(*items)


class _Failure(Exception):
    """Raised by user code."""


def _user_code_raises(at: Callable[[], Any], observed: Observed) -> None:
    setup = Setup(observed)
    surgery = of(gs.Momentum(0.9), at=at())
    with contextlib.suppress(_Failure), surgery.attach(setup.model, setup.optimizer):
        setup.captured_steps(1)
        raise _Failure
    observed.outcome.acts = True
    observed.note("attached", surgery.is_attached)
    setup.steps(1)


def _transform_raises(at: Callable[[], Any], observed: Observed) -> None:
    setup = Setup(observed)
    calls = []

    def transform(grad: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise _Failure
        return grad * 0.5

    raised = ""
    try:
        with of(transform, at=at()).attach(setup.model, setup.optimizer):
            setup.captured_steps(3)
    except Exception as error:  # which exception carries that of a hook is up to PyTorch
        raised = type(error).__name__
    observed.outcome.acts = bool(calls)
    observed.note("raised", raised)
    setup.steps(1)


def _attach_fails(at: Callable[[], Any], observed: Observed) -> None:
    setup = Setup(observed)
    good, bad = gs.Intervention(gs.Clip(), at=at()), gs.Intervention(gs.Clip(), gs.Outputs("none"))
    surgery = gs.Surgery(good, bad)
    refused = True
    with contextlib.suppress(LookupError), surgery.attach(setup.model, setup.optimizer):
        refused = False
    observed.note("refused", refused)
    observed.outcome.acts = True
    setup.steps(1)


def _change_while_running(at: Callable[[], Any], observed: Observed) -> None:
    """Add, set, replace a trigger and remove, each between two steps."""
    setup = Setup(observed)
    surgery = of(gs.Momentum(0.5), at=at())
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.captured_steps(1)
        label = live.add(gs.Intervention(gs.AddNoise(sigma=0.1), at=at()))
        setup.captured_steps(1)
        live.set("momentum", decay=0.9)
        live.set(label, when=gs.Every(2))
        setup.captured_steps(1)
        observed.note("labels", [list(labels) for labels in live.labels])
        live.remove(label)
        setup.captured_steps(1)
    observed.take(surgery, live)


def _change_in_backward(at: Callable[[], Any], observed: Observed) -> None:
    """Remove and add inside a backward pass, in which it has no effect yet."""
    setup = Setup(observed)
    surgery = of(gs.Scale(0.5), at=at())
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.captured_steps(1)
        x, y = next(setup.source)
        out = setup.model(x)

        def change(grad: Tensor) -> None:
            live.remove("scale")
            live.add(gs.Intervention(gs.Clip(0.01), at=at()))

        out.register_hook(change)
        LOSS(out, y).backward()
        setup.optimizer.step()
        setup.captured_steps(2)
    observed.take(surgery, live)


def _twice_attached(at: Callable[[], Any], observed: Observed) -> None:
    """A second block of one surgery goes on with its states; between them nothing acts."""
    setup = Setup(observed)
    surgery = of(gs.Momentum(0.9), at=at())
    for steps in (1, 2):
        with surgery.attach(setup.model, setup.optimizer, steps_per_epoch=2) as live:
            setup.captured_steps(steps)
        observed.take(surgery, live)
        setup.captured_steps(1)


def _two_surgeries(at: Callable[[], Any], observed: Observed) -> None:
    setup = Setup(observed, Twice())
    first, second = of(gs.Scale(0.5), at=at()), of(gs.Clip(0.01), at=at())
    with first.attach(setup.model, setup.optimizer) as live:
        setup.captured_steps(1)
        with second.attach(setup.model, setup.optimizer):
            setup.captured_steps(1)
        setup.captured_steps(1)
    observed.take(first, live)


def _copies(at: Callable[[], Any], observed: Observed) -> None:
    """A copy made inside the block, and weights that are replaced."""
    setup = Setup(observed)
    surgery = of(gs.Scale(0.5), at=at())
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.captured_steps(1)
        other = Setup(observed, copy.deepcopy(setup.model))
        other.captured_steps(1)
        setup.model.load_state_dict(copy.deepcopy(other.model.state_dict()), assign=True)
        setup.optimizer = SGD(setup.model.parameters(), 0.1)
        setup.captured_steps(1)
    observed.take(surgery, live)


def _late_parts(at: Callable[[], Any], observed: Observed) -> None:
    """A module replaced, a parameter frozen, and one unfrozen while the block is open."""
    setup = Setup(observed)
    setup.model.lin_c.bias.requires_grad_(False)
    surgery = of(gs.Scale(0.5), at=at())
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.captured_steps(1)
        setup.model.lin_b = nn.Linear(8, 8)
        setup.model.lin_c.bias.requires_grad_(True)
        setup.captured_steps(1)
    observed.take(surgery, live)


BY_KIND: dict[str, Callable[[Callable[[], Any], Observed], None]] = {
    "user code raises": _user_code_raises,
    "a transform raises": _transform_raises,
    "attach fails": _attach_fails,
    "add, set, remove": _change_while_running,
    "changes in a backward": _change_in_backward,
    "two blocks": _twice_attached,
    "two surgeries": _two_surgeries,
    "copies": _copies,
    "late parts": _late_parts,
}


def cells() -> Iterator[Cell]:
    """Yield each change at each kind of site."""
    for kind, at in KINDS.items():
        for name, run in BY_KIND.items():
            yield Cell(kind, "changes", name, partial(run, at))
