"""What modules have taken within one call of the model, and whether they write to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurg.sites._nested import rebuilt, tensors_in
from gradsurg.sites.base import NO_GRADIENT, GradFn, HookRegistry
from gradsurg.sites.outputs import OwnedTensors, alias_of, value_of

Path = Literal["branch", "total"]
Given = tuple[tuple[object, ...], dict[str, Any]]  # Any: a user's values
Change = Callable[[str, Tensor], Tensor]


@dataclass(slots=True)
class OpenCall:
    """A call of a module that has not ended: the tensors, and the copies of what holds them, that
    it was given and must not write to.
    """

    module: nn.Module
    tensors: Sequence[tuple[ref[Tensor], int, str]] = ()
    copies: Sequence[tuple[object, object, str]] = ()


class Taken(OwnedTensors):
    """What modules have taken within one call of the model."""

    def __init__(
        self,
        names: dict[nn.Module, list[str]],
        leaves: dict[int, tuple[ref[Tensor], RemovableHandle]],
        sites: dict[object, str],
        short: dict[str, GradFn],
        path: Path,
        gates: HookRegistry,
    ) -> None:
        super().__init__(names, leaves, sites)
        # Of all threads: the gates of the sites where a module has taken one tensor by place.
        self.short = short
        self.path: Path = path
        self.gates = gates
        self.open: list[OpenCall] = []
        self.returned: list[tuple[Tensor, int, str]] = []

    def begin(self) -> None:
        super().begin()
        self.open.clear()
        self.returned.clear()

    def enter(self, args: tuple[object, ...], kwargs: dict[str, Any], base: str) -> Given:
        """What a module is to be given instead of this. Any: a user's values."""
        sites: dict[int, tuple[Tensor, str]] = {}

        def change(path: str, tensor: Tensor) -> Tensor:
            site = base + path
            if path:
                self.gates.forget(base)
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                self.gates.expect(site, skipped=NO_GRADIENT)
                sites[id(tensor)] = tensor, site
            elif id(tensor) in sites:
                self.gates.expect(sites[id(tensor)][1], [site])
            else:
                sites[id(tensor)] = self._hooked(tensor, base, path), site
            return sites[id(tensor)][0]

        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            alone = self._changed(args[0], change, base, "")
            given = (args if alone is args[0] else (alone,)), kwargs
        else:
            places = [self._changed(arg, change, base, f".{at}") for at, arg in enumerate(args)]
            same = all(new is old for new, old in zip(places, args, strict=True))
            words = {
                key: self._changed(arg, change, base, f".{key}") for key, arg in kwargs.items()
            }
            given = (
                args if same else tuple(places),
                kwargs if all(words[key] is kwargs[key] for key in words) else words,
            )
        if not sites:
            self.gates.expect(base, skipped="takes no floating tensor")
        return given

    def leave(self, call: OpenCall, output: object) -> None:
        """A module has returned: refuse it if what it was given was written to."""
        for held, version, site in call.tensors:
            tensor = held()
            if tensor is None:
                continue
            if tensor._version != version:
                raise self._written(site, "wrote to its input in place")
            if self.turns.inside:
                base = _base(tensor)
                bare = isinstance(output, Tensor)
                for _, other in (("", output),) if bare else tensors_in(output):
                    if _base(other) is base:
                        self.returned.append((other.detach(), version, site))
        for copy, layout, site in call.copies:
            if _layout(copy) != layout:
                raise self._written(site, "wrote to a container that it took, and got a copy of it")

    def end(self) -> None:
        """The model has returned: refuse it if an input that a module handed on was written to."""
        returned, self.returned = self.returned, []
        for tensor, version, site in returned:
            if tensor._version != version:
                raise self._written(site, "handed on its input, which was then written to in place")

    def _changed(self, value: object, change: Change, base: str, path: str) -> object:
        new = rebuilt(value, change, path)
        if new is not value and not isinstance(new, Tensor):
            now = self.open[-1]
            now.copies = [*now.copies, (new, _layout(new), base + path)]
        return new

    def _hooked(self, tensor: Tensor, base: str, path: str) -> Tensor:
        """The tensor that the module is given: its gradient is the one that is wanted."""
        site = base + path
        hooked = True
        match self.path:
            case "branch":
                given = alias_of(tensor)
                gate = self.gates.gate(site)
                if self.gates.needs_value:
                    gate = partial(gate, value=value_of(given))
                given.register_hook(gate)
            case "total":
                given = tensor
                hooked = self.hook_tensor(tensor, base, path, self.open[-1].module, self.gates)
        if hooked and not path:
            self.short[base] = self.gates.gate(base)
        if given is not tensor or given._is_view():
            now = self.open[-1]
            now.tensors = [*now.tensors, (ref(given), given._version, site)]
        return given

    def _written(self, site: str, what: str) -> RuntimeError:
        match self.path:
            case "branch":
                why = "the gradient of this branch cannot be told from that of the tensor itself"
                instead = "Use path='total', or Outputs of the module before"
            case "total":
                why = "PyTorch drops the hooks of a view that is written to"
                instead = "Use Inputs or Outputs of a module before"
        return RuntimeError(f"Inputs: site '{site}': the module {what}, and {why}. {instead}.")


def _base(tensor: Tensor) -> Tensor | None:
    return tensor._base if tensor._is_view() else tensor


def _layout(value: object) -> object:
    """What a nested value holds, for telling whether it was written to."""
    if isinstance(value, dict):
        return [(key, _layout(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_layout(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return [_layout(getattr(value, item.name)) for item in fields(value)]
    return id(value)
