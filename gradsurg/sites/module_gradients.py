"""ModuleGradients: PyTorch's full backward hooks of a module."""

import re
import warnings
from contextlib import ExitStack
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as process

from gradsurg.plugins.fields import validated
from gradsurg.sites.contexts import refusal
from gradsurg.sites.module_calls import Calls, hookable_modules, tensors_in
from gradsurg.sites.places import NO_GRADIENT, Attached, GradFn, Selector, Stage, apply_hooks
from gradsurg.sites.selection import ModuleSelector, SiteIds, names_of
from gradsurg.torch_internals import autograd, compiling
from gradsurg.torch_internals.module_hooks import BackwardHook, Kind, register_full_backward

Grads = tuple[Tensor | None, ...]


@validated
class ModuleGradients(ModuleSelector):
    """The full backward hooks of the modules whose name fits `pattern`.

    `kind="full_backward_pre"`: the gradients of the outputs of a module, at sites `name#call`.
    `kind="full_backward"`: those of its positional inputs, at sites `name#call.input`; as for
    `Inputs` with `path="branch"`, a change does not reach the parameters of the module itself. The
    path of the tensor follows if there are several: `lstm#0.0`.

    Prefer `Outputs` and `Inputs`. PyTorch wraps the inputs and outputs of a hooked module in views
    at every call, selected or not. So an operation after the module must not write to its output in
    place (PyTorch raises); an unused input gets a gradient of zeros instead of none;
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
        suffix = ".input" if self.kind == "full_backward" else ""
        calls = Calls(names_of(attached.model))
        site_ids = self.site_ids(attached, suffix)
        for module in hookable_modules(self, calls, attached, suffix):
            hook_backward(module, self, self.kind, calls, site_ids, attached)
        suppress_warning(attached.stack)
        calls.hook(attached.model, attached.stack)


def hook_backward(
    target: nn.Module | None,
    selector: Selector,
    kind: str,
    calls: Calls,
    site_ids: SiteIds,
    attached: Attached,
) -> None:
    """Hook the backward passes of a module, or of all modules of the process for None.

    PyTorch reads the table of backward hooks before a call, and a hook needs the call's index: so
    one without effect is registered, and replaced for each call.
    """
    stack = attached.stack
    replaced: BackwardHook = compiling.ModuleHook(lambda module, grads, *_: None)
    fast: dict[str, BackwardHook] = {}  # the backward hooks of calls with one tensor

    @compiling.untraced
    def before(module: nn.Module, args: tuple[object, ...]) -> None:
        if autograd.in_functorch() and (names := calls.names.get(module)) is not None:
            raise refusal(selector, "torch.func", names[0])

    # Any: a user's values
    @compiling.untraced
    def after(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        call = calls.counter.next(module)
        base = None if call is None else site_ids(module, call)
        if base is None:
            return
        if not torch.is_grad_enabled():
            calls.without_graph(module)
        single = args[0] if len(args) == 1 and not kwargs else None
        if not _needs_gradient(single if kind == "full_backward" else output):
            hook = _backward_hook(_site_hooks(selector, kind, base, args, kwargs, output, attached))
        elif (hook := fast.get(base)) is None:
            hook = fast[base] = _backward_hook([attached.hook_at(base)])
        autograd.replace_backward_hook(module, replaced, hook)

    if not register_full_backward(target, kind, replaced, stack):
        name = "the process" if target is None else calls.names[target][0]
        raise refusal(selector, "legacy hooks", name)
    if target is None:
        stack.callback(process.register_module_forward_pre_hook(before).remove)
        handle = process.register_module_forward_hook(after, with_kwargs=True)
        stack.callback(autograd.remove_global_forward_hook, handle)
    else:
        stack.callback(target.register_forward_pre_hook(before).remove)
        stack.callback(target.register_forward_hook(after, with_kwargs=True).remove)


def suppress_warning(stack: ExitStack) -> None:
    """Suppress PyTorch's warning about a module whose inputs need no gradient.

    It would be emitted in each backward pass, also if only gradients of outputs are asked for. The
    ledger reports sites at which no gradient passes for that reason.
    """
    # A number in a regex comment makes the filter differ from those of other attachments.
    taken = {entry[1].pattern for entry in warnings.filters if isinstance(entry[1], re.Pattern)}
    texts = (f"Full backward hook is firing(?#{number})" for number in count())
    warnings.filterwarnings("ignore", next(text for text in texts if text not in taken))
    added, filters = warnings.filters[0], warnings.filters
    assert isinstance(filters, list)
    # Others may have replaced all filters.
    stack.callback(lambda: filters.remove(added) if added in filters else None)


def _backward_hook(hooks: list[GradFn]) -> BackwardHook:
    """Return a full backward hook that applies one hook to each gradient."""

    def hook(module: nn.Module, grads: Grads, *_: object) -> Grads | None:
        if len(hooks) > 1:
            return apply_hooks(hooks, grads)
        result = hooks[0](grads[0])
        return None if result is None else (result,)

    return hook


def _site_hooks(
    selector: Selector,
    kind: str,
    base: str,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
    output: object,
    attached: Attached,
) -> list[GradFn]:
    """Return the hooks of the gradients that the backward hook gets, in order.

    Tensors that it does not see are entered into the ledger. If it sees none that needs a gradient,
    and others do, RuntimeError is raised for a module of the model that was chosen.
    """
    on_inputs = kind == "full_backward"
    if on_inputs:
        values, keywords = args, kwargs
        bare = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
    else:
        bare, keywords = not isinstance(output, tuple), {}
        values = output if isinstance(output, tuple) else (output,)
    direct = {"" if bare else f".{index}": value for index, value in enumerate(values)}
    given = direct | {f".{key}": value for key, value in keywords.items()}
    tensors = dict(pair for path, value in given.items() for pair in tensors_in(value, path))
    needing = [path for path, tensor in tensors.items() if _needs_gradient(tensor)]
    if not needing:
        attached.expect(base, skipped=NO_GRADIENT)
        return [_pass] * len(direct)
    if not direct.keys() & needing and isinstance(selector, ModuleSelector):
        where = "an argument" if on_inputs else f"a {type(output).__name__}"
        raise refusal(selector, "nested tensors", base, where=where)
    for path in tensors:
        if path:
            attached.forget(base)
        if path not in needing:
            attached.expect(f"{base}{path}", skipped=NO_GRADIENT)
        elif path not in direct:
            attached.expect(f"{base}{path}", skipped="a full backward hook does not see it")
    return [attached.hook_at(base + path) if path in needing else _pass for path in direct]


def _needs_gradient(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.requires_grad
        and torch.is_grad_enabled()
    )


def _pass(grad: Tensor | None) -> None:
    return None
