"""Situations with code of their own: changes while it runs, exceptions, other hooks, `gs.hook`."""

import contextlib
import copy
import gc
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

import gradsurg as gs
from tests.oracle.core_models import Mlp, Twice, batches
from tests.oracle.core_outcome import Cell, Observed
from tests.oracle.core_sites import KINDS
from tests.oracle.core_training import LOSS

Run = Callable[[Observed], None]
RUNS: list[Run] = []


def situation(run: Run) -> Run:
    RUNS.append(run)
    return run


def cells() -> Iterator[Cell]:
    """Yield the situations, and those that are run for several kinds of site."""
    for run in RUNS:
        yield Cell("situations", "plain", run.__name__.strip("_").replace("_", " "), run)
    for kind, at in KINDS.items():
        for name, run in BY_KIND.items():
            yield Cell(
                kind, "exceptions, changes", name, lambda seen, at=at, run=run: run(seen, at)
            )


class _Setup:
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


def _of(*transforms: Any, at: Any = None, **fields: Any) -> gs.Surgery:
    items = [gs.Intervention(each, at=at or gs.Parameters(), **fields) for each in transforms]
    return gs.Surgery(*items)


class _Failure(Exception):
    """Raised by user code."""


def _user_code_raises(observed: Observed, at: Callable[[], Any]) -> None:
    setup = _Setup(observed)
    surgery = _of(gs.Momentum(0.9), at=at())
    with contextlib.suppress(_Failure), surgery.attach(setup.model, setup.optimizer):
        setup.captured_steps(1)
        raise _Failure
    observed.outcome.acts = True
    observed.note("attached", surgery.is_attached)
    setup.steps(1)


