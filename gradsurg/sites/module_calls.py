"""Calls of modules: number them, walk over the tensors that they take and return, hook these."""

import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from gradsurg.sites.contexts import refusal
from gradsurg.sites.places import NO_GRADIENT, Attached, GradFn, Selector, SiteFn
from gradsurg.sites.selection import OUTSIDE, ModuleSelector, foreign_hooks, names_of
from gradsurg.torch_internals import autograd, compiling, module_hooks

ORIGINAL = "_gradsurg_original"  # the attribute of an alias that holds the original tensor


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
        count = self.counts.get(module, 0) if self.inside else OUTSIDE
        self.counts[module] = count + 1
        if len(names) == 1 or count == OUTSIDE:
            self.latest = names[0], count
        else:
            self.latest = names[count % len(names)], count // len(names)
        return self.latest

    def _recomputed(self, module: nn.Module) -> tuple[str, int] | None:
        node = autograd.running_node()
        if not isinstance(node, BackwardCFunction) or not torch.is_grad_enabled():
            return None
        # The node of a checkpoint is made before its modules are called. The calls that follow it
        # are those inside the checkpoint, and are repeated in the same order.
        checkpoint = autograd.number_of(node)
        for call in self.graphless:
            if call[0] > checkpoint and call[1] is module:
                self.graphless.remove(call)
                return call[2]
        return None


class Calls(threading.local):
    """Numbers the calls of each module within one call of the model, separately in each thread."""

    def __init__(self, names: Mapping[nn.Module, Sequence[str]]) -> None:
        self.names = names
        self.counter = CallCounts(names)

    def hook(self, model: nn.Module, stack: ExitStack) -> None:
        """Follow the calls of the model itself; a copy of it made inside the block is ignored."""
        # Functions, not methods: a model is deep-copied with its hooks and their bound objects.
        begin = compiling.untraced(lambda module, args: self.start())
        end = compiling.untraced(lambda module, args, output: self.stop())
        check = compiling.untraced(lambda module, args, output: self.check())
        stack.callback(model.register_forward_pre_hook(begin, prepend=True).remove)
        stack.callback(model.register_forward_hook(end, always_call=True).remove)
        if type(self).check is not Calls.check:
            stack.callback(model.register_forward_hook(check).remove)

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

    def check(self) -> None:
        """Raise the error of a subclass about a call of the model that has ended."""


def hookable_modules(
    selector: ModuleSelector, calls: Calls, attached: Attached, suffix: str = ""
) -> list[nn.Module]:
    """Return the modules that may be selected, after entering their sites into the ledger.

    Raises ValueError if one of them is a ScriptModule.
    """
    modules = selector.expect_modules(calls.names, attached, suffix)
    refuse_scripted(selector, {module: calls.names[module] for module in modules})
    return modules


def refuse_scripted(selector: Selector, selected: Mapping[nn.Module, Sequence[str]]) -> None:
    """Raise ValueError if one of the selected modules, given with their names, is scripted."""
    for module, names in selected.items():
        if module_hooks.is_scripted(module):
            raise refusal(selector, "TorchScript", names[0])


# The tensors in nested values.


def _parts(value: object) -> list[tuple[Any, object]]:  # Any: keys of a user's dict
    """Return the items of a container, or the tensors among the attributes of another object."""
    if isinstance(value, MutableMapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, nn.Module | type | FunctionType | ModuleType):
        return []
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    attributes = getattr(value, "__dict__", {})
    return [(key, item) for key, item in attributes.items() if isinstance(item, Tensor)]


def _with_parts(value: Any, changed: Mapping[Any, object]) -> object:  # Any: see `_parts`
    """Return a copy of a container or object with other parts under some keys."""
    if isinstance(value, list | tuple):
        parts = [changed.get(index, part) for index, part in enumerate(value)]
        kind: Any = type(value)  # the constructor of a named tuple takes its parts one by one
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    new = copy(value)
    for key, part in changed.items():
        if isinstance(value, MutableMapping):
            new[key] = part
        else:
            object.__setattr__(new, key, part)  # of a frozen dataclass too
    return new


