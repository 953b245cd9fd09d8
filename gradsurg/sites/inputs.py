"""Inputs: the gradient with respect to the input of a module."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, ClassVar, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import NO_GRADIENT, Attached, GradFn, Stage
from gradsurg.sites.call_tracker import rebuilt, tensors_in
from gradsurg.sites.outputs import HookedTensors, alias_of, is_new, value_of
from gradsurg.sites.selection import ModuleSelector, SiteIds, names_of
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Need

SUFFIX = ".input"

Path = Literal["branch", "total"]
Arguments = tuple[tuple[object, ...], dict[str, Any]]  # Any: a user's values
Change = Callable[[str, Tensor], Tensor]


@validated
class Inputs(ModuleSelector):
    """The floating tensors that the modules whose name fits `pattern` take, also by keyword.

    `path="branch"`: the gradient that flows back through this module alone. The module gets an
    alias of its input, and the alias is hooked: in `h + f(h)` the gradient that bypasses `f` is
    left alone. A container and its first child are two sites, and the gradient passes both. An
    input that is written to in place is refused, since a hook would see none or a part of its
    gradient. `path="total"`: a hook on the tensor itself, whose gradient is the sum over all its
    uses; modules that take the same tensor are one site.

    Site ids are `name#call.input`, followed by the path of the tensor unless the module is called
    with one tensor: `mix#0.input.1` by position, `mix#0.input.mask` by keyword, `.input.0.h` in a
    nested value. A tensor passed twice is one site with two names. For call counts and
    recomputations see `Outputs`; inside a reentrant checkpoint a total is the sum over the uses in
    it. Calls without gradients are not hooked.

    An alias changes no value. But if a module reads its input several times and others read it too,
    gradients are summed branch by branch, which may change the last bit of the sum.
    """

    path: Path = "branch"

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "error", "labels"})

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("Inputs", self.stage, self.path)

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        inputs = _HookedInputs(names_of(model), {}, {}, {}, self.path, attached)
        stack.callback(inputs.release)
        site_ids = self.site_ids(attached, SUFFIX)
        hooks = [
            (module, _pre_hook(inputs, site_ids), _post_hook(inputs))
            for module in self.expect_modules(inputs.names, attached, SUFFIX)
        ]
        check_end, following = _model_hook(inputs), inputs.following(model)

        def register(removals: ExitStack) -> None:
            for module, pre_hook, post_hook in hooks:
                _register_before_aliases(module, pre_hook, removals)
                removals.callback(module.register_forward_hook(post_hook, always_call=True).remove)
            removals.callback(model.register_forward_hook(check_end).remove)
            following(removals)

        attached.register(register, stack)


def _register_before_aliases(
    module: nn.Module, hook: Callable[..., object], stack: ExitStack
) -> None:
    """Register a forward pre-hook after those of others and before those that make an alias.

    A total must be hooked on the tensor itself, before an alias takes its place.
    """
    table = module._forward_pre_hooks
    alias_hooks = [key for key, other in table.items() if getattr(other, "makes_alias", False)]
    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    for key in alias_hooks:
        table[key] = table.pop(key)


def _pre_hook(inputs: "_HookedInputs", site_ids: SiteIds) -> Callable[..., Arguments | None]:
    """Return the forward pre-hook that hooks the inputs of a module."""
    attached, fast, path = inputs.attached, inputs.fast, inputs.path
    hook_single = _hook_single_alias if path == "branch" else _hook_single

    # Any: a user's values
    @compiling.untraced
    def hook(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        call, running = inputs.counter.next(module), inputs.open
        if call in fast and len(args) == 1 and not kwargs and not attached.needs_value:
            base, site_hook = fast[call]
            given = hook_single(args[0], site_hook)
            if given is not None:
                unchanged = given is args[0]
                checked = not unchanged or given._is_view()
                running.append((module, [(given, given._version, base)] if checked else [], []))
                return None if unchanged else ((given,), kwargs)
        running.append((module, [], []))
        base = None if call is None else site_ids(module, call)
        if call is None or base is None:
            return None
        new = inputs.enter(args, kwargs, base, call)
        if not torch.is_grad_enabled():
            inputs.without_graph(module)
        return None if new[0] is args and new[1] is kwargs else new

    vars(hook)["makes_alias"] = path == "branch"
    return hook


def _hook_single_alias(tensor: object, hook: GradFn) -> Tensor | None:
    """Hook an alias of a single input and return it; None if that needs the general path."""
    if type(tensor) is not Tensor or not (tensor.requires_grad and torch.is_grad_enabled()):
        return None
    alias = alias_of(tensor)
    autograd.hook_first(alias, hook)
    return alias


def _hook_single(tensor: object, hook: GradFn) -> Tensor | None:
    """Hook a single input itself and return it; None if that needs the general path."""
    if not (is_new(tensor) and torch.is_grad_enabled()):
        return None
    autograd.hook_first(tensor, hook)
    return tensor


def _post_hook(inputs: "_HookedInputs") -> Callable[..., None]:
    """Return the forward hook that checks that a module did not write to its inputs."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        running = inputs.open
        if all(called is not module for called, _, _ in running):
            return  # a hook of others raised before the pre-hook of this call ran
        called, tensors, copies = running.pop()
        while called is not module:
            called, tensors, copies = running.pop()
        if tensors or copies:
            inputs.leave(tensors, copies, output)

    return hook


