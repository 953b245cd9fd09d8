"""ModuleGradients: PyTorch's own full backward hooks of a module."""

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.sites.base import NO_GRADIENT, GradFn, HookRegistry, Stage, apply_hooks
from gradsurg.sites.call_tracker import Calls, tensors_in
from gradsurg.sites.selection import ModuleSelector, SiteIds, names_of
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Scope


@validated
class ModuleGradients(ModuleSelector):
    """The full backward hooks of the modules whose name fits `pattern`, for who wants just these.

    `kind="full_backward_pre"`: the gradients of what a module returned, at sites `name#call`.
    `kind="full_backward"`: those of what it took by place, at sites `name#call.input`: as those of
    `Inputs`, a branch, and what is changed there never reaches the module's own parameters. With
    the path of the tensor behind it where there are several: `lstm#0.0`.

    Prefer `Outputs` and `Inputs`. PyTorch wraps what such a module takes and returns in a view, at
    every call, selected or not, and so: what comes behind the module must not write to its output
    in place (the error says so); an input that is not used gets a gradient of zeros instead of
    none; `torch.autograd.grad(y, weight)` does not come by `full_backward`; `torch.compile` breaks
    its graph there and refuses `fullgraph=True`; inside `torch.func` it is refused. Tensors by
    keyword or inside lists and dicts are not seen: the ledger names them, and a call with no others
    is refused. That no input needs a gradient, of which PyTorch warns in each backward, the ledger
    says once; PyTorch's warning is left out while the block is open. The deprecated
    `register_backward_hook` is not offered, and a module that has such a hook is refused.
    """

    kind: Literal["full_backward_pre", "full_backward", "backward"] = "full_backward_pre"

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    def __post_init__(self) -> None:
        if self.kind == "backward":
            raise Contradiction(
                "kind",
                "must be full_backward_pre or full_backward: the hook of register_backward_hook, "
                "which is deprecated, sees the inputs of the last operation inside the module as "
                "those of the module",
            )

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("ModuleGradients", self.stage, self.kind)

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        side = "full_backward" if self.kind == "full_backward" else "full_backward_pre"
        suffix = ".input" if side == "full_backward" else ""
        calls = Calls(names_of(model))
        chosen = self.site_ids(registry, suffix)
        for module in self.expect_modules(calls.names, registry, suffix):
            whose = f"module '{calls.names[module][0]}'"
            forbid_legacy(module._is_full_backward_hook, whose, "ModuleGradients")
            one = tickets(self._register(module, stack))
            stack.callback(one.remove)
            enter = forward_pre_hook(calls, one, "ModuleGradients")
            stack.callback(module.register_forward_pre_hook(enter).remove)
            leave = forward_hook(calls, one, chosen, registry, side, "ModuleGradients")
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        note_in_place(model, stack)
        without_warning(stack)
        calls.hook(model, stack)

    def _register(self, module: nn.Module, stack: ExitStack) -> "Callable[[Hook], RemovableHandle]":
        if self.kind == "full_backward_pre":
            return module.register_full_backward_pre_hook
        before = module._is_full_backward_hook

        def restore() -> None:
            # PyTorch does not, and would refuse the hooks of the other kind for ever.
            if not module._backward_hooks:
                module._is_full_backward_hook = before

        stack.callback(restore)
        return module.register_full_backward_hook


Side = Literal["full_backward_pre", "full_backward"]

IN_PLACE = (
    "gradsurg: a module with full backward hooks hands out views that must not be written to, and "
    "what comes behind it does so. Use Outputs, which hands out the tensor itself."
)


