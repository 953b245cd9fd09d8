"""Inputs: the gradient with respect to the input of a module."""

import operator
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import NO_GRADIENT, Attached, Stage
from gradsurg.sites.contexts import refusal
from gradsurg.sites.module_calls import (
    HookedTensors,
    Shared,
    alias_of,
    hookable_modules,
    is_new,
    layout,
    rebuilt,
    tensors_in,
    with_value,
)
from gradsurg.sites.selection import ModuleSelector
from gradsurg.torch_internals import autograd, module_hooks
from gradsurg.transforms.base import LayerCall, Need

SUFFIX = ".input"

Arguments = tuple[tuple[object, ...], dict[str, Any]]  # Any: a user's values

Running = tuple[
    nn.Module,
    list[tuple[Tensor, int, str]],
    list[tuple[object, object, str]],
    list[LayerCall],
]
"""A running call, with what it must not write to: tensors, each with version and site, and copies
of containers, each with layout and site; and itself for each input, if a transform needs it."""


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

    path: Literal["branch", "total"] = "branch"

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    @property
    def provides(self) -> frozenset[Need]:
        layer: set[Need] = {"layer"} if self.path == "branch" else set()
        return frozenset({"value", "error", "labels", *layer})

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("Inputs", self.stage, self.path)

    def hook(self, attached: Attached) -> None:
        inputs = _HookedInputs(self, attached, Shared())
        modules = hookable_modules(self, inputs, attached, SUFFIX)
        site_ids = self.site_ids(attached, SUFFIX)
        fast = inputs.shared.fast

        # Any: a user's values
        def before(
            module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
        ) -> Arguments | None:
            call = inputs.counter.next(module)
            site = None if call is None else site_ids(module, call)
            running = module, [], [], []
            inputs.running.append(running)
            if site is None:
                return None
            grads_on = torch.is_grad_enabled()
            if site in fast and len(args) == 1 and not kwargs and grads_on:
                given: Any = args[0]
                if self.path == "branch" and type(given) is Tensor and given.requires_grad:
                    given = alias_of(given)
                if (given is not args[0] or is_new(given)) and not attached.needs_value:
                    autograd.hook_first(given, fast[site])
                    _watch(running, given, site, given is not args[0])
                    return None if given is args[0] else ((given,), kwargs)
            new = inputs.hooked_arguments(running, args, kwargs, site)
            if not grads_on:
                inputs.without_graph(module)
            return None if new[0] is args else new

        def after(
            module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], output: object
        ) -> None:
            # There is none if a hook of others raised before the pre-hook of this call ran.
            if any(called is module for called, *_ in inputs.running):
                while (running := inputs.running.pop())[0] is not module:
                    pass
                if running[1] or running[2]:
                    inputs.check_call(running, output)
                if len(running[3]) == 1 and isinstance(output, Tensor):
                    running[3][0].watch(output)

        inputs.register(modules, before, after, always=True)


def _watch(running: Running, tensor: Tensor, site: str, is_alias: bool) -> None:
    """Note a tensor whose hook is lost if it is written to: an alias or a view."""
    if is_alias or module_hooks.is_view(tensor):
        running[1].append((tensor, module_hooks.version(tensor), site))


class _HookedInputs(HookedTensors):
    """Hooks the inputs of module calls and checks that nothing writes to them."""

    selector: Inputs

    def __init__(self, selector: Inputs, attached: Attached, shared: Shared) -> None:
        super().__init__(selector, attached, shared)
        self.makes_alias = selector.path == "branch"
        self.running: list[Running] = []

    def begin(self) -> None:
        super().begin()
        self.running.clear()

    def hooked_arguments(
        self, running: Running, args: tuple[object, ...], kwargs: dict[str, Any], base: str
    ) -> Arguments:
        """Hook the tensors in the arguments; return the arguments to call the module with."""
        attached = self.attached
        sites: dict[int, tuple[Tensor, str]] = {}  # by the id of the tensor

        def change(path: str, tensor: Tensor) -> Tensor:
            site = base + path
            if path:
                attached.forget(base)
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                attached.expect(site, skipped=NO_GRADIENT)
                sites[id(tensor)] = tensor, site
            elif id(tensor) in sites:
                attached.expect(sites[id(tensor)][1], [site])
            else:
                sites[id(tensor)] = self._hooked(running, tensor, base, path), site
            return sites[id(tensor)][0]

        def hooked(value: object, path: str) -> object:
            new = rebuilt(value, change, path)
            if new is not value and not isinstance(new, Tensor):
                running[2].append((new, layout(new), base + path))
            return new

        bare = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        new = [hooked(arg, "" if bare else f".{index}") for index, arg in enumerate(args)]
        by_key = {key: hooked(arg, f".{key}") for key, arg in kwargs.items()}
        if not sites:
            attached.expect(base, skipped="takes no floating tensor")
        same = all(map(operator.is_, [*new, *by_key.values()], [*args, *kwargs.values()]))
        return (args, kwargs) if same else (tuple(new), by_key)

    def _hooked(self, running: Running, tensor: Tensor, base: str, path: str) -> Tensor:
        """Hook a tensor or an alias of it; return the one to pass to the module."""
        attached, given = self.attached, tensor
        if self.selector.path == "branch":
            given, hook = alias_of(tensor), attached.hook_at(base + path)
            if attached.needs_layer:
                running[3].append(layer := LayerCall(running[0], given.detach().clone()))
                given.register_hook(partial(hook, value=layer.input, layer=layer))
            else:
                given.register_hook(with_value(hook, given) if attached.needs_value else hook)
            is_hooked = True
        else:
            is_hooked = self.hook_tensor(tensor, base, path, running[0])
        if is_hooked and not path:
            self.shared.fast[base] = attached.hook_at(base)
        _watch(running, given, base + path, given is not tensor)
        return given

    def check_call(self, running: Running, output: object) -> None:
        """Raise RuntimeError if the module wrote to its inputs; watch those that it returned."""
        for tensor, version, site in running[1]:
            if module_hooks.version(tensor) != version:
                raise refusal(self.selector, "in-place write", site, fault="wrote to its input")
            if self.counter.inside:
                base = module_hooks.base_of(tensor)
                for _, other in tensors_in(output):
                    if module_hooks.base_of(other) is base:
                        self.written.append((other.detach(), version, site))
        for copy, before, site in running[2]:
            if layout(copy) != before:
                fault = "wrote to a container that it took, and got a copy of it"
                raise refusal(self.selector, "in-place write", site, fault=fault)
