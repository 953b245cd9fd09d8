"""ModuleGradients: PyTorch's full backward hooks of a module."""

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import NO_GRADIENT, Attached, GradFn, Stage, apply_hooks
from gradsurg.sites.call_tracker import Calls, tensors_in
from gradsurg.sites.selection import ModuleSelector, SiteIds, names_of
from gradsurg.torch_internals import autograd, compiling

Kind = Literal["full_backward_pre", "full_backward"]
Grads = tuple[Tensor | None, ...]
BackwardHook = Callable[..., Any]  # Any: PyTorch's own types do not allow missing gradients

IN_PLACE = (
    "gradsurg: a module with full backward hooks hands out views that must not be written to, and "
    "what comes behind it does so. Use Outputs, which hands out the tensor itself."
)


@validated
class ModuleGradients(ModuleSelector):
    """The full backward hooks of the modules whose name fits `pattern`.

    `kind="full_backward_pre"`: the gradients of the outputs of a module, at sites `name#call`.
    `kind="full_backward"`: those of its positional inputs, at sites `name#call.input`; as for
    `Inputs` with `path="branch"`, a change does not reach the parameters of the module itself. The
    path of the tensor follows if there are several: `lstm#0.0`.

    Prefer `Outputs` and `Inputs`. PyTorch wraps the inputs and outputs of a hooked module in views
    at every call, selected or not. So an operation after the module must not write to its output in
    place (the error says so); an unused input gets a gradient of zeros instead of none;
    `torch.autograd.grad(y, weight)` bypasses `full_backward`; `torch.compile` breaks the graph
    there and refuses `fullgraph=True`; inside `torch.func` such a module raises. The hooks ignore
    tensors passed by keyword or inside lists and dicts: the ledger lists these, and a call without
    others raises. If no input needs a gradient the ledger says so once; PyTorch's own warning about
    it, in each backward pass, is suppressed while the block is open. The deprecated
    `register_backward_hook` is not offered, and a module that has such a hook is refused.
    """

    kind: Kind = "full_backward_pre"

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("ModuleGradients", self.stage, self.kind)

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        suffix = ".input" if self.kind == "full_backward" else ""
        calls = Calls(names_of(model))
        site_ids = self.site_ids(attached, suffix)
        for module in self.expect_modules(calls.names, attached, suffix):
            owner = f"module '{calls.names[module][0]}'"
            refuse_legacy_hooks(module._is_full_backward_hook, owner, "ModuleGradients")
            replaced = replaced_hook()
            stack.callback(self._registration(module, stack)(replaced).remove)
            pre_hook = forward_pre_hook(calls, "ModuleGradients")
            stack.callback(module.register_forward_pre_hook(pre_hook).remove)
            post_hook = forward_hook(
                calls, replaced, site_ids, attached, self.kind, "ModuleGradients"
            )
            stack.callback(module.register_forward_hook(post_hook, with_kwargs=True).remove)
        explain_in_place_error(model, stack)
        suppress_warning(stack)
        calls.hook(model, stack)

    def _registration(
        self, module: nn.Module, stack: ExitStack
    ) -> Callable[[BackwardHook], RemovableHandle]:
        if self.kind == "full_backward_pre":
            return module.register_full_backward_pre_hook
        before = module._is_full_backward_hook

        def restore() -> None:
            # PyTorch does not reset the flag, and would refuse legacy hooks from then on.
            if not module._backward_hooks:
                module._is_full_backward_hook = before

        stack.callback(restore)
        return module.register_full_backward_hook


def replaced_hook() -> BackwardHook:
    """Return a backward hook that does nothing; each call of its module replaces it.

    PyTorch reads the table of backward hooks before a call, and hooks need the call's index.
    """
    return compiling.ModuleHook(lambda module, grads, *_: None)