def tensors_in(value: object, path: str = "", every: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors in a nested value (or `every` tensor) with their paths.

    The path of a bare tensor is empty. Dicts, lists, tuples and dataclasses are searched, and the
    attributes of other objects.
    """
    if isinstance(value, Tensor):
        if every or value.is_floating_point():
            yield path, value
    elif value is not None:
        for key, part in _parts(value):
            yield from tensors_in(part, f"{path}.{key}", every)


def rebuilt(value: object, change: Callable[[str, Tensor], Tensor], path: str = "") -> object:
    """Return the same nesting with `change(path, tensor)` in place of each floating tensor.

    Parts without a changed tensor are returned as they are; nothing is changed in place.
    """
    if isinstance(value, Tensor):
        return change(path, value) if value.is_floating_point() else value
    parts = [] if value is None else _parts(value)
    new = {key: rebuilt(part, change, f"{path}.{key}") for key, part in parts}
    changed = {key: new[key] for key, part in parts if new[key] is not part}
    return _with_parts(value, changed) if changed else value


def layout(value: object) -> object:
    """Return the ids of the parts of a nested value, to detect that it was written to."""
    parts = [] if isinstance(value, Tensor) else _parts(value)
    return [(key, layout(part)) for key, part in parts] or id(value)


# Hooks on these tensors.


class Shared:
    """The hooks of a kind in all threads."""

    def __init__(self) -> None:
        self.leaves: dict[int, tuple[ref[Tensor], RemovableHandle]] = {}  # hooked leaves by id
        self.sites: dict[object, str] = {}  # by hook
        self.fast: dict[str, GradFn] = {}  # the hooks of calls with one tensor, by site

    def release(self) -> None:
        """Remove the hooks of leaves; those of other tensors end with their graph."""
        for _, handle in self.leaves.values():
            handle.remove()


class HookedTensors(Calls):
    """Call counts that also record which site has hooked each tensor of a call of the model.

    `written` are tensors that nothing may write to before the call of the model ends, each with its
    version and its site. `makes_alias` tells that the module gets aliases of its inputs.
    """

    makes_alias = False

    def __init__(self, selector: ModuleSelector, attached: Attached, shared: Shared) -> None:
        super().__init__(names_of(attached.model))
        self.selector = selector
        self.attached = attached
        self.shared = shared
        self.written: list[tuple[Tensor, int, str]] = []

    def begin(self) -> None:
        self.written.clear()

    def check(self) -> None:
        written, self.written = self.written, []
        for tensor, version, site in written:
            if autograd.version_of(tensor) != version:
                fault = "returned its input, which was then written to in place"
                raise refusal(self.selector, "in-place write", site, fault=fault)

    def register(
        self,
        modules: Sequence[nn.Module],
        before: Callable[..., object],
        after: Callable[..., object],
        always: bool = False,
    ) -> None:
        """Register a pre-hook and a hook with keyword arguments on modules, and follow the model.

        `always` calls the hook after a call that raises, too.
        """
        stack = self.attached.stack
        before, after = compiling.untraced(before), compiling.untraced(after)
        vars(before)["makes_alias"] = self.makes_alias
        stack.callback(self.shared.release)
        for module in modules:
            # A total is hooked on the tensor itself, before an alias takes its place.
            handle = module_hooks.register_pre_hook_before(_makes_alias, module, before)
            stack.callback(handle.remove)
            handle = module.register_forward_hook(after, with_kwargs=True, always_call=always)
            stack.callback(handle.remove)
        self.hook(self.attached.model, stack)

    def hook_tensor(self, tensor: Tensor, base: str, path: str, module: nn.Module) -> bool:
        """Hook a tensor at site `base + path` unless it needs no gradient or has a site already.

        Returns whether it was hooked.
        """
        attached, leaves = self.attached, self.shared.leaves
        tensor = original(tensor)
        site = base + path
        if path:
            attached.forget(base)
        if not tensor.requires_grad:
            if tensor.is_floating_point():
                attached.expect(site, skipped=NO_GRADIENT)
                self.without_graph(module)
            return False
        if hooks := module_hooks.hooks_of(tensor):
            owner = self._owner(hooks)
            # A leaf keeps its hook in later steps.
            if owner is not None:
                if owner != site:
                    attached.expect(owner, [site])
                return False
            attached.expect(site, foreign=foreign_hooks(hooks))
        hook = attached.hook_at(site)
        self.shared.sites[hook] = site
        handle = tensor.register_hook(with_value(hook, tensor) if attached.needs_value else hook)
        if tensor.is_leaf:  # it outlives the graph, and so does its hook
            for key in [key for key, (held, _) in leaves.items() if held() is None]:
                del leaves[key]
            leaves[id(tensor)] = ref(tensor), handle
        return True

    def _owner(self, hooks: Mapping[int, Callable[..., object]]) -> str | None:
        """Return the site that has hooked a tensor with these hooks.

        PyTorch drops the hooks of a tensor that is changed in place, whose gradient is another one.
        """
        sites = self.shared.sites
        plain = (hook.func if isinstance(hook, partial) else hook for hook in hooks.values())
        return next((sites[hook] for hook in plain if hook in sites), None)


def _makes_alias(hook: object) -> bool:
    return getattr(hook, "makes_alias", False)


def is_new(value: object) -> TypeGuard[Tensor]:
    """Return whether `autograd.hook_first` may hook it: a tensor without hooks, not an alias."""
    return module_hooks.is_hookable(value) and not hasattr(value, ORIGINAL)


def alias_of(tensor: Tensor) -> Tensor:
    """Return an equal tensor with its own edge in the graph, for the gradient of one branch."""
    # Unlike `view_as`, this keeps the stride of a dimension of size 1.
    alias = tensor[...]
    setattr(alias, ORIGINAL, (ref(tensor), module_hooks.version(tensor)))
    return alias


def original(tensor: Tensor) -> Tensor:
    """Return the tensor that an alias stands for: a module may return its aliased input."""
    held, version = getattr(tensor, ORIGINAL, (None, 0))
    source = None if held is None else held()
    # A tensor written to since is another value, with another gradient.
    if source is None or autograd.version_of(source) != version:
        return tensor
    return original(source)


def with_value(hook: SiteFn, tensor: Tensor) -> GradFn:
    """Return the hook with the value of its tensor, without holding the tensor itself.

    An activation is copied, since a later operation may change it in place. The value of a leaf,
    hooked for many steps, is its current one.
    """
    return partial(hook, value=tensor.detach() if tensor.is_leaf else tensor.detach().clone())
