"""Outputs: the gradient with respect to what a module returns."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import ClassVar, TypeGuard
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import NO_GRADIENT, GradFn, HookRegistry, Stage
from gradsurg.sites.call_tracker import Calls, tensors_in
from gradsurg.sites.selection import ModuleSelector, SiteIds, foreign_hooks, names_of
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Need, Scope

ORIGINAL = "_gradsurg_original"  # where an alias keeps what it is one of


@validated
class Outputs(ModuleSelector):
    """The outputs of the modules whose name fits `pattern`, a glob or `re:`; `call` picks one call.

    A tensor hook on every floating tensor that a matching module returns, also inside tuples,
    lists, dicts and dataclasses: the sum over all uses of that output. Site ids are `name#call`,
    with the path of the tensor behind it where there are several: `encoder.lstm#0.1.0`. Calls are
    counted from 0 within one call of the model. Modules that return one and the same tensor (a
    container and its last child, an identity) are one site, unless it was changed in place between
    them. The recomputation of a checkpoint is not hooked again; that of a reentrant one is, for its
    forward has made no graph.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "error"})

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        tensors = OwnedTensors(names_of(model), {}, {})
        stack.callback(tensors.release)
        registry.register(tensors.following(model), stack)
        hooks = [
            (module, _hook_output(registry, tensors, self.site_ids(registry)))
            for module in self.expect_modules(tensors.names, registry)
        ]

        def register(own: ExitStack) -> None:
            for module, hook in hooks:
                own.callback(module.register_forward_hook(hook).remove)

        registry.register(register, stack)


def _hook_output(
    registry: HookRegistry, tensors: "OwnedTensors", chosen: SiteIds
) -> Callable[..., None]:
    short: dict[tuple[str, int], GradFn] = {}  # the gates of calls that have returned one tensor

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        call = tensors.counter.next(module)
        if call is None:
            return
        if is_new(output) and not registry.needs_value:
            gate = short.get(call)
            if gate is not None:
                autograd.hook_first(output, gate)
                return
        base = chosen(module, call)
        if base is None:
            return
        if isinstance(output, Tensor):
            if tensors.hook_tensor(output, base, "", module, registry):
                short[call] = registry.hook_for(base)
        else:
            for path, tensor in tensors_in(output):
                tensors.hook_tensor(tensor, base, path, module, registry)

    return hook


def is_new(output: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor that an operation has made and nobody has hooked: no alias, then."""
    return (
        type(output) is Tensor
        and output.requires_grad
        and output._backward_hooks is None
        and output.grad_fn is not None
        and not hasattr(output, ORIGINAL)
    )


class OwnedTensors(Calls):
    """What is known within one call of the model: also which site owns a tensor."""

    def __init__(
        self,
        names: dict[nn.Module, list[str]],
        leaves: dict[int, tuple[ref[Tensor], RemovableHandle]],
        sites: dict[object, str],
    ) -> None:
        super().__init__(names)
        # Of all threads: the leaves that are hooked, and the site of each gate.
        self.leaves = leaves
        self.sites = sites

    def hook_tensor(
        self, tensor: Tensor, base: str, path: str, module: nn.Module, registry: HookRegistry
    ) -> bool:
        """Hook a tensor at the site `base` + `path`, unless another site has it already; whether
        it was hooked.
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
            # A leaf keeps its hook from step to step.
            if owner is not None:
                if owner != site:
                    registry.expect(owner, [site])
                return False
            registry.expect(site, foreign=foreign_hooks(tensor._backward_hooks))
        gate = registry.hook_for(site)
        self.sites[gate] = site
        if registry.needs_value:
            gate = partial(gate, value=value_of(tensor))
        handle = tensor.register_hook(gate)
        if tensor.is_leaf:  # it outlives the graph, and so does its hook
            for key in [key for key, (held, _) in self.leaves.items() if held() is None]:
                del self.leaves[key]
            self.leaves[id(tensor)] = ref(tensor), handle
        return True

    def owner(self, tensor: Tensor) -> str | None:
        """The site that has hooked a tensor. PyTorch forgets its hooks when it is changed in place,
        for then it is another value, with another gradient.
        """
        for hook in (tensor._backward_hooks or {}).values():
            site = self.sites.get(hook.func if isinstance(hook, partial) else hook)
            if site is not None:
                return site
        return None

    def release(self) -> None:
        """Unhook the leaves; hooks on other tensors end with their graph."""
        for _, handle in self.leaves.values():
            handle.remove()


def alias_of(tensor: Tensor) -> Tensor:
    """The same tensor with a place of its own in the graph, for the gradient of one branch."""
    # Unlike `view_as`, which makes the stride of a dimension of size 1 anew.
    alias = tensor[...]
    setattr(alias, ORIGINAL, (ref(tensor), tensor._version))
    return alias


def original(tensor: Tensor) -> Tensor:
    """What an alias stands for: what a module hands on is the tensor that it was given."""
    held, version = getattr(tensor, ORIGINAL, (None, 0))
    given = None if held is None else held()
    # What was written to since is another value, with another gradient.
    return tensor if given is None or given._version != version else original(given)


def value_of(tensor: Tensor) -> Tensor:
    """What a hook on a tensor may hold of it: were it the tensor itself, neither would be freed.

    An activation is copied, for what comes next may change it in place. A leaf is hooked for many
    steps, and its value is the one of the day.
    """
    return tensor.detach() if tensor.is_leaf else tensor.detach().clone()
