"""ModuleGradients: PyTorch's full backward hooks of a module."""

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import count
from operator import is_
from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as process

from gradsurg.plugins.fields import validated
from gradsurg.sites.calls import (
    Args,
    Call,
    Keywords,
    Shared,
    hook_calls,
    modules_of,
    name_in,
    refuse_scripted,
    remove_hook,
)
from gradsurg.sites.places import NO_GRADIENT, Door, Hook, Kind, Named, Place, Stage
from gradsurg.sites.selectors import ModuleSelector
from gradsurg.sites.tensors import bare, tensors_in
from gradsurg.torch_internals import autograd, compiling, module_hooks
from gradsurg.torch_internals.module_hooks import BackwardHook, register_full_backward

UNSEEN = "a full backward hook does not see it"
Grads = tuple[Tensor | None, ...]


class BackwardPasses:
    """The backward passes of modules, each hooked at the end of a call.

    PyTorch reads the table of backward hooks before a call, and a hook needs the call's index. So a
    hook without effect is registered, and replaced for each call. `name_of` returns the name of a
    module, empty for a module without hooks.
    """

    def __init__(
        self, kind: Kind, door: Door, shared: Shared, name_of: Callable[[nn.Module], str]
    ) -> None:
        self.kind, self.door, self.name_of = kind, door, name_of
        self.on_inputs = kind.mode == "full_backward"
        self.thread = shared.follow(door.stack)
        self.replaced: BackwardHook = compiling.ModuleHook(lambda module, grads, *_: None)
        self.single: dict[Call, BackwardHook] = {}  # of the calls with one tensor
        suppress_warning(door.stack)

    def hook(self, target: nn.Module | None) -> None:
        """Hook a module, or all modules of the process for None."""
        stack = self.door.stack
        if not register_full_backward(target, self.kind.mode, self.replaced, stack):
            name = "the process" if target is None else self.name_of(target)
            self.door.refuse("legacy hooks", self.kind, name)
        if target is None:
            before, after = compiling.untraced(self.before), compiling.untraced(self.after)
            handle = process.register_module_forward_pre_hook(before)
            stack.callback(remove_hook, handle)
            handle = process.register_module_forward_hook(after, with_kwargs=True)
            stack.callback(remove_hook, handle)

    def before(self, module: nn.Module, *_: object) -> None:
        if autograd.in_functorch() and (name := self.name_of(module)):
            self.door.refuse("torch.func", self.kind, name)

    def after(self, module: nn.Module, args: Args, kwargs: Keywords, output: object) -> None:
        name = self.name_of(module)
        call = self.thread.calls.next(module, name) if name else None
        if call is None:
            return
        if not _needs_gradient(bare(args, kwargs) if self.on_inputs else output):
            hook = _backward_hook(self._hooks_at(module, call, args, kwargs, output))
        elif (hook := self.single.get(call)) is None:
            met = self.door.meet(self._place(module, call, ""))
            hook = self.single[call] = _backward_hook([met])
        autograd.replace_backward_hook(module, self.replaced, hook)

    def _place(self, module: nn.Module, call: Call, path: str) -> Place:
        return Place(self.kind, call[:1], ref(module), call[1], path[1:])

    def _hooks_at(
        self, module: nn.Module, call: Call, args: Args, kwargs: Keywords, output: object
    ) -> list[Hook | None]:
        """Return the hooks of the gradients that the backward hook gets, in order.

        The reasons why there is none of other tensors are noted. If it gets none, and others need
        gradients, a module of the model that was chosen is refused.
        """
        values, keywords = args, kwargs
        if not self.on_inputs:
            values, keywords = output if isinstance(output, tuple) else (output,), {}
        is_bare = bare(args, kwargs) is not None if self.on_inputs else values is not output
        direct = {"" if is_bare else f".{index}": value for index, value in enumerate(values)}
        given = direct | {f".{key}": value for key, value in keywords.items()}
        tensors = dict(pair for path, value in given.items() for pair in tensors_in(value, path))
        needing = [path for path, tensor in tensors.items() if _needs_gradient(tensor)]
        door, base = self.door, self._place(module, call, "")
        if not needing:
            door.note_no_gradient(base, NO_GRADIENT)
            return []
        is_unseen = not direct.keys() & needing and self.kind.name == "ModuleGradients"
        if is_unseen and door.picking_at(base):
            inputs, kind = "a keyword argument or a container", type(output).__name__
            where = inputs if self.on_inputs else f"a {kind}"
            door.refuse("nested tensors", self.kind, base.site, where=where)
        for path in tensors:
            if path not in needing or path not in direct:
                why = NO_GRADIENT if path not in needing else UNSEEN
                door.note_no_gradient(self._place(module, call, path), why)
        places = (self._place(module, call, path) if path in needing else None for path in direct)
        return [None if place is None else door.meet(place) for place in places]


