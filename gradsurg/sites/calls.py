"""The calls of modules, numbered once for all kinds of site, and hooks on modules and tensors."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from gradsurg.sites.places import Door, Hook, Kind, Named, Traced
from gradsurg.sites.selection import OUTSIDE, names_of, scanned
from gradsurg.sites.tensors import with_value
from gradsurg.torch_internals import autograd, compiling, module_hooks

Args = tuple[object, ...]
Keywords = dict[str, Any]  # Any: a user's values

Call = tuple[str, int]
"""A call of a module: its name, and its index among the calls of that name, or OUTSIDE."""


class CallNumbers:
    """The calls of the modules of a model in one thread, numbered for one kind of site.

    Attributes:
        depth: The number of calls of the model that run, one inside the other.
        running: The calls that have begun and not ended, each with the identity of its module and a
            note of the kind.
        at_end: Checks that run when the model's forward has ended without an error.
        kept: Values that a kind remembers until the next call of the model.
    """

    def __init__(self, names: Mapping[int, tuple[str, ...]], left_out: compiling.LeftOut) -> None:
        self._names, self._left_out = names, left_out
        self._counts: dict[int, int] = {}
        self._graphless: list[tuple[int, int, Call]] = []
        self._others: dict[int, nn.Module] = {}  # held, so that no new module gets the same id
        self.depth = 0
        self.running: list[tuple[int, Any]] = []  # Any: each kind has notes of its own type
        self.at_end: list[Callable[[], None]] = []
        self.kept: dict[object, Any] = {}  # Any: as above

    def begin(self) -> None:
        """Number the calls from 0 on."""
        self.depth = 1
        self._counts.clear()
        self._graphless.clear()
        self._others.clear()
        self.kept.clear()
        self.running.clear()
        self.at_end.clear()

    def next(self, module: nn.Module, other: str = "") -> Call | None:
        """Number a call of the module; `other` is its name if it is not in the model.

        Returns None for a module without a name, and for the recomputation of a call that has made
        a graph. The recomputation of a call without a graph (reentrant checkpoint) has the number
        of that call, since it makes the graph.
        """
        if autograd.backward_task() != -1:
            return self._recomputed(module)
        key = id(module)
        names = self._names.get(key)
        if names is None:
            if not other:
                return None
            names = (other,)
            if self.depth:
                self._others[key] = module
        if not self.depth:
            self._number_compiled()
        index = self._counts.get(key, 0) if self.depth else OUTSIDE
        self._counts[key] = index + 1
        if len(names) == 1 or index == OUTSIDE:
            call = names[0], index
        else:  # the calls of a module with several names take them in turn
            call = names[index % len(names)], index // len(names)
        if not torch.is_grad_enabled():
            self._note_graphless(key, call)
        return call

    def _number_compiled(self) -> None:
        """Number the calls from this one on, if compiled code has left out the beginning."""
        left_out = self._left_out
        if left_out.has_any and self not in left_out.needed and compiling.in_compiled():
            left_out.needed.append(self)
            self.begin()

    @property
    def has_graphless(self) -> bool:
        """Whether a call has made no graph, so that a recomputation may make it."""
        return bool(self._graphless)

    def enter(self, module: nn.Module, note: Any) -> None:  # Any: see `running`
        """Note that a call of a module has begun."""
        self.running.append((id(module), note))

    def leave(self, module: nn.Module) -> Any:  # Any: see `running`
        """Return the note of the call that ends; None if its beginning was not seen.

        The pre-hook of a kind does not run if another hook raises first, and its hook does not run
        after a KeyboardInterrupt. So calls that were begun later and did not end are dropped.
        """
        key, running = id(module), self.running
        if running and running[-1][0] == key:
            return running.pop()[1]
        if all(called != key for called, _ in running):
            return None
        while running[-1][0] != key:
            running.pop()
        return running.pop()[1]

    def _note_graphless(self, key: int, call: Call) -> None:
        # Outside of the model's forward the calls are never cleared: only those in a checkpoint
        # are kept, whose forward is on the stack.
        if self.depth or autograd.running_functions():
            self._graphless.append((autograd.next_sequence_number(), key, call))

    def _recomputed(self, module: nn.Module) -> Call | None:
        node, key = autograd.running_node(), id(module)
        if not isinstance(node, BackwardCFunction):
            return None
        # The node of a checkpoint is made before its modules are called. The calls without a graph
        # that follow it are those inside the checkpoint, and are repeated in the same order.
        checkpoint = autograd.number_of(node)
        for place, (number, called, call) in enumerate(self._graphless):
            if number > checkpoint and called == key:
                del self._graphless[place]
                if not torch.is_grad_enabled():  # in a checkpoint inside this one
                    self._graphless.append((autograd.next_sequence_number(), key, call))
                return call
        return None


class ThreadCalls(threading.local):
    """The `calls` of each thread, which has its own sequence numbers and running calls."""

    def __init__(self, names: Mapping[int, tuple[str, ...]], left_out: compiling.LeftOut) -> None:
        self.calls = CallNumbers(names, left_out)


class Shared:
    """The numbering of the calls of modules, one object for all kinds that watch a model.

    It alone knows of recomputation under checkpoints, of threads, of copies of modules, and of
    exceptions in a forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self.threads: list[ThreadCalls] = []
        self._stack = ExitStack()

    @cached_property
    def _left_out(self) -> compiling.LeftOut:
        """The hooks that compiled code does not need, if no kind needs numbers there."""
        return compiling.LeftOut()

    def follow(self, stack: ExitStack, *, is_traced: bool = False) -> ThreadCalls:
        """Return the calls for one more kind, which are numbered until `stack` is closed.

        `is_traced` says that its hooks need no numbers in compiled code.
        """
        model = self._model()
        assert model is not None
        # By identity: the dict is held by hooks of the modules, which must not hold the modules.
        # Copies that share their hooks, such as replicas of DataParallel, have other identities.
        names = {id(module): tuple(names) for module, names in names_of(model).items()}
        thread = ThreadCalls(names, self._left_out)
        self.threads.append(thread)
        stack.callback(self.threads.remove, thread)
        if not is_traced:
            self._left_out.needed.append(thread)
            stack.callback(self._left_out.needed.remove, thread)
        return thread

    def untraced(self, hook: Callable[..., None]) -> Callable[..., object]:
        """Wrap a hook of the model, left out of compiled code if no kind needs numbers there."""
        # A hook that is needed from the start is hidden from Dynamo altogether.
        return compiling.untraced(hook) if self._left_out.needed else self._left_out.hook(hook)

    def renew(self) -> None:
        """Hook the model anew: its calls begin before all other hooks, and end after them."""
        self._stack.close()
        model, threads, held = self._model(), self.threads, self._model
        if model is None or not threads:
            return

        def begin(module: nn.Module, args: object) -> None:
            if module is not held() or autograd.in_backward():
                return
            for thread in threads:
                calls = thread.calls
                # A KeyboardInterrupt in an earlier forward leaves its depth behind.
                if calls.depth and autograd.calls_on_stack().count(id(module)) > 1:
                    calls.depth += 1
                else:
                    calls.begin()

        def end(module: nn.Module, args: object, output: object) -> None:
            if module is held() and not autograd.in_backward():
                for thread in threads:
                    thread.calls.depth = max(thread.calls.depth - 1, 0)

        def check(module: nn.Module, args: object, output: object) -> None:
            for thread in threads:
                checks = [*thread.calls.at_end]
                thread.calls.at_end.clear()
                for unchanged in checks:
                    unchanged()

        pre_hook, hook = model.register_forward_pre_hook, model.register_forward_hook
        self._stack.callback(pre_hook(self.untraced(begin), prepend=True).remove)
        self._stack.callback(hook(self.untraced(end), always_call=True).remove)
        self._stack.callback(hook(self.untraced(check)).remove)

    @property
    def has_graphless(self) -> bool:
        """Whether a module was called without making a graph in the latest forward."""
        return any(thread.calls.has_graphless for thread in self.threads)

    def close(self) -> None:
        """Remove the hooks of the model."""
        self._stack.close()