def forward_pre_hook(calls: Calls, one: "Tickets", kind: str) -> Callable[..., None]:
    """The forward pre-hook that goes with the backward hooks of `one`."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...]) -> None:
        names = calls.names.get(module)
        if names is None:  # a copy of the module, made in the block
            return
        if autograd.in_functorch():
            raise RuntimeError(
                f"{kind}: module '{names[0]}' is called inside torch.func, which has no full "
                "backward hooks. Use Outputs or Inputs."
            )
        one.take(module)

    return hook


def forward_hook(
    calls: Calls, one: "Tickets", chosen: SiteIds, registry: HookRegistry, side: Side, refuses: str
) -> Callable[..., None]:
    """The forward hook that goes with them; `refuses` is who refuses a call that they do not see.

    Without, the ledger alone tells of it.
    """
    instead = "Outputs" if side == "full_backward_pre" else "Inputs"
    short: dict[str, Sequence[GradFn]] = {}  # the gates of calls with one tensor
    takes = side == "full_backward"

    # Any: a user's values
    @compiling.untraced
    def hook(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        if calls.names.get(module) is None:  # nor has it been entered
            return
        told, call = one.give(module), calls.counter.next(module)
        base = None if call is None else chosen(module, call)
        if base is None:
            return
        if not torch.is_grad_enabled():
            calls.without_graph(module)
        value = output if not takes else args[0] if len(args) == 1 and not kwargs else None
        if isinstance(value, Tensor) and value.is_floating_point() and _needs_gradient(value):
            if base not in short:
                short[base] = [registry.hook_for(base)]
            for notes in told:
                notes.write(module, short[base])
            return
        ended = Ended(args, kwargs, output)
        where = ended.unseen(side)
        if where and refuses:
            raise RuntimeError(
                f"{refuses}: site '{base}': PyTorch calls a {side} hook for tensors and tuples of "
                f"them, and those that need a gradient are inside {where}. Use {instead}."
            )
        passed = gates_of(side, ended, base, registry)
        for notes in told:
            notes.write(module, passed)

    return hook


def forbid_legacy(flag: bool | None, whose: str, kind: str) -> None:
    """Refuse full hooks where PyTorch has legacy ones, by its own flag."""
    if flag is False:
        raise ValueError(
            f"{kind}: {whose} had hooks of the deprecated register_backward_hook kind, which "
            "PyTorch does not have beside full ones. Use Outputs or Inputs."
        )


def gates_of(side: Side, call: "Ended", base: str, registry: HookRegistry) -> list[GradFn]:
    """The gates of the gradients that the hook gets, in order; what it does not see is told."""
    found = []
    direct = call.direct(side)
    if not any(_needs_gradient(tensor) for _, tensor in call.tensors(side)):
        registry.expect(base, skipped=NO_GRADIENT)
        return [_pass] * len(direct)
    for path, tensor in call.tensors(side):
        if path:
            registry.forget(base)
        if not _needs_gradient(tensor):
            registry.expect(f"{base}{path}", skipped=NO_GRADIENT)
        elif all(tensor is not other for _, other in direct):
            registry.expect(f"{base}{path}", skipped="a full backward hook does not see it")
    for path, value in direct:
        seen = isinstance(value, Tensor) and value.is_floating_point() and _needs_gradient(value)
        found.append(registry.hook_for(f"{base}{path}") if seen else _pass)
    return found


@dataclass(slots=True, frozen=True)
class Ended:
    """A call of a module that has ended: what it took and what it gave."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    output: object

    def direct(self, side: Side) -> list[tuple[str, object]]:
        """What has a place in the gradients that the hook gets, with its path."""
        match side:
            case "full_backward_pre":
                several, values = isinstance(self.output, tuple), self.output
            case "full_backward":
                bare = len(self.args) == 1 and not self.kwargs and isinstance(self.args[0], Tensor)
                several, values = not bare, self.args
        listed = values if isinstance(values, tuple) else (values,)
        return [(f".{place}" if several else "", value) for place, value in enumerate(listed)]

    def tensors(self, side: Side) -> list[tuple[str, Tensor]]:
        """All floating tensors, those too that the hook does not see."""
        words = list(self.kwargs.items()) if side == "full_backward" else []
        values = self.direct(side) + [(f".{key}", value) for key, value in words]
        return [found for path, value in values for found in tensors_in(value, path)]

    def unseen(self, side: Side) -> str:
        """Where the tensors that need a gradient are, if the hook sees none of them."""
        seen = {id(value) for _, value in self.direct(side)}
        wanting = [tensor for _, tensor in self.tensors(side) if _needs_gradient(tensor)]
        if not wanting or any(id(tensor) in seen for tensor in wanting):
            return ""
        if side == "full_backward":
            return "a list, a dict or a dataclass, or given by keyword"
        return f"a {type(self.output).__name__}"


