"""What triggers look at in a forward, remembered until its backward."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from gradsurg.plugins.fields import SelectionError, nearest
from gradsurg.torch_internals import autograd, compiling
from gradsurg.triggers.base import Clock, TensorTrigger, Trigger


def watched(trigger: Trigger, model: nn.Module) -> dict[TensorTrigger, nn.Module]:
    """The parts of `trigger` that look at the batch or at a module, each with its module.

    Raises LookupError for a module that is not there.
    """
    found: dict[TensorTrigger, nn.Module] = {}
    for part in trigger.parts:
        if isinstance(part, TensorTrigger) and part.source not in ("grad", "value"):
            kind, _, name = part.source.partition(":")
            found[part] = model if kind == "batch" else _module(model, name, part)
    return found


def watch(
    trigger: Trigger,
    model: nn.Module,
    clock: Clock,
    stack: ExitStack,
    note: Callable[[str], None],
) -> None:
    """Have every such part of `trigger` see what it looks at as it passes.

    What a user should know of it is said by `note`, once or more.
    """
    seen = watched(trigger, model)
    if seen:
        forwards = _Forwards(", ".join(map(repr, seen)), note)
        stack.callback(model.register_forward_hook(_hook(model, forwards.ends)).remove)
    for part, module in seen.items():
        seer = _Seer(part, clock)
        if module is not model:
            stack.callback(model.register_forward_pre_hook(_hook(model, seer.begin)).remove)
        if part.source.startswith("output:"):
            stack.callback(module.register_forward_hook(_hook(module, seer.gives)).remove)
        else:
            hook = module.register_forward_pre_hook(_hook(module, seer.takes), with_kwargs=True)
            stack.callback(hook.remove)


def _hook(module: nn.Module, call: Callable[..., None]) -> Callable[..., None]:
    """A hook for this module alone: a copy of it, made in the block, has the same hooks."""
    held = ref(module)

    @compiling.untraced
    def hook(called: nn.Module, *given: object) -> None:
        if called is held():
            call(called, *given)

    return hook


class _Forwards:
    """Tells when a backward goes through a forward that is not the newest: what was seen of the
    newest then decides for both.
    """

    def __init__(self, triggers: str, note: Callable[[str], None]) -> None:
        self.triggers = triggers
        self.note = note
        self.newest = 0

    def ends(self, model: nn.Module, args: tuple[object, ...], output: object) -> None:
        if autograd.in_backward() or autograd.in_functorch():
            return
        self.newest += 1
        # A hook stays on its graph: it must not hold what belongs to the block.
        arrives = partial(_arrives, ref(self), self.newest)
        for tensor in _tensors([output]):
            if tensor.grad_fn is not None:
                tensor.register_hook(arrives)

    def back(self, forward: int) -> None:
        """A gradient has come to what a forward has given."""
        if forward != self.newest:
            self.note(
                "a backward went through several forwards of the model, or an earlier one, and "
                f"{self.triggers} decided by what the last of them has shown alone; call backward "
                "after each forward"
            )


def _arrives(forwards: "ref[_Forwards]", forward: int, grad: Tensor) -> None:
    held = forwards()
    if held is not None:
        held.back(forward)


class _Seer:
    """The eyes of one trigger. A checkpoint's recomputation has been seen before."""

    def __init__(self, trigger: TensorTrigger, clock: Clock) -> None:
        self.trigger = trigger
        self.seen = clock.observations

    def begin(self, model: nn.Module, args: tuple[object, ...]) -> None:
        """The model is called: what an earlier call of it has shown is no more."""
        if not autograd.in_backward():
            self.seen.pop(self.trigger, None)

    def takes(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._see([*args, *kwargs.values()])

    def gives(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        self._see([output])

    def _see(self, values: Iterable[object]) -> None:
        if autograd.in_backward():
            return
        tensor = next(_tensors(values), None)
        self.seen.pop(self.trigger, None)
        if tensor is not None:
            with torch.no_grad():
                self.seen[self.trigger] = self.trigger.observe(tensor.detach())


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """All tensors in nested values: a batch of token numbers has a shape too."""
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
        text = f"there is no module '{name}'. {nearest(name, list(modules))}"
        raise SelectionError(trigger, "source", text, repr(trigger))
    return modules[name]
