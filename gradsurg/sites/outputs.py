"""Outputs: the gradient with respect to the output of a module."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import ClassVar, TypeGuard
from weakref import ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import NO_GRADIENT, GradFn, HookRegistry, Stage
from gradsurg.sites.call_tracker import Calls, tensors_in
from gradsurg.sites.selection import ModuleSelector, SiteIds, foreign_hooks, names_of
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Need, Scope

ORIGINAL = "_gradsurg_original"  # the attribute of an alias that holds the original tensor


@validated
class Outputs(ModuleSelector):
    """The outputs of the modules whose name fits `pattern`, a glob or `re:`; `call` picks one call.

    A tensor hook on every floating tensor that a matching module returns, also inside tuples,
    lists, dicts and dataclasses: its gradient is the sum over all uses of that output. Site ids are
    `name#call`, followed by the path of the tensor if there are several: `encoder.lstm#0.1.0`.
    Calls are counted from 0 within one call of the model. Modules that return the same tensor (a
    container and its last child, an identity) are one site, unless it was changed in place between
    them. The recomputation of a checkpoint is not hooked again; that of a reentrant checkpoint is,
    since its forward makes no graph.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "error", "labels"})

    def hook(
        self,
        model: nn.Module,
        steps: OptimizerSteps,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        tensors = HookedTensors(names_of(model), {}, {})
        stack.callback(tensors.release)
        registry.register(tensors.following(model), stack)
        hooks = [
            (module, _hook_output(registry, tensors, self.site_ids(registry)))
            for module in self.expect_modules(tensors.names, registry)
        ]

        def register(removals: ExitStack) -> None:
            for module, hook in hooks:
                removals.callback(module.register_forward_hook(hook).remove)

        registry.register(register, stack)


def _hook_output(
    registry: HookRegistry, tensors: "HookedTensors", site_ids: SiteIds
) -> Callable[..., None]:
    fast: dict[tuple[str, int], GradFn] = {}  # the hooks of calls that have returned one tensor

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        call = tensors.counter.next(module)
        if call is None:
            return
        if is_new(output) and not registry.needs_value:
            site_hook = fast.get(call)
            if site_hook is not None:
                autograd.hook_first(output, site_hook)
                return
        base = site_ids(module, call)
        if base is None:
            return
        if isinstance(output, Tensor):
            if tensors.hook_tensor(output, base, "", module, registry):
                fast[call] = registry.hook_for(base)
        else:
            for path, tensor in tensors_in(output):
                tensors.hook_tensor(tensor, base, path, module, registry)

    return hook


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

    def hook_tensor(
        self, tensor: Tensor, base: str, path: str, module: nn.Module, registry: HookRegistry
    ) -> bool:
        """Hook a tensor at site `base + path` unless it needs no gradient or has a site already.

        Returns whether it was hooked.
        """
        tensor = original(tensor)
        site = base + path
        if path:
            registry.forget(base)
        if not tensor.requires_grad:
            if tensor.is_floating_point():
                registry.expect(site, skipped=NO_GRADIENT)
                self.without_graph(module)
            return False
        if tensor._backward_hooks:
            owner = self.owner(tensor)
            # A leaf keeps its hook in later steps.
            if owner is not None:
                if owner != site:
                    registry.expect(owner, [site])
                return False
            registry.expect(site, foreign=foreign_hooks(tensor._backward_hooks))
        hook = registry.hook_for(site)
        self.sites[hook] = site
        if registry.needs_value:
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