def note_in_place(model: nn.Module, stack: ExitStack) -> None:
    """Let PyTorch's error about a write to what a hooked module has returned say what to do."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        error = sys.exception()
        if (
            isinstance(error, RuntimeError)
            and "BackwardHookFunction" in str(error)
            and IN_PLACE not in getattr(error, "__notes__", ())
        ):
            error.add_note(IN_PLACE)

    stack.callback(model.register_forward_hook(hook, always_call=True).remove)


def without_warning(stack: ExitStack) -> None:
    """Leave out PyTorch's own warning of a module whose inputs need no gradient.

    It would come in each backward, also where the gradients of outputs alone are asked for; where
    nothing passes for that reason, the ledger says so.
    """
    # A comment in the pattern makes it another filter than that of another attachment.
    warnings.filterwarnings("ignore", f"Full backward hook is firing(?#{next(_numbers)})")
    own = warnings.filters[0]

    def remove() -> None:
        filters: Any = warnings.filters  # Any: a list, which its type does not say
        if own in filters:  # nobody has put others in place of all filters
            filters.remove(own)

    stack.callback(remove)


_numbers = count()


def _needs_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _pass(grad: Tensor | None) -> None:
    return None


Grads = tuple[Tensor | None, ...]
Hook = Callable[..., Any]  # Any: PyTorch's own types know no missing gradients

FEW = 64  # hooks whose graphs may be gone before it is asked which are


class Notes(list[tuple[int, ref[nn.Module], Sequence[GradFn]]]):
    """What calls have to say to the backward hook they got: thread, module, and its hooks."""

    def write(self, module: nn.Module, hooks: Sequence[GradFn]) -> None:
        """The hooks of a call of this thread, one for each gradient."""
        self.append((threading.get_ident(), ref(module), hooks))

    def hook(self) -> Hook:
        """A backward hook that goes by them."""

        # A function: a model is copied with its hooks, and a method with its object.
        def hook(module: nn.Module, grads: Grads, *_: object) -> Grads | None:
            own = [note for note in self if note[1]() is module]
            if len(own) > 1:
                own = [note for note in own if note[0] == threading.get_ident()]
                if not own:
                    raise RuntimeError(
                        f"several threads have called a {type(module).__name__} at a time, and in "
                        "the backward of another thread a full backward hook cannot tell these "
                        "calls apart. Use Outputs or Inputs."
                    )
            if not own:
                return None
            hooks = own[0][2]
            if len(hooks) > 1:
                return apply_hooks(hooks, grads)
            result = hooks[0](grads[0])
            return None if result is None else (result,)

        return hook


class _Counter:
    """The place in PyTorch's table of hooks where a new hook stands for every call."""

    def __init__(self, register: Callable[[Hook], RemovableHandle]) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.newest = Notes()
        self.alive: dict[int, ref[Notes]] = {}  # as long as their graphs
        self.most = FEW
        self.handle = register(self.newest.hook())

    def next(self) -> tuple[int, Notes]:
        """Put a new hook in place; the number and the notes of the one that was there."""
        with self.lock:
            number, notes = self.number, self.newest
            self.number, self.newest = number + 1, Notes()
            self.alive[number] = ref(notes)
            if len(self.alive) > self.most:
                self.alive = {key: own for key, own in self.alive.items() if own() is not None}
                self.most = FEW + 2 * len(self.alive)
            table = self.handle.hooks_dict_ref()
            if table is not None and self.handle.id in table:
                table[self.handle.id] = self.newest.hook()
            return number, notes

    def since(self, first: int, last: int) -> list[Notes]:
        """The notes of the graphs there are, from one number up to another."""
        with self.lock:
            found = [own() for key, own in self.alive.items() if first <= key < last]
        return [notes for notes in found if notes is not None]


class Tickets(threading.local):
    """A full backward hook that is another one for every call.

    PyTorch reads the table of backward hooks before it runs the forward pre-hooks of a call. The
    pre-hook puts a new one there for the next call, and the forward hook tells the one that was
    read which hooks there are. Another thread may have come between: then it is one of those that
    stood there since the last call in this thread, and all of them are told.
    """

    def __init__(self, counter: _Counter) -> None:
        self.counter = counter
        self.first = 0
        self.open: list[tuple[nn.Module, list[Notes]]] = []

    def take(self, module: nn.Module) -> None:
        """A call of `module` begins."""
        number, notes = self.counter.next()
        others = [] if number == self.first else self.counter.since(self.first, number)
        self.open.append((module, [*others, notes]))
        self.first = number + 1

    def give(self, module: nn.Module) -> list[Notes]:
        """Where the call of `module` that ends may write; calls that raised are passed over."""
        while self.open:
            called, notes = self.open.pop()
            if called is module:
                return notes
        return []

    def remove(self) -> None:
        """Take the hook off; those that calls have read stay with their graphs."""
        self.counter.handle.remove()


def tickets(register: Callable[[Hook], RemovableHandle]) -> Tickets:
    """Register a hook that is another one for every call."""
    return Tickets(_Counter(register))
