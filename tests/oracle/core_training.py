"""The training loops of users, as a table of contexts."""

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, AdamW, Optimizer

import gradsurg as gs
from tests.oracle.core_models import MODELS, batches
from tests.oracle.core_outcome import Observed

STEPS = 4
LOSS = nn.CrossEntropyLoss()
Params = list[nn.Parameter]
Backward = Callable[[Tensor, Params], None]


def plain(loss: Tensor, params: Params) -> None:
    loss.backward()


def captured(loss: Tensor, params: Params) -> None:
    """Set `.grad` from `autograd.grad`, as functional loops do."""
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    for param, grad in zip(params, grads, strict=True):
        if grad is not None:
            param.grad = grad if param.grad is None else param.grad + grad


def retained(loss: Tensor, params: Params) -> None:
    """Two backward passes of one graph."""
    loss.backward(retain_graph=True)
    loss.backward()


def penalized(loss: Tensor, params: Params) -> None:
    """A gradient penalty: double backward."""
    grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    penalty = sum(grad.square().sum() for grad in grads if grad is not None)
    (loss + 0.1 * penalty).backward()


def some_inputs(loss: Tensor, params: Params) -> None:
    """A backward pass to some of the parameters."""
    loss.backward(inputs=params[:2])


@dataclass(frozen=True)
class Context:
    """A training loop: the passes of a step, the optimizer, the backward pass, the wrapping."""

    passes: int = 1
    make_optimizer: Callable[[Params], Optimizer] = lambda params: SGD(params, 0.1, momentum=0.9)
    backward: Backward = plain
    options: dict[str, object] = field(default_factory=dict)
    scale: float | None = None
    autocast: bool = False
    overflow: bool = False
    wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]] = lambda model: model
    wraps_inside: bool = False
    evaluates: bool = False
    set_to_none: bool = True
    model: str = ""
    given: bool = True
    """Whether `attach` gets the optimizer."""


def _compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="aot_eager")


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _functional(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: functional_call(model, dict(model.named_parameters()), (x,))


def _threaded(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The forward pass of each step runs in another thread."""

    def call(x: Tensor) -> Tensor:
        results: list[Tensor] = []
        thread = threading.Thread(target=lambda: results.append(model(x)))
        thread.start()
        thread.join()
        return results[0]

    return call


CONTEXTS = {
    "plain": Context(),
    "accumulation": Context(passes=3),
    "loss scale": Context(scale=8.0),
    "overflow": Context(scale=8.0, overflow=True),
    "autocast": Context(scale=8.0, autocast=True),
    "checkpoint": Context(model="checkpoint"),
    "reentrant": Context(model="reentrant"),
    "in-place": Context(model="inplace"),
    "compile inside": Context(wrap=_compiled, wraps_inside=True),
    "compile before": Context(wrap=_compiled),
    "compile in place": Context(wrap=_compiled_in_place, wraps_inside=True),
    "second backward": Context(backward=retained),
    "double backward": Context(backward=penalized),
    "autograd.grad": Context(backward=captured),
    "backward(inputs=)": Context(backward=some_inputs),
    "functional_call": Context(wrap=_functional, wraps_inside=True),
    "threads": Context(wrap=_threaded, wraps_inside=True),
    "evaluation between": Context(evaluates=True, set_to_none=False),
    "AdamW": Context(make_optimizer=lambda params: AdamW(params, 0.05)),
    "no optimizer": Context(given=False),
    "shadow": Context(options={"shadow": True, "effects_every": 2}),
    "effects_every=3": Context(options={"effects_every": 3}),
    "no effects": Context(options={"effects_every": 0}),
}


def train(observed: Observed, surgery: gs.Surgery, context: Context, model_name: str) -> None:
    """Train for STEPS steps under the surgery and for one more after it.

    If it acts at `Captured`, gradients come from `autograd.grad` instead of `backward()`.
    """
    if context.backward is plain and "Captured(" in repr(surgery):
        context = replace(context, backward=captured)
    model = MODELS[context.model or model_name]()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = context.make_optimizer(params)
    observed.watch(model, optimizer)
    called = context.wrap(model) if not context.wraps_inside else model
    target = called if isinstance(called, nn.Module) else model
    scaler = torch.amp.GradScaler("cpu", init_scale=context.scale or 1.0, growth_interval=2)
    with ExitStack() as block:
        options = dict(context.options)
        if context.scale is not None:
            options["scaler"] = scaler
        given = optimizer if context.given else None
        live = block.enter_context(surgery.attach(target, given, **options))
        if context.wraps_inside:
            called = context.wrap(model)
        for step, chunk in enumerate(islice(_chunks(model, context.passes), STEPS)):
            if step == 2 and any("flag" in repr(item.when) for item in surgery.interventions):
                live.switch("flag", on=True)
            if step == 1 and context.overflow:
                chunk = [(x * float("inf"), y) for x, y in chunk]
            _step(live, called, optimizer, scaler, context, chunk)
            if context.evaluates:
                _evaluate(observed, model, step, chunk[0][0])
    observed.take(surgery, live)
    observed.outcome.acts |= options.get("effects_every") == 0  # there are no rows then
    _step(None, model, optimizer, None, Context(), [next(batches(model))])


def _chunks(model: nn.Module, size: int) -> Iterable[list[tuple[Tensor, Tensor]]]:
    source = batches(model)
    while True:
        yield list(islice(source, size))


def _step(
    live: gs.Live | None,
    called: Callable[[Tensor], Tensor],
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler | None,
    context: Context,
    chunk: list[tuple[Tensor, Tensor]],
) -> None:
    params: Params = [param for group in optimizer.param_groups for param in group["params"]]
    optimizer.zero_grad(set_to_none=context.set_to_none)
    for x, y in chunk:
        if live is not None and live.reads_example_labels:
            live.set_example_labels(y)
        with torch.autocast("cpu", torch.bfloat16, enabled=context.autocast):
            out = called(x)
        loss = LOSS(out.float(), y) / len(chunk)
        if context.scale is not None and scaler is not None:
            loss = scaler.scale(loss)
        context.backward(loss, params)
    if context.scale is not None and scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()


def _evaluate(observed: Observed, model: nn.Module, step: int, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        observed.note(f"evaluation {step}", model(x))
    model.train()