def _transform_raises(observed: Observed, at: Callable[[], Any]) -> None:
    setup = _Setup(observed)
    calls = []

    def transform(grad: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise _Failure
        return grad * 0.5

    raised = ""
    try:
        with _of(transform, at=at()).attach(setup.model, setup.optimizer):
            setup.captured_steps(3)
    except Exception as error:  # which exception carries that of a hook is up to PyTorch
        raised = type(error).__name__
    observed.outcome.acts = bool(calls)
    observed.note("raised", raised)
    setup.steps(1)


def _attach_fails(observed: Observed, at: Callable[[], Any]) -> None:
    setup = _Setup(observed)
    good, bad = gs.Intervention(gs.Clip(), at=at()), gs.Intervention(gs.Clip(), gs.Outputs("none"))
    surgery = gs.Surgery(good, bad)
    with contextlib.suppress(LookupError), surgery.attach(setup.model, setup.optimizer):
        raise AssertionError("nothing matches")
    observed.outcome.acts = True
    setup.steps(1)


def _change_while_running(observed: Observed, at: Callable[[], Any]) -> None:
    """Add, set, replace a trigger and remove, each between two steps."""
    setup = _Setup(observed)
    surgery = _of(gs.Momentum(0.5), at=at())
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


def _change_in_backward(observed: Observed, at: Callable[[], Any]) -> None:
    """Remove and add inside a backward pass, in which it has no effect yet."""
    setup = _Setup(observed)
    surgery = _of(gs.Scale(0.5), at=at())
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


def _twice_attached(observed: Observed, at: Callable[[], Any]) -> None:
    """A second block of one surgery goes on with its states; between them nothing acts."""
    setup = _Setup(observed)
    surgery = _of(gs.Momentum(0.9), at=at())
    for _ in range(2):
        with surgery.attach(setup.model, setup.optimizer, steps_per_epoch=2) as live:
            setup.captured_steps(1)
        setup.captured_steps(1)
    observed.take(surgery, live)


def _two_surgeries(observed: Observed, at: Callable[[], Any]) -> None:
    setup = _Setup(observed, Twice())
    first, second = _of(gs.Scale(0.5), at=at()), _of(gs.Clip(0.01), at=at())
    with first.attach(setup.model, setup.optimizer) as live:
        setup.captured_steps(1)
        with second.attach(setup.model, setup.optimizer):
            setup.captured_steps(1)
        setup.captured_steps(1)
    observed.take(first, live)


def _copies(observed: Observed, at: Callable[[], Any]) -> None:
    """A copy made inside the block, and weights that are replaced."""
    setup = _Setup(observed)
    surgery = _of(gs.Scale(0.5), at=at())
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.captured_steps(1)
        other = _Setup(observed, copy.deepcopy(setup.model))
        other.captured_steps(1)
        setup.model.load_state_dict(copy.deepcopy(other.model.state_dict()), assign=True)
        setup.optimizer = SGD(setup.model.parameters(), 0.1)
        setup.captured_steps(1)
    observed.take(surgery, live)


def _late_parts(observed: Observed, at: Callable[[], Any]) -> None:
    """A module replaced, a parameter frozen, and one unfrozen while the block is open."""
    setup = _Setup(observed)
    setup.model.lin_c.bias.requires_grad_(False)
    surgery = _of(gs.Scale(0.5), at=at())
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.captured_steps(1)
        setup.model.lin_b = nn.Linear(8, 8)
        setup.model.lin_c.bias.requires_grad_(True)
        setup.captured_steps(1)
    observed.take(surgery, live)


BY_KIND: dict[str, Callable[[Observed, Callable[[], Any]], None]] = {
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


@situation
def two_optimizers(observed: Observed) -> None:
    setup = _Setup(observed)
    params = list(setup.model.parameters())
    parts = [SGD(params[:2], 0.1), torch.optim.AdamW(params[2:], 0.01)]
    surgery = gs.Surgery(
        gs.Intervention(gs.ClipGlobalNorm(0.1), at=gs.Parameters(stage="step")),
        gs.Intervention(gs.Cautious(), at=gs.Updates()),
        gs.Intervention(gs.Momentum(0.5), at=gs.Parameters("lin_?.bias"), when=gs.Steps(1)),
    )
    with surgery.attach(setup.model, parts, clock=parts[1]) as live:
        for number, (x, y) in enumerate(islice(setup.source, 4)):
            LOSS(setup.model(x), y).backward()
            for part in parts[number % 2 :]:
                part.step()
                part.zero_grad()
    observed.take(surgery, live)


@situation
def lbfgs(observed: Observed) -> None:
    setup = _Setup(observed)
    optimizer = LBFGS(setup.model.parameters(), max_iter=3)
    surgery = gs.Surgery(
        gs.Intervention(gs.Clip(0.1)),
        gs.Intervention(gs.Momentum(0.5), at=gs.Parameters(stage="step")),
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = LOSS(setup.model(x), y)
        loss.backward()
        return loss

    with surgery.attach(setup.model, optimizer) as live:
        for _ in range(3):
            x, y = next(setup.source)
            optimizer.step(closure)
    observed.take(surgery, live)


@situation
def start_bind_close(observed: Observed) -> None:
    setup = _Setup(observed)
    surgery = _of(gs.ClipGlobalNorm(0.1), gs.AddNoise(), at=gs.Parameters(stage="step"))
    live = surgery.start(setup.model)
    setup.steps(1)
    live.bind(setup.optimizer)
    setup.steps(1)
    setup.optimizer = SGD(setup.model.parameters(), 0.05)
    live.bind(setup.optimizer)
    setup.steps(2)
    live.close()
    observed.take(surgery, live)


@situation
def never_closed(observed: Observed) -> None:
    setup = _Setup(observed)
    live = _of(gs.Clip(0.1)).attach(setup.model, setup.optimizer)
    setup.steps(1)
    del live
    gc.collect()
    setup.steps(1)
    observed.outcome.acts = True


@situation
def before_step_and_tick(observed: Observed) -> None:
    setup = _Setup(observed)
    surgery = _of(gs.ClipNorm(0.05), gs.Momentum(0.5), at=gs.Parameters(stage="step"))
    with surgery.attach(setup.model, setup.optimizer) as live:
        for x, y in islice(setup.source, 3):
            setup.optimizer.zero_grad()
            LOSS(setup.model(x), y).backward()
            live.before_step()
            nn.utils.clip_grad_norm_(setup.model.parameters(), 0.1)
            setup.optimizer.step()
    observed.take(surgery, live)


@situation
def ticks_without_an_optimizer(observed: Observed) -> None:
    setup = _Setup(observed)
    surgery = _of(gs.AddNoise(), when=gs.Epochs(start=1) | gs.Every(2))
    with surgery.attach(setup.model) as live:
        for _ in range(4):
            setup.steps(1)
            live.tick()
            live.next_epoch()
    observed.take(surgery, live)


@situation
def numbers_between(observed: Observed) -> None:
    setup = _Setup(observed)
    surgery = _of(gs.Clip(0.01), gs.Scale(2.0), at=gs.Parameters("*.weight"), when=gs.Every(2))
    with surgery.attach(setup.model, setup.optimizer, effects_every=2) as live:
        for number in range(4):
            setup.steps(1)
            observed.note(f"numbers {number}", live.effects.numbers())
    observed.note("quantiles", live.effects.quantiles("clip", [0.1, 0.5, 0.9]))
    observed.take(surgery, live)


@situation
def gradients_that_are_not_finite(observed: Observed) -> None:
    setup = _Setup(observed)
    surgery = gs.Surgery(
        gs.Intervention(gs.Sanitize(), at=gs.Outputs("lin_b")),
        gs.Intervention(gs.SkipUpdate(), at=gs.Parameters(stage="step")),
    )
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.steps(1)
        setup.steps(1, call=lambda x: setup.model(x) * float("nan"))
        setup.steps(1)
    observed.note("skipped", live.skipped_steps)
    observed.take(surgery, live)


@situation
def a_transform_that_makes_infinities(observed: Observed) -> None:
    setup = _Setup(observed)
    surgery = _of(lambda grad: grad / 0.0, at=gs.Parameters("lin_a.*"))
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.steps(2)
    first = live.effects.first_nonfinite
    observed.note("first", None if first is None else list(first))
    observed.take(surgery, live)


@situation
def hooks_of_others(observed: Observed) -> None:
    """The user's hooks, before and after those of a surgery, see the same values as ever."""
    setup = _Setup(observed)
    seen: dict[str, list[Tensor]] = {}

    def watch(when: str) -> list[Any]:
        def note(name: str, *tensors: Tensor | None) -> None:
            given = (tensor for tensor in tensors if tensor is not None)
            seen.setdefault(f"{when} {name}", []).extend(each.detach().clone() for each in given)

        module, param = setup.model.lin_b, setup.model.lin_b.weight
        return [
            module.register_full_backward_hook(
                lambda module, ins, outs: note("module", *ins, *outs)
            ),
            module.register_forward_hook(lambda module, args, out: note("output", *args, out)),
            param.register_hook(lambda grad: note("gradient", grad)),
            param.register_post_accumulate_grad_hook(lambda param: note("sum", param.grad)),
            setup.optimizer.register_step_pre_hook(lambda *_: note("step", param.grad)),
            setup.optimizer.register_step_post_hook(lambda *_: note("after", param)),
        ]

    kinds = ("Parameters backward", "Parameters accumulated", "Parameters step", "Outputs")
    kinds += ("Inputs branch", "Activations", "Updates", "Weights step", "Group backward_end")
    surgery = gs.Surgery(*(gs.Intervention(gs.Scale(0.5), at=KINDS[kind]()) for kind in kinds))
    handles = watch("before")
    with surgery.attach(setup.model, setup.optimizer) as live:
        handles += watch("inside")
        setup.steps(2)
    for name, tensors in seen.items():
        observed.note(name, tensors)
    for handle in handles:
        handle.remove()
    observed.take(surgery, live)


@situation
def hook_of_a_tensor(observed: Observed) -> None:
    _hook(observed, lambda model, h, loss: h, gs.Clip(0.001))


@situation
def hook_of_a_tensor_with_noise(observed: Observed) -> None:
    _hook(observed, lambda model, h, loss: h, gs.AddNoise(sigma=0.1))


@situation
def hook_of_a_node(observed: Observed) -> None:
    _hook(observed, lambda model, h, loss: loss.grad_fn, gs.Scale(3.0))


@situation
def hook_of_a_parameter_with_a_state(observed: Observed) -> None:
    _hook(observed, lambda model, h, loss: model.lin_a.weight, gs.Momentum(0.9))


def _hook(observed: Observed, place: Callable[..., Any], transform: Any) -> None:
    setup = _Setup(observed)
    for x, y in islice(setup.source, 3):
        h = setup.model.features(x)
        loss = LOSS(setup.model.lin_c(h), y)
        setup.optimizer.zero_grad()
        with gs.hook(place(setup.model, h, loss), transform):
            loss.backward()
        setup.optimizer.step()
    observed.outcome.acts = True


@situation
def captured_outputs(observed: Observed) -> None:
    setup = _Setup(observed, Twice())
    kept: list[Tensor] = []
    for module in (setup.model.lin_a, setup.model.lin_b):
        module.register_forward_hook(lambda module, args, out: kept.append(out))
    surgery = _of(gs.Clip(0.01), at=gs.Captured("lin_*"))
    with surgery.attach(setup.model, setup.optimizer) as live:
        for x, y in islice(setup.source, 3):
            kept.clear()
            loss = LOSS(setup.model(x), y)
            observed.note(f"step {live.step}", list(torch.autograd.grad(loss, kept)))
            setup.optimizer.step()
    observed.take(surgery, live)


@situation
def batched_gradients(observed: Observed) -> None:
    setup = _Setup(observed)
    surgery = _of(gs.Clip(0.1), gs.ScaleBySign(1.0, 0.5), at=gs.Outputs("*"))
    with surgery.attach(setup.model, setup.optimizer) as live:
        out = setup.model(next(setup.source)[0])
        rows = torch.eye(out.numel()).reshape(-1, *out.shape)
        params: Iterable[Tensor] = list(setup.model.parameters())
        grads = torch.autograd.grad(out, params, rows, is_grads_batched=True)
    observed.note("grads", list(grads))
    observed.take(surgery, live)


@situation
def vmap_of_grad(observed: Observed) -> None:
    setup = _Setup(observed)
    params = {name: param.detach() for name, param in setup.model.named_parameters()}
    x, y = next(setup.source)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return LOSS(torch.func.functional_call(setup.model, params, (x[None],)), y[None])

    surgery = _of(gs.Clip(0.1), at=gs.Outputs("*"))
    with surgery.attach(setup.model, setup.optimizer) as live:
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
    observed.note("grads", list(grads.values()))
    observed.take(surgery, live)


@situation
def a_step_that_trains_a_part(observed: Observed) -> None:
    """Parameters and modules that some steps do not reach."""
    setup = _Setup(observed)
    kinds = ("Parameters backward", "Parameters step", "Outputs", "Group backward_end", "Updates")
    surgery = gs.Surgery(*(gs.Intervention(gs.Momentum(), at=KINDS[kind]()) for kind in kinds))
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.steps(1)
        setup.steps(1, call=lambda x: setup.model.lin_b(setup.model.act_a(setup.model.lin_a(x))))
        setup.steps(1)
    observed.take(surgery, live)


@situation
def an_unknown_scaler(observed: Observed) -> None:
    setup = _Setup(observed)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    surgery = _of(gs.Clip(0.01))
    with surgery.attach(setup.model, setup.optimizer) as live:
        for x, y in islice(setup.source, 2):
            setup.optimizer.zero_grad()
            scaler.scale(LOSS(setup.model(x), y)).backward()
            scaler.step(setup.optimizer)
            scaler.update()
    observed.take(surgery, live)