def forward_pre_hook(calls: Calls, site_kind: str) -> Callable[..., None]:
    """Return the forward pre-hook that refuses calls inside torch.func."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...]) -> None:
        if autograd.in_functorch() and (names := calls.names.get(module)) is not None:
            raise RuntimeError(
                f"{site_kind}: module '{names[0]}' is called inside torch.func, which has no full "
                "backward hooks. Use Outputs or Inputs."
            )

    return hook


def forward_hook(
    calls: Calls,
    replaced: BackwardHook,
    site_ids: SiteIds,
    attached: Attached,
    kind: Kind,
    refused_by: str,
) -> Callable[..., None]:
    """Return the forward hook that replaces the backward hook `replaced` of a call.

    A call whose tensors the backward hook does not see raises RuntimeError in the name of
    `refused_by`; if that is empty, only the ledger reports it.
    """
    instead = "Outputs" if kind == "full_backward_pre" else "Inputs"
    fast: dict[str, BackwardHook] = {}  # the backward hooks of calls with one tensor
    on_inputs = kind == "full_backward"

    # Any: a user's values
    @compiling.untraced
    def hook(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        call = calls.counter.next(module)
        base = None if call is None else site_ids(module, call)
        if base is None:
            return
        if not torch.is_grad_enabled():
            calls.without_graph(module)
        value = output if not on_inputs else args[0] if len(args) == 1 and not kwargs else None
        if isinstance(value, Tensor) and value.is_floating_point() and _needs_gradient(value):
            if base not in fast:
                fast[base] = _backward_hook([attached.hook_at(base)])
            autograd.replace_backward_hook(module, replaced, fast[base])
            return
        ended = _EndedCall(args, kwargs, output)
        where = ended.unseen(kind)
        if where and refused_by:
            raise RuntimeError(
                f"{refused_by}: site '{base}': PyTorch calls a {kind} hook for tensors and tuples "
                f"of them, and those that need a gradient are inside {where}. Use {instead}."
            )
        site_hooks = _site_hooks(kind, ended, base, attached)
        autograd.replace_backward_hook(module, replaced, _backward_hook(site_hooks))

    return hook


def _backward_hook(hooks: Sequence[GradFn]) -> BackwardHook:
    """Return a full backward hook that applies one hook to each gradient."""

    def hook(module: nn.Module, grads: Grads, *_: object) -> Grads | None:
        if len(hooks) > 1:
            return apply_hooks(hooks, grads)
        result = hooks[0](grads[0])
        return None if result is None else (result,)

    return hook


def refuse_legacy_hooks(flag: bool | None, owner: str, site_kind: str) -> None:
    """Raise ValueError if PyTorch's flag says that there were legacy backward hooks."""
    if flag is False:
        raise ValueError(
            f"{site_kind}: {owner} had hooks of the deprecated register_backward_hook kind, which "
            "PyTorch does not have beside full ones. Use Outputs or Inputs."
        )


def explain_in_place_error(model: nn.Module, stack: ExitStack) -> None:
    """Add a note to PyTorch's error about an in-place write to the output of a hooked module."""

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


def suppress_warning(stack: ExitStack) -> None:
    """Suppress PyTorch's warning about a module whose inputs need no gradient.

    It would be emitted in each backward pass, also if only gradients of outputs are asked for. The
    ledger reports sites at which no gradient passes for that reason.
    """
    # A regex comment makes the filter differ from those of other attachments.
    warnings.filterwarnings("ignore", f"Full backward hook is firing(?#{next(_numbers)})")
    added = warnings.filters[0]

    def remove() -> None:
        filters: Any = warnings.filters  # Any: a list, typed as a sequence
        if added in filters:  # others may have replaced all filters
            filters.remove(added)

    stack.callback(remove)


_numbers = count()


@dataclass(slots=True, frozen=True)
class _EndedCall:
    """The inputs and the output of a module call."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    output: object

    def direct(self, kind: Kind) -> list[tuple[str, object]]:
        """Return the values whose gradients are arguments of the hook, with their paths."""
        match kind:
            case "full_backward_pre":
                several, values = isinstance(self.output, tuple), self.output
            case "full_backward":
                bare = len(self.args) == 1 and not self.kwargs and isinstance(self.args[0], Tensor)
                several, values = not bare, self.args
        listed = values if isinstance(values, tuple) else (values,)
        return [(f".{index}" if several else "", value) for index, value in enumerate(listed)]

    def tensors(self, kind: Kind) -> list[tuple[str, Tensor]]:
        """Return all floating tensors with their paths, also those that the hook does not see."""
        keywords = list(self.kwargs.items()) if kind == "full_backward" else []
        values = self.direct(kind) + [(f".{key}", value) for key, value in keywords]
        return [pair for path, value in values for pair in tensors_in(value, path)]

    def unseen(self, kind: Kind) -> str:
        """Return where the tensors that need a gradient are, if the hook sees none of them."""
        seen = {id(value) for _, value in self.direct(kind)}
        needing = [tensor for _, tensor in self.tensors(kind) if _needs_gradient(tensor)]
        if not needing or any(id(tensor) in seen for tensor in needing):
            return ""
        if kind == "full_backward":
            return "a list, a dict or a dataclass, or given by keyword"
        return f"a {type(self.output).__name__}"


def _site_hooks(kind: Kind, call: _EndedCall, base: str, attached: Attached) -> list[GradFn]:
    """Return the hooks of the gradients that the backward hook gets, in order.

    Tensors that it does not see are entered into the ledger.
    """
    direct = call.direct(kind)
    if not any(_needs_gradient(tensor) for _, tensor in call.tensors(kind)):
        attached.expect(base, skipped=NO_GRADIENT)
        return [_pass] * len(direct)
    for path, tensor in call.tensors(kind):
        if path:
            attached.forget(base)
        if not _needs_gradient(tensor):
            attached.expect(f"{base}{path}", skipped=NO_GRADIENT)
        elif all(tensor is not other for _, other in direct):
            attached.expect(f"{base}{path}", skipped="a full backward hook does not see it")
    hooks = []
    for path, value in direct:
        seen = isinstance(value, Tensor) and value.is_floating_point() and _needs_gradient(value)
        hooks.append(attached.hook_at(f"{base}{path}") if seen else _pass)
    return hooks


def _needs_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _pass(grad: Tensor | None) -> None:
    return None