def suppress_warning(stack: ExitStack) -> None:
    """Suppress PyTorch's warning about a module whose inputs need no gradient.

    It would be emitted in each backward pass, also if only gradients of outputs are asked for. The
    ledger reports the sites at which no gradient passes for that reason.
    """
    # A number in a regex comment makes the filter differ from those of other attachments.
    taken = {entry[1].pattern for entry in warnings.filters if isinstance(entry[1], re.Pattern)}
    texts = (f"Full backward hook is firing(?#{number})" for number in count())
    warnings.filterwarnings("ignore", next(text for text in texts if text not in taken))
    added, filters = warnings.filters[0], warnings.filters
    assert isinstance(filters, list)
    # Others may have replaced all filters.
    stack.callback(lambda: filters.remove(added) if added in filters else None)


def _backward_hook(hooks: Sequence[Hook | None]) -> BackwardHook:
    """Return a full backward hook that applies one hook to each gradient."""
    calls = [(index, hook.call) for index, hook in enumerate(hooks) if hook is not None]

    def hook(module: nn.Module, grads: Grads, *_: object) -> Grads | None:
        changed = [*grads]
        for index, call in calls:
            if (result := call(grads[index])) is not None:
                changed[index] = result
        return None if all(map(is_, changed, grads)) else tuple(changed)

    return hook


def _needs_gradient(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.requires_grad
        and torch.is_grad_enabled()
    )


@cache
def _kind(mode: module_hooks.Kind) -> Kind:
    suffix = ".input" if mode == "full_backward" else ""
    return Kind("ModuleGradients", mode, modules_of, partial(_watch, mode), suffix)


def _watch(mode: module_hooks.Kind, door: Door, found: Sequence[Named], shared: Shared) -> None:
    """Hook the backward passes of the modules."""
    kind = _kind(mode)
    refuse_scripted(door, kind, found)
    passes = BackwardPasses(kind, door, shared, name_in(found))
    for named in found:
        passes.hook(named.owners[0])
    hook_calls(door, found, passes.before, passes.after)


@validated
class ModuleGradients(ModuleSelector):
    """Register PyTorch's full backward hooks on the modules whose name fits `pattern`.

    `kind="full_backward_pre"` hooks the gradients of the outputs of a module, at sites `name#call`.
    `kind="full_backward"` hooks the gradients of its positional inputs, at sites `name#call.input`,
    where a change does not reach the parameters of the module itself (see `Inputs` with
    `path="branch"`). The path of the tensor follows if there are several: `lstm#0.0`. `types`,
    `depth`, `index` and `call` are those of `Outputs`.

    Prefer `Outputs` and `Inputs`, since these hooks have limits:

    - PyTorch wraps the inputs and outputs of a hooked module in views at every call, selected or
      not. So an operation after the module must not write to its output in place (PyTorch raises),
      and an unused input gets a gradient of zeros instead of none.
    - `torch.autograd.grad(y, weight)` bypasses `full_backward`. `torch.compile` breaks the graph
      there and refuses `fullgraph=True`. Inside `torch.func` such a module raises.
    - The hooks ignore tensors passed by keyword or inside lists and dicts: the ledger lists these,
      and a call with no other tensors raises an error.
    - If no input needs a gradient the ledger says so once; PyTorch's own warning about it, in each
      backward pass, is suppressed while the block is open.
    - The deprecated `register_backward_hook` is not offered, and a module that has such a hook is
      refused.
    """

    kind: module_hooks.Kind = "full_backward_pre"

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    def kind_at(self, stage: Stage | None) -> Kind:
        return _kind(self.kind)
