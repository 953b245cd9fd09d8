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
from gradsurg.sites.selection import OUTSIDE
from gradsurg.torch_internals import autograd, compiling


class CallCounts:
    """The call counts of one thread. Hooks fetch it once, since thread-local access is slow."""

    __slots__ = ("counts", "graphless", "inside", "latest", "names")

    def __init__(self, names: Mapping[nn.Module, Sequence[str]]) -> None:
        self.names = names
        self.inside = False  # a call of the model
        self.counts: dict[nn.Module, int] = {}
        self.graphless: list[tuple[int, nn.Module, tuple[str, int]]] = []
        self.latest = "", 0

    def next(self, module: nn.Module) -> tuple[str, int] | None:
        """Count a call of the module; return its name and its index under that name.

        A call outside the model has index OUTSIDE. None for a module of a copy of the model, and
        for a recomputation inside a backward pass. A reentrant checkpoint's is numbered, since it
        makes the graph: it gets the name and index of the forward's call.
        """
        if autograd.backward_task() != -1:
            return self._recomputed(module)
        names = self.names.get(module)
        if names is None:
            return None
        counts = self.counts
        count = counts.get(module, 0) if self.inside else OUTSIDE
        counts[module] = count + 1
        if len(names) == 1 or count == OUTSIDE:
            latest = names[0], count
        else:
            latest = names[count % len(names)], count // len(names)
        self.latest = latest
        return latest

    def _recomputed(self, module: nn.Module) -> tuple[str, int] | None:
        node = autograd.running_node()
        if not isinstance(node, BackwardCFunction) or not torch.is_grad_enabled():
            return None
        # The node of a checkpoint is made before its modules are called. The calls that follow it
        # are those inside the checkpoint, and are repeated in the same order.
        checkpoint = node._sequence_nr()
        calls = [call for call in self.graphless if call[0] > checkpoint and call[1] is module]
        if not calls:
            return None
        first = min(calls, key=lambda call: call[0])
        self.graphless.remove(first)
        return first[2]


class Calls(threading.local):
    """Numbers the calls of each module within one call of the model, separately in each thread."""

    def __init__(self, names: Mapping[nn.Module, Sequence[str]]) -> None:
        self.names = names
        self.counter = CallCounts(names)

    def hook(self, model: nn.Module, stack: ExitStack) -> None:
        """Follow the calls of the model itself; a copy of it made inside the block is ignored."""
        self.following(model)(stack)

    def following(self, model: nn.Module) -> RegisterHooks:
        """Return a function that registers the hooks of `hook`."""
        # Functions, not methods: a model is deep-copied with its hooks and their bound objects.

        @compiling.untraced
        def begin(module: nn.Module, args: tuple[object, ...]) -> None:
            if module in self.names:
                self.start()

        @compiling.untraced
        def end(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            self.stop()

        def register(removals: ExitStack) -> None:
            removals.callback(model.register_forward_pre_hook(begin, prepend=True).remove)
            removals.callback(model.register_forward_hook(end, always_call=True).remove)

        return register

    def start(self) -> None:
        """Begin a call of the model; inside a backward pass it is a recomputation and ignored."""
        if not autograd.in_backward():
            counter = self.counter
            counter.inside = True
            counter.counts.clear()
            counter.graphless.clear()
            self.begin()

    def stop(self) -> None:
        """End a call of the model or a recomputation."""
        counter = self.counter
        counter.inside = counter.inside and autograd.in_backward()

    def next(self, module: nn.Module) -> tuple[str, int] | None:
        """Call `CallCounts.next` in the current thread."""
        return self.counter.next(module)

    def without_graph(self, module: nn.Module) -> None:
        """Record that the call that `next` counted last has made no graph."""
        if not autograd.in_backward():
            counter = self.counter
            counter.graphless.append((autograd.next_sequence_number(), module, counter.latest))

    def begin(self) -> None:
        """Reset the state that a subclass keeps for one call of the model."""


def tensors_in(value: object, path: str = "", every: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors in a nested value (or `every` tensor) with their paths.

    The path of a bare tensor is empty.
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
    """Return the same nesting with `change(path, tensor)` in place of each floating tensor.

    Parts without a changed tensor are returned as they are; nothing is changed in place.
    """
    if isinstance(value, Tensor):
        return change(path, value) if value.is_floating_point() else value
    if isinstance(value, dict):
        items = {key: rebuilt(item, change, f"{path}.{key}") for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        # A subclass, such as the model output of a library, is copied and filled.
        copy = cast("dict[Any, Any]", value.copy())  # Any: a user's keys and values
        copy.update(items)
        return copy
    if isinstance(value, list | tuple):
        parts = [rebuilt(item, change, f"{path}.{index}") for index, item in enumerate(value)]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        kind: Any = type(value)  # Any: the constructor of a named tuple takes its parts one by one
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: rebuilt(getattr(value, field.name), change, f"{path}.{field.name}")
            for field in fields(value)
        }
        changed = {name: new for name, new in changed.items() if new is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value
