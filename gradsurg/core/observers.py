"""Forward hooks that record, until the backward pass, what triggers and transforms read."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from gradsurg.plugins.fields import SelectionError
from gradsurg.plugins.messages import unknown
from gradsurg.sites.calls import remove_hook
from gradsurg.torch_internals import autograd, compiling
from gradsurg.triggers.base import Clock, TensorTrigger


def observed_modules(
    triggers: Iterable[TensorTrigger], model: nn.Module
) -> dict[TensorTrigger, nn.Module]:
    """The module that each trigger reads; for the batch it is the model.

    Raises LookupError for a module that does not exist.
    """
    modules: dict[TensorTrigger, nn.Module] = {}
    for trigger in triggers:
        kind, _, name = trigger.source.partition(":")
        modules[trigger] = model if kind == "batch" else _module(model, name, trigger)
    return modules


def observe(
    triggers: Iterable[TensorTrigger],
    model: nn.Module,
    clock: Clock,
    stack: ExitStack,
    note: Callable[[str], None],
) -> None:
    """Record in `clock.observations`, at each forward, the tensors that the `triggers` read.

    `note` is called with a warning if a backward does not belong to the newest forward.
    """
    observed = observed_modules(triggers, model)
    forwards = _ForwardCounter(", ".join(map(repr, observed)), note)
    stack.callback(model.register_forward_hook(_hook(model, forwards.end)).remove)
    for part, module in observed.items():
        observer = _Observer(part, clock)
        if module is not model:
            stack.callback(model.register_forward_pre_hook(_hook(model, observer.begin)).remove)
        if part.source.startswith("output:"):
            stack.callback(module.register_forward_hook(_hook(module, observer.see_output)).remove)
        else:
            hook = _hook(module, observer.see_inputs)
            stack.callback(remove_hook, module.register_forward_pre_hook(hook, with_kwargs=True))


def observe_output_gradient(model: nn.Module, clock: Clock, stack: ExitStack) -> None:
    """Keep the gradient of the model's output in `clock.error` until its backward ends.

    PyTorch calls nothing at the end of a backward that raises: it is then kept until the next
    forward. A forward raises TypeError if it returns anything but one tensor.
    """
    is_attached = True

    def arrive(grad: Tensor) -> None:
        if is_attached:
            clock.error = autograd.detached(grad)
            autograd.at_end_of_backward(clear)

    def clear() -> None:
        clock.error = None

    def detach() -> None:
        """Disable hooks on existing graphs, which stay registered."""
        nonlocal is_attached
        is_attached = False

    def end(called: nn.Module, args: tuple[object, ...], output: object) -> None:
        if autograd.in_backward():
            return
        clear()
        if not isinstance(output, Tensor):
            raise TypeError(
                "a transform needs the gradient of the model's output, which must be one tensor, "
                f"found {type(output).__name__}"
            )
        if output.requires_grad:
            output.register_hook(arrive)

    stack.callback(detach)
    stack.callback(model.register_forward_hook(_hook(model, end)).remove)


def _hook(module: nn.Module, call: Callable[..., None]) -> Callable[..., None]:
    """Make `call` ignore copies of the module: `deepcopy` copies its hooks with it."""
    held = ref(module)

    @compiling.untraced
    def hook(called: nn.Module, *given: object) -> None:
        if called is held():
            call(called, *given)

    return hook


class _ForwardCounter:
    """Number the forwards, and note a backward through a forward that is not the newest.

    Observations are kept of the newest forward alone. In a backward through an older one they
    decide for gradients of another batch.
    """

    def __init__(self, triggers: str, note: Callable[[str], None]) -> None:
        self.triggers = triggers
        self.note = note
        self.newest = 0

    def end(self, model: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Number the forward that has ended, and hook its output."""
        if autograd.in_backward() or autograd.in_functorch():
            return
        self.newest += 1
        # A hook stays on its graph, so it holds the counter by a weak reference.
        hook = partial(_check_newest, ref(self), self.newest)
        for tensor in _tensors([output]):
            if tensor.grad_fn is not None:
                tensor.register_hook(hook)


def _check_newest(counter: "ref[_ForwardCounter]", forward: int, grad: Tensor) -> None:
    held = counter()
    if held is not None and forward != held.newest:
        held.note(
            "call backward after each forward pass of the model: this one went through an older "
            f"forward pass, and {held.triggers} read only the newest"
        )


class _Observer:
    """Record the tensors one trigger reads. The recomputation of a checkpoint is not recorded."""

    def __init__(self, trigger: TensorTrigger, clock: Clock) -> None:
        self.trigger = trigger
        self.observations, self.shared = clock.observations, clock.shared

    def begin(self, model: nn.Module, args: tuple[object, ...]) -> None:
        """Drop the observation of the last forward."""
        if not autograd.in_backward():
            self.observations.pop(self.trigger, None)

    def see_inputs(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Record the first tensor among the inputs."""
        self._see([*args, *kwargs.values()])

    def see_output(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Record the first tensor of the output."""
        self._see([output])

    def _see(self, values: Iterable[object]) -> None:
        if autograd.in_backward():
            return
        tensor = next(_tensors(values), None)
        # Also if this call has no tensor: an earlier call's observation must not decide for it.
        self.observations.pop(self.trigger, None)
        if tensor is not None:
            self.shared.discard(self.trigger)
            with torch.no_grad():
                self.observations[self.trigger] = self.trigger.observe(tensor.detach())


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """All tensors in nested values, of integers too: a trigger may read the shape of a batch."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif is_dataclass(value) and not isinstance(value, type):
            yield from _tensors(getattr(value, field.name) for field in fields(value))


def _module(model: nn.Module, name: str, trigger: TensorTrigger) -> nn.Module:
    modules = dict(model.named_modules(remove_duplicate=False))
    modules["root"] = modules.pop("")
    if name not in modules:
        text = unknown(f"there is no module '{name}'", name, list(modules))
        raise SelectionError(trigger, "source", text, repr(trigger))
    return modules[name]
