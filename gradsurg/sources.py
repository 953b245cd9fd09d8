"""What triggers look at in a forward, remembered until its backward."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack

from torch import Tensor, nn

from gradsurg import engine
from gradsurg.fields import nearest
from gradsurg.triggers.base import Clock, Sourced, Trigger


def watch(trigger: Trigger, model: nn.Module, clock: Clock, stack: ExitStack) -> None:
    """Have every part of `trigger` that looks at the batch or at a module see it as it passes.

    Raises LookupError for a module that is not there.
    """
    for part in dict.fromkeys(trigger.parts):
        if not isinstance(part, Sourced) or part.source in ("grad", "value"):
            continue
        kind, _, name = part.source.partition(":")
        module = model if kind == "batch" else _module(model, name, part)
        if kind == "output":
            handle = module.register_forward_hook(_seen(part, clock, lambda _, out: [out]))
        else:
            hook = _seen(part, clock, lambda inputs, _: inputs)
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        stack.callback(handle.remove)


def _seen(
    trigger: Sourced, clock: Clock, chosen: Callable[[Iterable[object], object], Iterable[object]]
) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[object, ...], more: object = None) -> None:
        if engine.in_backward():
            return  # a checkpoint's recomputation has been seen before
        inputs = [*args, *(more.values() if isinstance(more, Mapping) else ())]
        tensor = next(_tensors(chosen(inputs, more)), None)
        if tensor is not None:
            clock.seen[trigger] = trigger.look(tensor)

    return hook


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """All tensors in nested values: a batch of token numbers has a shape too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _module(model: nn.Module, name: str, trigger: Sourced) -> nn.Module:
    modules = dict(model.named_modules())
    modules.pop("")
    if name == "root":
        return model
    if name not in modules:
        raise LookupError(
            f"{trigger!r}: there is no module '{name}'. {nearest(name, list(modules))}"
        )
    return modules[name]
