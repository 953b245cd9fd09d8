"""Number the calls of each module, and list the tensors in their inputs and outputs."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from gradsurg.sites.base import RegisterHooks
from gradsurg.torch_internals import autograd, compiling


class Turns:
    """What `Calls` counts in one thread. A hook looks it up once, for a thread's own are dear."""

    __slots__ = ("blank", "counts", "inside", "latest", "names")

    def __init__(self, names: Mapping[nn.Module, Sequence[str]]) -> None:
        self.names = names
        self.inside = False
        self.counts: dict[nn.Module, int] = {}
        self.blank: list[tuple[int, nn.Module, tuple[str, int]]] = []
        self.latest = "", 0

    def next(self, module: nn.Module) -> tuple[str, int] | None:
        """The name that this call of the module goes by, and its index under that name.

        A module called outside the model is at its call 0. None for a module of a copy; and for a
        recomputation inside a backward, but not for that of a reentrant checkpoint: it makes the
        graph which the call in the forward did not make, and goes by its name and index.
        """
        if autograd.backward_task() != -1:
            return self._again(module)
        names = self.names.get(module)
        if names is None:
            return None
        counts = self.counts
        count = counts.get(module, 0) if self.inside else 0
        counts[module] = count + 1
        if len(names) == 1:
            latest = names[0], count
        else:
            latest = names[count % len(names)], count // len(names)
        self.latest = latest
        return latest

    def _again(self, module: nn.Module) -> tuple[str, int] | None:
        node = autograd.running_node()
        if not isinstance(node, BackwardCFunction) or not torch.is_grad_enabled():
            return None
        # A checkpoint has one node, made before its modules were called: those that were called
        # next after it are its own, and they are called again in the same order.
        made = node._sequence_nr()
        own = [blank for blank in self.blank if blank[0] > made and blank[1] is module]
        if not own:
            return None
        again = min(own, key=lambda blank: blank[0])
        self.blank.remove(again)
        return again[2]


class Calls(threading.local):
    """Tells the calls of each module apart within one call of the model, thread by thread."""

    def __init__(self, names: Mapping[nn.Module, Sequence[str]]) -> None:
        self.names = names
        self.turns = Turns(names)

    def hook(self, model: nn.Module, stack: ExitStack) -> None:
        """Follow the calls of the model itself; a copy of it, made in the block, is left alone."""
        self.following(model)(stack)

    def following(self, model: nn.Module) -> RegisterHooks:
        """What hooks the model so that its calls are followed."""
        # Functions, not methods: a model is copied with its hooks, and a method with its object.

        @compiling.untraced
        def begin(module: nn.Module, args: tuple[object, ...]) -> None:
            if module in self.names:
                self.start()

        @compiling.untraced
        def end(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            self.stop()

        def register(own: ExitStack) -> None:
            own.callback(model.register_forward_pre_hook(begin, prepend=True).remove)
            own.callback(model.register_forward_hook(end, always_call=True).remove)

        return register

    def start(self) -> None:
        """A call of the model begins, or a part of it is recomputed."""
        if not autograd.in_backward():
            turns = self.turns
            turns.inside = True
            turns.counts.clear()
            turns.blank.clear()
            self.begin()

    def stop(self) -> None:
        """A call of the model has ended, or a recomputation."""
        turns = self.turns
        turns.inside = turns.inside and autograd.in_backward()

    def next(self, module: nn.Module) -> tuple[str, int] | None:
        """As `Turns.next`, in the thread at hand."""
        return self.turns.next(module)

    def without_graph(self, module: nn.Module) -> None:
        """The call that `next` has just told of has made no graph."""
        if not autograd.in_backward():
            turns = self.turns
            turns.blank.append((autograd.next_sequence_number(), module, turns.latest))

    def begin(self) -> None:
        """The model is called: what a subclass counts begins again."""


def tensors_in(value: object, path: str = "", every: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in a nested value, or `every` one, each with its path; a bare tensor's
    path is empty.
    """
    if isinstance(value, Tensor):
        if every or value.is_floating_point():
            yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}", every)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{index}", every)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name), f"{path}.{field.name}", every)


def rebuilt(value: object, change: Callable[[str, Tensor], Tensor], path: str = "") -> object:
    """The same nesting with `change(path, tensor)` in place of each floating tensor.

    What holds no changed tensor is handed back as it is, and nothing is changed in place.
    """
    if isinstance(value, Tensor):
        return change(path, value) if value.is_floating_point() else value
    if isinstance(value, dict):
        items = {key: rebuilt(item, change, f"{path}.{key}") for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        # A subclass, as a model output of a library is one, is copied and filled anew.
        made = cast("dict[Any, Any]", value.copy())  # Any: a user's keys and values
        made.update(items)
        return made
    if isinstance(value, list | tuple):
        parts = [rebuilt(item, change, f"{path}.{index}") for index, item in enumerate(value)]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        kind: Any = type(value)  # Any: a named tuple takes its parts one by one
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: rebuilt(getattr(value, field.name), change, f"{path}.{field.name}")
            for field in fields(value)
        }
        changed = {name: new for name, new in changed.items() if new is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value
