"""Inputs: the gradient with respect to what a module takes."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, ClassVar, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import NO_GRADIENT, GradFn, HookRegistry, Stage
from gradsurg.sites.call_tracker import rebuilt, tensors_in
from gradsurg.sites.outputs import OwnedTensors, alias_of, is_new, value_of
from gradsurg.sites.selection import ModuleSelector, SiteIds, names_of
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Need, Scope

TAIL = ".input"

Path = Literal["branch", "total"]
Given = tuple[tuple[object, ...], dict[str, Any]]  # Any: a user's values
Change = Callable[[str, Tensor], Tensor]


@validated
class Inputs(ModuleSelector):
    """The floating tensors that the modules whose name fits `pattern` take, by place or by keyword.

    `path="branch"`: the gradient that comes out of this module alone. The module gets an alias of
    its input, and that is hooked, so that in `h + f(h)` what goes past `f` is left alone. A
    container and its first child are two sites, and one gradient passes both. An input that is
    written to in place is refused, for the hook would see nothing or a part of its gradient.
    `path="total"`: a hook on the tensor itself, the sum over all its uses; modules that take one
    tensor are one site.

    Site ids are `name#call.input`, with the path of the tensor behind it if the module is given
    anything but one tensor: `mix#0.input.1` by place, `mix#0.input.mask` by keyword, `.input.0.h`
    inside. A tensor that is given twice is one site with two names. Calls are counted and
    recomputed ones are hooked as those of `Outputs` are; inside a reentrant checkpoint a total is
    that of the uses in there. What is called without gradients is not hooked.

    An alias changes no value; but where a module reads its input several times and others read it
    too, gradients are summed branch by branch, which may move the last bit of the sum.
    """

    path: Literal["branch", "total"] = "branch"

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "error"})

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("Inputs", self.stage, self.path)

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        taken = Taken(names_of(model), {}, {}, {}, self.path, registry)
        stack.callback(taken.release)
        chosen = self.site_ids(registry, TAIL)
        hooks = [
            (module, _entering(taken, chosen), _leaving(taken))
            for module in self.expect_modules(taken.names, registry, TAIL)
        ]
        ending, following = _ending(taken), taken.following(model)

        def register(own: ExitStack) -> None:
            for module, entering, leaving in hooks:
                _register(module, entering, own)
                own.callback(module.register_forward_hook(leaving, always_call=True).remove)
            own.callback(model.register_forward_hook(ending).remove)
            following(own)

        registry.register(register, stack)


def _register(module: nn.Module, hook: Callable[..., object], stack: ExitStack) -> None:
    """Register a forward pre-hook behind those of others and before those that make an alias.

    The alias that is made last is the first that a gradient comes to; and a total has to meet the
    tensor before an alias takes its place.
    """
    table = module._forward_pre_hooks
    later = [key for key, other in table.items() if getattr(other, "makes_alias", False)]
    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    for key in later:
        table[key] = table.pop(key)


def _entering(taken: "Taken", chosen: SiteIds) -> Callable[..., Given | None]:
    registry, short, path = taken.registry, taken.short, taken.path
    alone = _alone_on_its_branch if path == "branch" else _alone

    # Any: a user's values
    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> Given | None:
        call = taken.counter.next(module)
        base = None if call is None else chosen(module, call)
        if base is None:
            taken.open.append(OpenCall(module))
            return None
        gate = short.get(base)
        if gate is not None and len(args) == 1 and not kwargs and not registry.needs_value:
            given = alone(args[0], gate)
            if given is not None:
                kept = path == "branch" or given._is_view()
                tensors = [(ref(given), given._version, base)] if kept else []
                taken.open.append(OpenCall(module, tensors))
                return None if given is args[0] else ((given,), kwargs)
        taken.open.append(OpenCall(module))
        new = taken.enter(args, kwargs, base)
        if not torch.is_grad_enabled():
            taken.without_graph(module)
        return None if new[0] is args and new[1] is kwargs else new

    vars(hook)["makes_alias"] = path == "branch"
    return hook


def _alone_on_its_branch(tensor: object, gate: GradFn) -> Tensor | None:
    """What a module is given for a tensor, hooked by the shortest way; None if that will not do."""
    if type(tensor) is not Tensor or not (tensor.requires_grad and torch.is_grad_enabled()):
        return None
    alias = alias_of(tensor)
    autograd.hook_first(alias, gate)
    return alias


def _alone(tensor: object, gate: GradFn) -> Tensor | None:
    """As above, the tensor itself."""
    if not (is_new(tensor) and torch.is_grad_enabled()):
        return None
    autograd.hook_first(tensor, gate)
    return tensor


def _leaving(taken: "Taken") -> Callable[..., None]:
    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        running = taken.open
        if running and running[-1].module is module:
            call = running.pop()
            if call.tensors or call.copies:
                taken.leave(call, output)
            return
        # A hook of others may have broken this call off before its pre-hook came here.
        own = [place for place, call in enumerate(running) if call.module is module]
        if own:
            call = running[own[-1]]
            del running[own[-1] :]
            taken.leave(call, output)

    return hook


def _ending(taken: "Taken") -> Callable[..., None]:
    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        taken.end()

    return hook


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
        registry: HookRegistry,
    ) -> None:
        super().__init__(names, leaves, sites)
        # Of all threads: the gates of the sites where a module has taken one tensor by place.
        self.short = short
        self.path: Path = path
        self.registry = registry
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
                self.registry.forget(base)
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                self.registry.expect(site, skipped=NO_GRADIENT)
                sites[id(tensor)] = tensor, site
            elif id(tensor) in sites:
                self.registry.expect(sites[id(tensor)][1], [site])
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
            self.registry.expect(base, skipped="takes no floating tensor")
        return given

    def leave(self, call: OpenCall, output: object) -> None:
        """A module has returned: refuse it if what it was given was written to."""
        for held, version, site in call.tensors:
            tensor = held()
            if tensor is None:
                continue
            if tensor._version != version:
                raise self._written(site, "wrote to its input in place")
            if self.counter.inside:
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
                gate = self.registry.hook_for(site)
                if self.registry.needs_value:
                    gate = partial(gate, value=value_of(given))
                given.register_hook(gate)
            case "total":
                given = tensor
                hooked = self.hook_tensor(tensor, base, path, self.open[-1].module, self.registry)
        if hooked and not path:
            self.short[base] = self.registry.hook_for(base)
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
