"""Outputs: the gradient with respect to what a module returns."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Annotated, ClassVar
from weakref import ref

from pydantic import AfterValidator, Field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurg import engine
from gradsurg.fields import validated
from gradsurg.sites.base import (
    Gates,
    GradFn,
    Selector,
    Stage,
    check_pattern,
    matches,
    nothing_matched,
)
from gradsurg.transforms.base import Scope


@validated
class Outputs(Selector):
    """The outputs of the modules whose name fits `pattern`, a glob or `re:`; `call` picks one call.

    A tensor hook on every floating tensor that a matching module returns, also inside tuples,
    lists, dicts and dataclasses: the sum over all uses of that output. Site ids are `name#call`,
    with the path of the tensor behind it where there are several: `encoder.lstm#0.1.0`. Calls are
    counted from 0 within one call of the model. Modules that return one and the same tensor (a
    container and its last child, an identity) are one site, unless it was changed in place between
    them. The recomputation of a checkpoint is not hooked again.
    """

    pattern: Annotated[str, AfterValidator(check_pattern)] = "*"
    call: Annotated[int, Field(ge=0)] | None = None
    stage: Stage | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)
    has_value: ClassVar[bool] = True

    def find(self, model: nn.Module) -> list[str]:
        modules = dict(model.named_modules())
        modules.pop("")
        found = [name for name in modules if matches(name, self.pattern)]
        if not found:
            raise nothing_matched("Outputs", self.pattern, modules)
        return found

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        gates: Gates,
        stack: ExitStack,
    ) -> None:
        forward = _Forward({})
        stack.callback(forward.release)
        stack.callback(model.register_forward_pre_hook(forward.begin, prepend=True).remove)
        stack.callback(model.register_forward_hook(forward.end, always_call=True).remove)
        for name in self.find(model):
            gates.expect(f"{name}#{self.call or 0}")
            hook = self._hook_output(name, gates, forward)
            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)

    def _hook_output(self, name: str, gates: Gates, forward: "_Forward") -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            if engine.in_backward():
                return
            call = forward.count(name)
            if self.call is not None and call != self.call:
                return
            for path, tensor in tensors_in(output):
                site = f"{name}#{call}{path}"
                if path:
                    gates.forget(f"{name}#{call}")
                owner = forward.owner(tensor)
                if owner is not None:
                    gates.expect(owner, [site])
                elif not tensor.requires_grad:
                    gates.expect(site, skipped="needs no gradient")
                else:
                    forward.own(tensor, site)
                    gate = gates.gate(site)
                    if gates.needs_value:
                        gate = partial(gate, value=_value(tensor))
                    forward.register(tensor, gate)

        return hook


class _Forward(threading.local):
    """What is known within one call of the model: how often each module ran, who owns a tensor."""

    def __init__(self, leaves: "dict[int, tuple[ref[Tensor], RemovableHandle]]") -> None:
        self.inside = False
        self.calls: dict[str, int] = {}
        self.owners: dict[int, tuple[ref[Tensor], int, str]] = {}
        self.leaves = leaves

    def begin(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if not engine.in_backward():
            self.inside = True
            self.calls = {}
            self.owners = {}

    def end(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        self.inside = self.inside and engine.in_backward()

    def count(self, name: str) -> int:
        """The index of this call; a module called outside the model is at its call 0."""
        call = self.calls.get(name, 0) if self.inside else 0
        self.calls[name] = call + 1
        return call

    def owner(self, tensor: Tensor) -> str | None:
        held, number, site = self.owners.get(id(tensor), (None, 0, ""))
        # An id is used again once its tensor is gone.
        if held is None or held() is not tensor:
            return None
        # What was changed in place is another value, with another gradient.
        return site if number == _number(tensor) else None

    def own(self, tensor: Tensor, site: str) -> None:
        self.owners[id(tensor)] = ref(tensor), _number(tensor), site

    def register(self, tensor: Tensor, gate: GradFn) -> None:
        """Hook a tensor. A leaf, as a parameter that a module returns, outlives the graph: once."""
        if not tensor.is_leaf:
            tensor.register_hook(gate)
            return
        for key in [key for key, (held, _) in self.leaves.items() if held() is None]:
            del self.leaves[key]
        if id(tensor) not in self.leaves:
            self.leaves[id(tensor)] = ref(tensor), tensor.register_hook(gate)

    def release(self) -> None:
        """Unhook the leaves; hooks on other tensors end with their graph."""
        for _, handle in self.leaves.values():
            handle.remove()


def _value(tensor: Tensor) -> Tensor:
    """What a hook on a tensor may hold of it: were it the tensor itself, neither would be freed.

    An activation is copied, for what comes next may change it in place. A leaf is hooked for many
    steps, and its value is the one of the day.
    """
    return tensor.detach() if tensor.is_leaf else tensor.detach().clone()


def _number(tensor: Tensor) -> int:
    """Which node made a tensor; -1 for a leaf."""
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in a nested value, each with its path; a bare tensor's path is empty."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{index}")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name), f"{path}.{field.name}")