class WatchedCalls(ABC):
    """The tensors that modules take or return, hooked in each call by `before` and `after`.

    In compiled code `traced` replaces the hook that acts, and the other hook is left out. A module
    without a hook from `Door.traced` breaks the compiled graph, and so does a call that cannot be
    traced: from then on both hooks run, and the calls are numbered.
    """

    acts_before = False  # whether `before` acts, and replaces inputs by aliases
    always_ends = False  # whether `after` is called after a call that raises, too

    def __init__(
        self,
        kind: Kind,
        door: Door,
        found: Sequence[Named],
        shared: Shared,
        hooks: Mapping[nn.Module, Traced],
    ) -> None:
        refuse_scripted(door, kind, found)
        self.kind, self.door = kind, door
        self.thread = shared.follow(door.stack, is_traced=len(hooks) == len(found))
        for _, module, _ in found:
            assert isinstance(module, nn.Module)
            first, last = compiling.untraced(self.before), compiling.untraced(self.after)
            if (hook := hooks.get(module)) is not None:
                first, last = self._in_graph(hook)
            vars(first)["makes_alias"] = self.acts_before
            # Those that do not make aliases hook the inputs themselves: they run first.
            handle = module_hooks.register_pre_hook_before(_makes_alias, module, first)
            door.stack.callback(remove_hook, handle)
            handle = module.register_forward_hook(
                last, with_kwargs=True, always_call=self.always_ends
            )
            door.stack.callback(remove_hook, handle)

    @abstractmethod
    def before(self, module: nn.Module, args: Args, kwargs: Keywords) -> object:
        """The pre-hook of a module."""

    @abstractmethod
    def after(self, module: nn.Module, args: Args, kwargs: Keywords, output: object) -> object:
        """The hook of a module."""

    @abstractmethod
    def traced(self, hook: Traced, args: Args, kwargs: Keywords, output: object = None) -> object:
        """Act in compiled code; None if only the untraced hook can act."""

    def _in_graph(self, hook: Traced) -> list[Callable[..., object]]:
        """Return the pre-hook and the hook of a module for compiled code."""
        order = -1 if self.acts_before else 1
        other, acts = [self.before, self.after][::order]
        left_out = compiling.LeftOut()

        def untraced(*given: Any) -> object:  # Any: the arguments of one of the two
            left_out.needed[:] = [hook]
            return acts(*given)

        leave_graph = compiling.untraced(untraced)

        def traced(module: nn.Module, *given: Any) -> object:  # Any: as above
            result = None if left_out.needed else self.traced(hook, *given)
            return leave_graph(module, *given) if result is None else result

        return [left_out.hook(other), compiling.traceable(acts, traced)][::order]


