"""The calls of modules, numbered once for all kinds of site, and hooks on modules and tensors."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from gradsurg.sites.places import Door, Hook, Kind, Named
from gradsurg.sites.selection import OUTSIDE, names_of, scanned
from gradsurg.sites.tensors import with_value
from gradsurg.torch_internals import autograd, compiling, module_hooks

Call = tuple[str, int]
"""A call of a module: the name that it goes by, and its index among those, or OUTSIDE."""


class CallNumbers:
    """The calls of the modules of a model in one thread, as one kind of site numbers them.

    `depth` is the number of calls of the model that run, one inside the other. `running` are the
    calls that have begun and not ended, each with the identity of its module and a note of the
    kind. `at_end` are checks that run when the model's forward has ended without an error. `kept`
    is what a kind remembers until the next call of the model.
    """

    __slots__ = ("_counts", "_graphless", "_names", "_others", "at_end", "depth", "kept", "running")

    def __init__(self, names: Mapping[int, tuple[str, ...]]) -> None:
        self._names = names
        self._counts: dict[int, int] = {}
        self._graphless: list[tuple[int, int, Call]] = []
        self._others: dict[int, nn.Module] = {}  # held, as the identity of one is its number
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

        None for one without a name, and for the recomputation of a call that has made
        a graph. The recomputation of a call without a graph, as in a reentrant checkpoint, has the
        number of that call, since it makes the graph.
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
        index = self._counts.get(key, 0) if self.depth else OUTSIDE
        self._counts[key] = index + 1
        if len(names) == 1 or index == OUTSIDE:
            call = names[0], index
        else:  # the calls of a module with several names take them in turn
            call = names[index % len(names)], index // len(names)
        if not torch.is_grad_enabled():
            self._note_graphless(key, call)
        return call

    @property
    def has_graphless(self) -> bool:
        """Whether a call has made no graph, so that a recomputation may make it."""
        return bool(self._graphless)

    def enter(self, module: nn.Module, note: Any) -> None:  # Any: see `running`
        """Note that a call of a module has begun."""
        self.running.append((id(module), note))

    def leave(self, module: nn.Module) -> Any:  # Any: see `running`
        """Return the note of the call that ends; None if its beginning was not seen.

        The pre-hook of a kind does not run if that of others raises, nor its hook after a
        KeyboardInterrupt: calls that were begun later and did not end are dropped.
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
    """The `calls` of each thread: sequence numbers and running calls are those of a thread."""

    def __init__(self, names: Mapping[int, tuple[str, ...]]) -> None:
        self.calls = CallNumbers(names)


class Shared:
    """The numbering of the calls of modules, one object for all kinds that watch a model.

    It alone knows of recomputation under checkpoints, of threads, of copies of modules, and of
    exceptions in a forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self.threads: list[ThreadCalls] = []
        self._breaking: list[ThreadCalls] = []  # of the kinds that break compiled graphs
        self._stack = ExitStack()

    def follow(self, stack: ExitStack, *, is_traced: bool = False) -> ThreadCalls:
        """Return the calls for one more kind, which are numbered until `stack` is closed.

        `is_traced` says that its hooks need no numbers in compiled code.
        """
        thread = ThreadCalls(self._names)
        for threads in (self.threads, *[self._breaking] * (not is_traced)):
            threads.append(thread)
            stack.callback(threads.remove, thread)
        return thread

    def untraced(self, hook: Callable[..., None]) -> Callable[..., object]:
        """Wrap a hook of the model: compiled code does without it if no kind needs numbers there,
        and is left otherwise, as it would lose the side effects.
        """
        return (compiling.untraced if self._breaking else compiling.left_out)(hook)

    @cached_property
    def _names(self) -> dict[int, tuple[str, ...]]:
        # By identity: the dict is held by hooks of the modules, which must not hold the modules.
        # Copies that share their hooks, as the replicas of DataParallel, have another one.
        model = self._model()
        named = {} if model is None else names_of(model)
        return {id(module): tuple(names) for module, names in named.items()}

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
                if calls.depth and autograd.calls_on_stack(module) > 1:
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


def register(
    door: Door,
    found: Sequence[Named],
    before: Callable[..., object],
    after: Callable[..., object],
    *,
    makes_alias: bool = False,
    always: bool = False,
    traced: Mapping[nn.Module, Callable[..., object]] | None = None,
) -> None:
    """Register a pre-hook and a hook with keyword arguments on modules.

    `traced` has the function that takes the place of both in compiled code: of the pre-hook if that
    makes aliases, else of the hook. A module without one breaks the compiled graph.

    `always` calls the hook after a call that raises, too. `makes_alias` says that the pre-hook puts
    aliases in the place of inputs: it runs after those that do not, as these hook the inputs
    themselves.
    """
    plain_before, plain_after = compiling.untraced(before), compiling.untraced(after)
    vars(plain_before)["makes_alias"] = makes_alias
    for _, module, _ in found:
        assert isinstance(module, nn.Module)
        first, last = plain_before, plain_after
        if traced and module in traced:
            if makes_alias:
                first = compiling.traceable(before, traced[module])
                last = compiling.left_out(after)
            else:
                first = compiling.left_out(before)
                last = compiling.traceable(after, traced[module])
            vars(first)["makes_alias"] = makes_alias
        handle = module_hooks.register_pre_hook_before(_makes_alias, module, first)
        door.stack.callback(handle.remove)
        handle = module.register_forward_hook(last, with_kwargs=True, always_call=always)
        door.stack.callback(handle.remove)


def _makes_alias(hook: object) -> bool:
    return getattr(hook, "makes_alias", False)


def hook_tensor(door: Door, tensor: Tensor, hook: Hook) -> None:
    """Register a hook on a tensor, with its value if the hook asks for it."""
    reads = "value" in hook.asks
    handle = tensor.register_hook(with_value(hook.call, tensor) if reads else hook.call)
    door.leaves.add(tensor, handle)


@dataclass(eq=False)
class Leaves:
    """The hooks on leaf tensors other than those of `Parameters`, which outlive a graph.

    They stay until the surgery is closed: after a change of its interventions they still act in
    graphs that were made before.
    """

    _hooked: dict[int, tuple[ref[Tensor], RemovableHandle]] = field(default_factory=dict)

    def add(self, tensor: Tensor, handle: RemovableHandle) -> None:
        """Keep the handle of a hook on a tensor, if it is a leaf."""
        if not tensor.is_leaf:
            return
        # An input that requires a gradient is another leaf in each step.
        for key in [key for key, (held, _) in self._hooked.items() if held() is None]:
            del self._hooked[key]
        self._hooked[id(tensor)] = ref(tensor), handle

    def close(self) -> None:
        """Remove them."""
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()


def refuse_scripted(door: Door, kind: Kind, found: Sequence[Named]) -> None:
    """Raise the error for modules of which one is a ScriptModule, which runs no Python hooks."""
    for (name, *_), module, _ in found:
        if isinstance(module, nn.Module) and module_hooks.is_scripted(module):
            door.refuse("TorchScript", kind, name)


@scanned
def modules_of(model: nn.Module) -> list[Named]:
    """Return every module of a model, itself as `root`."""
    named = names_of(model).items()
    return [Named(tuple(names), module, (module,) * len(names)) for module, names in named]
