"""The forward hooks that go with full backward hooks, and what these do not see."""

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradsurg.sites._calls import Calls
from gradsurg.sites._modules import Chosen
from gradsurg.sites._nested import tensors_in
from gradsurg.sites._tickets import Tickets
from gradsurg.sites.base import NO_GRADIENT, GradFn, HookRegistry
from gradsurg.torch_internals import autograd, compiling

Side = Literal["full_backward_pre", "full_backward"]

IN_PLACE = (
    "gradsurg: a module with full backward hooks hands out views that must not be written to, and "
    "what comes behind it does so. Use Outputs, which hands out the tensor itself."
)


def entering(calls: Calls, one: Tickets, kind: str) -> Callable[..., None]:
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


def leaving(
    calls: Calls, one: Tickets, chosen: Chosen, gates: HookRegistry, side: Side, refuses: str
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
        told, call = one.give(module), calls.turns.next(module)
        base = None if call is None else chosen(module, call)
        if base is None:
            return
        if not torch.is_grad_enabled():
            calls.without_graph(module)
        value = output if not takes else args[0] if len(args) == 1 and not kwargs else None
        if isinstance(value, Tensor) and value.is_floating_point() and _needs_gradient(value):
            if base not in short:
                short[base] = [gates.gate(base)]
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
        passed = gates_of(side, ended, base, gates)
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


def gates_of(side: Side, call: "Ended", base: str, gates: HookRegistry) -> list[GradFn]:
    """The gates of the gradients that the hook gets, in order; what it does not see is told."""
    found = []
    direct = call.direct(side)
    if not any(_needs_gradient(tensor) for _, tensor in call.tensors(side)):
        gates.expect(base, skipped=NO_GRADIENT)
        return [_pass] * len(direct)
    for path, tensor in call.tensors(side):
        if path:
            gates.forget(base)
        if not _needs_gradient(tensor):
            gates.expect(f"{base}{path}", skipped=NO_GRADIENT)
        elif all(tensor is not other for _, other in direct):
            gates.expect(f"{base}{path}", skipped="a full backward hook does not see it")
    for path, value in direct:
        seen = isinstance(value, Tensor) and value.is_floating_point() and _needs_gradient(value)
        found.append(gates.gate(f"{base}{path}") if seen else _pass)
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