def _model_hook(inputs: "_HookedInputs") -> Callable[..., None]:
    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        inputs.check_returned()

    return hook


_Given = list[tuple[Tensor, int, str]]
"""The tensors that a running call was given and must not write to, with version and site."""

_Copies = list[tuple[object, object, str]]
"""Its copies of containers, which it must not write to either, with layout and site."""


class _HookedInputs(HookedTensors):
    """Hooks the inputs of module calls and checks that nothing writes to them."""

    def __init__(
        self,
        names: dict[nn.Module, list[str]],
        leaves: dict[int, tuple[ref[Tensor], RemovableHandle]],
        sites: dict[object, str],
        fast: dict[tuple[str, int] | None, tuple[str, GradFn]],
        path: Path,
        attached: Attached,
    ) -> None:
        super().__init__(names, leaves, sites)
        # Shared by all threads: site and hook of the calls that took one positional tensor.
        self.fast = fast
        self.path: Path = path
        self.attached = attached
        self.open: list[tuple[nn.Module, _Given, _Copies]] = []  # the running calls
        self.returned: _Given = []

    def begin(self) -> None:
        super().begin()
        self.open.clear()
        self.returned.clear()

    def enter(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, Any],
        base: str,
        call: tuple[str, int],
    ) -> Arguments:
        """Hook the tensors in the arguments; return the arguments to call the module with."""
        sites: dict[int, tuple[Tensor, str]] = {}  # by the id of the tensor

        def change(path: str, tensor: Tensor) -> Tensor:
            site = base + path
            if path:
                self.attached.forget(base)
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                self.attached.expect(site, skipped=NO_GRADIENT)
                sites[id(tensor)] = tensor, site
            elif id(tensor) in sites:
                self.attached.expect(sites[id(tensor)][1], [site])
            else:
                sites[id(tensor)] = self._hooked(tensor, base, path, call), site
            return sites[id(tensor)][0]

        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            single = self._changed(args[0], change, base, "")
            given = (args if single is args[0] else (single,)), kwargs
        else:
            positional = [
                self._changed(arg, change, base, f".{index}") for index, arg in enumerate(args)
            ]
            same = all(new is old for new, old in zip(positional, args, strict=True))
            by_key = {
                key: self._changed(arg, change, base, f".{key}") for key, arg in kwargs.items()
            }
            given = (
                args if same else tuple(positional),
                kwargs if all(by_key[key] is kwargs[key] for key in by_key) else by_key,
            )
        if not sites:
            self.attached.expect(base, skipped="takes no floating tensor")
        return given

    def leave(self, given: _Given, copies: _Copies, output: object) -> None:
        """Raise RuntimeError if the module wrote to its inputs; remember those that it returned."""
        for tensor, version, site in given:
            if tensor._version != version:
                raise self._written(site, "wrote to its input in place")
            if self.counter.inside:
                base = _base(tensor)
                bare = isinstance(output, Tensor)
                for _, other in (("", output),) if bare else tensors_in(output):
                    if _base(other) is base:
                        self.returned.append((other.detach(), version, site))
        for copy, layout, site in copies:
            if _layout(copy) != layout:
                raise self._written(site, "wrote to a container that it took, and got a copy of it")

    def check_returned(self) -> None:
        """Raise RuntimeError if an input that a module returned was written to afterwards."""
        returned, self.returned = self.returned, []
        for tensor, version, site in returned:
            if tensor._version != version:
                raise self._written(site, "handed on its input, which was then written to in place")

    def _changed(self, value: object, change: Change, base: str, path: str) -> object:
        new = rebuilt(value, change, path)
        if new is not value and not isinstance(new, Tensor):
            self.open[-1][2].append((new, _layout(new), base + path))
        return new

    def _hooked(self, tensor: Tensor, base: str, path: str, call: tuple[str, int]) -> Tensor:
        """Hook a tensor or an alias of it; return the one to pass to the module."""
        site = base + path
        hooked = True
        match self.path:
            case "branch":
                given = alias_of(tensor)
                hook = self.attached.hook_at(site)
                if self.attached.needs_value:
                    hook = partial(hook, value=value_of(given))
                given.register_hook(hook)
            case "total":
                given = tensor
                hooked = self.hook_tensor(tensor, base, path, self.open[-1][0], self.attached)
        if hooked and not path:
            self.fast[call] = base, self.attached.hook_at(base)
        if given is not tensor or given._is_view():
            self.open[-1][1].append((given, given._version, site))
        return given

    def _written(self, site: str, fault: str) -> RuntimeError:
        match self.path:
            case "branch":
                why = "the gradient of this branch cannot be told from that of the tensor itself"
                instead = "Use path='total', or Outputs of the module before"
            case "total":
                why = "PyTorch drops the hooks of a view that is written to"
                instead = "Use Inputs or Outputs of a module before"
        return RuntimeError(f"Inputs: site '{site}': the module {fault}, and {why}. {instead}.")


def _base(tensor: Tensor) -> Tensor | None:
    return tensor._base if tensor._is_view() else tensor


def _layout(value: object) -> object:
    """Return the ids of the parts of a nested value, to detect that it was written to."""
    if isinstance(value, dict):
        return [(key, _layout(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_layout(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return [_layout(getattr(value, item.name)) for item in fields(value)]
    return id(value)