def _makes_alias(hook: object) -> bool:
    return getattr(hook, "makes_alias", False)


def hook_calls(
    door: Door,
    found: Iterable[Named],
    before: Callable[..., object] | None = None,
    after: Callable[..., object] | None = None,
    *,
    first: bool = False,
    always: bool = False,
) -> None:
    """Register a pre-hook and a hook with keyword arguments on modules.

    `first` runs the pre-hook before those of others, `always` the hook after a call that raises.
    """
    pre_hook, hook = (each and compiling.untraced(each) for each in (before, after))
    for module in [named.owners[0] for named in found]:
        if pre_hook is not None:
            handle = module.register_forward_pre_hook(pre_hook, prepend=first, with_kwargs=True)
            door.stack.callback(remove_hook, handle)
        if hook is not None:
            handle = module.register_forward_hook(hook, with_kwargs=True, always_call=always)
            door.stack.callback(remove_hook, handle)


def remove_hook(handle: RemovableHandle) -> None:
    """Remove a hook of a module, or of all modules, also from the calls that run.

    PyTorch lists the hooks of a call before it runs the first of them. It calls those that were
    removed since, without their keyword arguments.
    """
    hook = (handle.hooks_dict_ref() or {}).get(handle.id)
    autograd.remove_global_forward_hook(handle)
    if isinstance(hook, compiling.ModuleHook):
        hook.close()


def hook_tensor(door: Door, tensor: Tensor, hook: Hook) -> None:
    """Register a hook on a tensor, with its value if the hook asks for it."""
    reads = "value" in hook.asks
    handle = tensor.register_hook(with_value(hook.call, tensor) if reads else hook.call)
    door.leaves.add(tensor, handle)


class Leaves:
    """The hooks on leaf tensors, except those of `Parameters`; they outlive a graph.

    They stay until the surgery is closed: after a change of its interventions they still act in
    graphs that were made before.
    """

    def __init__(self) -> None:
        # Weakly: an input may be another leaf in each step.
        self._handles: MutableMapping[Tensor, list[RemovableHandle]] = WeakIdKeyDictionary()

    def add(self, tensor: Tensor, handle: RemovableHandle) -> None:
        """Keep the handle of a hook on a tensor, if it is a leaf."""
        if tensor.is_leaf:
            self._handles.setdefault(tensor, []).append(handle)

    def close(self) -> None:
        """Remove them."""
        for handle in [each for handles in self._handles.values() for each in handles]:
            handle.remove()
        self._handles.clear()


def refuse_scripted(door: Door, kind: Kind, found: Sequence[Named]) -> None:
    """Raise the error if one of the modules is a ScriptModule, which runs no Python hooks."""
    for (name, *_), module, _ in found:
        if isinstance(module, nn.Module) and module_hooks.is_scripted(module):
            door.refuse("TorchScript", kind, name)


def name_in(found: Sequence[Named]) -> Callable[[nn.Module], str]:
    """Return a function from a module to its first name, empty for a copy of a module."""
    # By identity: the hooks must not hold the modules.
    names = {id(named.thing): named.names[0] for named in found}
    return lambda module: names.get(id(module), "")


@scanned
def modules_of(model: nn.Module) -> list[Named]:
    """Return every module of a model, itself as `root`."""
    named = names_of(model).items()
    return [Named(tuple(names), module, (module,) * len(names)) for module, names in named]
