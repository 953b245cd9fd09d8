"""Outputs: the gradient with respect to the output of a module."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import ClassVar, TypeGuard
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import NO_GRADIENT, Attached, GradFn, Stage
from gradsurg.sites.call_tracker import Calls, rebuilt, tensors_in
from gradsurg.sites.selection import ModuleSelector, SiteIds, foreign_hooks, names_of
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Need

ORIGINAL = "_gradsurg_original"  # the attribute of an alias that holds the original tensor


@validated
class Outputs(ModuleSelector):
    """The outputs of the modules whose name fits `pattern`, a glob or `re:`; `call` picks one call.

    A tensor hook on every floating tensor that a matching module returns, also inside tuples,
    lists, dicts and dataclasses: its gradient is the sum over all uses of that output. Site ids are
    `name#call`, followed by the path of the tensor if there are several: `encoder.lstm#0.1.0`.
    Calls are counted from 0 within one call of the model. Modules that return the same tensor (a
    container and its last child) are one site, unless it was changed in place between them. A
    module that returns its input (an identity, dropout in evaluation) returns an alias of it while
    it is hooked: the gradient is that of its output alone, not of other uses of the input. As for
    `Inputs`, sums over several uses may then differ in the last bit. The recomputation of a
    checkpoint is not hooked again; that of a reentrant checkpoint is, since its forward makes no
    graph.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "error", "labels"})

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        tensors = HookedTensors(names_of(model), {}, {})
        stack.callback(tensors.release)
        attached.register(tensors.following(model), stack)
        before = _note_inputs(tensors)
        hooks = [
            (module, _hook_output(attached, tensors, self.site_ids(attached)))
            for module in self.expect_modules(tensors.names, attached)
        ]

        def check_end(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            tensors.check_handed_on()

        def register(removals: ExitStack) -> None:
            for module, hook in hooks:
                removals.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                removals.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            removals.callback(model.register_forward_hook(compiling.untraced(check_end)).remove)

        attached.register(register, stack)


def _hook_output(
    attached: Attached, tensors: "HookedTensors", site_ids: SiteIds
) -> Callable[..., object]:
    fast: dict[tuple[str, int], GradFn] = {}  # the hooks of calls that have returned one tensor

    @compiling.untraced
    def hook(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
    ) -> object:
        call = tensors.counter.next(module)
        if call is None:
            return output
        site_hook = None if attached.needs_value else fast.get(call)
        base = "" if site_hook is not None else site_ids(module, call)
        if base is None:
            return output
        output = tensors.own_output(module, args, kwargs, output)
        if site_hook is not None and is_new(output):
            autograd.hook_first(output, site_hook)
            return output
        base = base or site_ids(module, call) or ""
        if isinstance(output, Tensor):
            if tensors.hook_tensor(output, base, "", module, attached):
                fast[call] = attached.hook_at(base)
        else:
            for path, tensor in tensors_in(output):
                tensors.hook_tensor(tensor, base, path, module, attached)
        return output

    return hook


def _note_inputs(tensors: "HookedTensors") -> Callable[..., None]:
    """Return the forward pre-hook that notes the versions of the tensors that a module gets."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if torch.is_grad_enabled():
            tensors.versions[module] = [tensor._version for tensor in _given(args, kwargs)]

    return hook


def _given(args: tuple[object, ...], kwargs: dict[str, object]) -> list[Tensor]:
    if len(args) == 1 and type(args[0]) is Tensor and not kwargs:  # the usual call
        return [args[0]]
    return [tensor for _, tensor in tensors_in((args, kwargs), every=True)]


def is_new(output: object) -> TypeGuard[Tensor]:
    """Return whether it is a plain tensor with a graph, without hooks, and not an alias."""
    return (
        type(output) is Tensor
        and output.requires_grad
        and output._backward_hooks is None
        and output.grad_fn is not None
        and not hasattr(output, ORIGINAL)
    )


class HookedTensors(Calls):
    """Call counts that also record which site has hooked each tensor of a call of the model."""

    def __init__(
        self,
        names: dict[nn.Module, list[str]],
        leaves: dict[int, tuple[ref[Tensor], RemovableHandle]],
        sites: dict[object, str],
    ) -> None:
        super().__init__(names)
        # Shared by all threads: the hooked leaves by id, and the site of each hook.
        self.leaves = leaves
        self.sites = sites
        self.versions: dict[nn.Module, list[int]] = {}  # of the inputs of running calls
        self.handed_on: list[tuple[Tensor, int, nn.Module]] = []  # aliases of inputs, as returned

    def begin(self) -> None:
        self.versions.clear()
        self.handed_on.clear()

    def own_output(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        output: object,
    ) -> object:
        """Return an output with an alias in place of each tensor that the module took unchanged."""
        versions = self.versions.pop(module, [])
        given = _given(args, kwargs)
        if len(given) == 1 and type(output) is Tensor and output is not given[0]:
            return output  # the usual case
        if len(given) != len(versions):
            return output  # it is called by itself, or by a hook of others
        unchanged = [
            tensor
            for tensor, version in zip(given, versions, strict=True)
            if tensor._version == version and tensor.requires_grad
        ]

        def own(_path: str, tensor: Tensor) -> Tensor:
            if not any(tensor is other for other in unchanged):
                return tensor
            alias = tensor[...]
            if self.counter.inside:
                self.handed_on.append((alias, alias._version, module))
            return alias

        return rebuilt(output, own)

    def check_handed_on(self) -> None:
        """Raise RuntimeError if an alias was written to: its hook would not see its gradient."""
        handed_on, self.handed_on = self.handed_on, []
        for alias, version, module in handed_on:
            if alias._version != version:
                name = self.names.get(module, ["?"])[0]
                raise RuntimeError(
                    f"Outputs: '{name}' returned its input, which was then written to in place, so "
                    "that the gradient of this output cannot be told from that of the input. Use "
                    "Outputs of the module before."
                )

    def hook_tensor(
        self, tensor: Tensor, base: str, path: str, module: nn.Module, attached: Attached
    ) -> bool:
        """Hook a tensor at site `base + path` unless it needs no gradient or has a site already.

        Returns whether it was hooked.
        """
        tensor = original(tensor)
        site = base + path
        if path:
            attached.forget(base)
        if not tensor.requires_grad:
            if tensor.is_floating_point():
                attached.expect(site, skipped=NO_GRADIENT)
                self.without_graph(module)
            return False
        if tensor._backward_hooks:
            owner = self.owner(tensor)
            # A leaf keeps its hook in later steps.
            if owner is not None:
                if owner != site:
                    attached.expect(owner, [site])
                return False
            attached.expect(site, foreign=foreign_hooks(tensor._backward_hooks))
        hook = attached.hook_at(site)
        self.sites[hook] = site
        if attached.needs_value:
            hook = partial(hook, value=value_of(tensor))
        handle = tensor.register_hook(hook)
        if tensor.is_leaf:  # it outlives the graph, and so does its hook
            for key in [key for key, (held, _) in self.leaves.items() if held() is None]:
                del self.leaves[key]
            self.leaves[id(tensor)] = ref(tensor), handle
        return True

    def owner(self, tensor: Tensor) -> str | None:
        """Return the site that has hooked a tensor.

        PyTorch drops the hooks of a tensor that is changed in place, whose gradient is another one.
        """
        for hook in (tensor._backward_hooks or {}).values():
            site = self.sites.get(hook.func if isinstance(hook, partial) else hook)
            if site is not None:
                return site
        return None

    def release(self) -> None:
        """Remove the hooks of leaves; those of other tensors end with their graph."""
        for _, handle in self.leaves.values():
            handle.remove()


def alias_of(tensor: Tensor) -> Tensor:
    """Return an equal tensor with its own edge in the graph, for the gradient of one branch."""
    # Unlike `view_as`, this keeps the stride of a dimension of size 1.
    alias = tensor[...]
    setattr(alias, ORIGINAL, (ref(tensor), tensor._version))
    return alias


def original(tensor: Tensor) -> Tensor:
    """Return the tensor that an alias stands for: a module may return its aliased input."""
    held, version = getattr(tensor, ORIGINAL, (None, 0))
    source = None if held is None else held()
    # A tensor written to since is another value, with another gradient.
    return tensor if source is None or source._version != version else original(source)


def value_of(tensor: Tensor) -> Tensor:
    """Return the value of a tensor for its own hook, which must not hold the tensor itself.

    An activation is copied, since a later operation may change it in place. The value of a leaf,
    hooked for many steps, is its current one.
    """
    return tensor.detach() if tensor.is_leaf else tensor.detach().clone()
