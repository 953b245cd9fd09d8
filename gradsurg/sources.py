"""What triggers look at in a forward, remembered until its backward."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn

from gradsurg import engine
from gradsurg.fields import nearest
from gradsurg.triggers.base import Clock, Sourced, Trigger


def watched(trigger: Trigger, model: nn.Module) -> dict[Sourced, nn.Module]:
    """The parts of `trigger` that look at the batch or at a module, each with its module.

    Raises LookupError for a module that is not there.
    """
    found: dict[Sourced, nn.Module] = {}
    for part in trigger.parts:
        if isinstance(part, Sourced) and part.source not in ("grad", "value"):
            kind, _, name = part.source.partition(":")
            found[part] = model if kind == "batch" else _module(model, name, part)
    return found


def watch(trigger: Trigger, model: nn.Module, clock: Clock, stack: ExitStack) -> None:
    """Have every such part of `trigger` see what it looks at as it passes."""
    for part, module in watched(trigger, model).items():
        seer = _Seer(part, clock)
        if module is not model:
            stack.callback(model.register_forward_pre_hook(seer.begin).remove)
        if part.source.startswith("output:"):
            stack.callback(module.register_forward_hook(seer.gives).remove)
        else:
            hook = module.register_forward_pre_hook(seer.takes, with_kwargs=True)
            stack.callback(hook.remove)


class _Seer:
    """The eyes of one trigger. A checkpoint's recomputation has been seen before."""

    def __init__(self, trigger: Sourced, clock: Clock) -> None:
        self.trigger = trigger
        self.seen = clock.seen

    def begin(self, model: nn.Module, args: tuple[object, ...]) -> None:
        """The model is called: what an earlier call of it has shown is no more."""
        if not engine.in_backward():
            self.seen.pop(self.trigger, None)

    def takes(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._see([*args, *kwargs.values()])

    def gives(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        self._see([output])

    def _see(self, values: Iterable[object]) -> None:
        if engine.in_backward():
            return
        tensor = next(_tensors(values), None)
        self.seen.pop(self.trigger, None)
        if tensor is not None:
            with torch.no_grad():
                self.seen[self.trigger] = self.trigger.look(tensor.detach())


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


def _module(model: nn.Module, name: str, trigger: Sourced) -> nn.Module:
    modules = dict(model.named_modules(remove_duplicate=False))
    modules["root"] = modules.pop("")
    if name not in modules:
        raise LookupError(
            f"{trigger!r}: there is no module '{name}'. {nearest(name, list(modules))}"
        )
    return modules[name]
