"""Inputs: the gradient with respect to what a module takes."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites._modules import Chosen, ModuleSelector, names_of
from gradsurg.sites._taken import Given, OpenCall, Taken
from gradsurg.sites.base import GradFn, HookRegistry, Stage
from gradsurg.sites.outputs import alias_of, is_new
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Need, Scope

TAIL = ".input"


@validated
class Inputs(ModuleSelector):
    """The floating tensors that the modules whose name fits `pattern` take, by place or by keyword.

    `path="branch"`: the gradient that comes out of this module alone. The module gets an alias of
    its input, and that is hooked, so that in `h + f(h)` what goes past `f` is left alone. A
    container and its first child are two sites, and one gradient passes both. An input that is
    written to in place is refused, for the hook would see nothing or a part of its gradient.
    `path="total"`: a hook on the tensor itself, the sum over all its uses; modules that take one
    tensor are one site.

    Site ids are `name#call.input`, with the path of the tensor behind it if the module is given
    anything but one tensor: `mix#0.input.1` by place, `mix#0.input.mask` by keyword, `.input.0.h`
    inside. A tensor that is given twice is one site with two names. Calls are counted and
    recomputed ones are hooked as those of `Outputs` are; inside a reentrant checkpoint a total is
    that of the uses in there. What is called without gradients is not hooked.

    An alias changes no value; but where a module reads its input several times and others read it
    too, gradients are summed branch by branch, which may move the last bit of the sum.
    """

    path: Literal["branch", "total"] = "branch"

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    @property
    def gives(self) -> frozenset[Need]:
        return frozenset({"value", "error"})

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("Inputs", self.stage, self.path)

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        gates: HookRegistry,
        stack: ExitStack,
    ) -> None:
        taken = Taken(names_of(model), {}, {}, {}, self.path, gates)
        stack.callback(taken.release)
        chosen = self.chosen(gates, TAIL)
        hooks = [
            (module, _entering(taken, chosen), _leaving(taken))
            for module in self.hookable(taken.names, gates, TAIL)
        ]
        ending, following = _ending(taken), taken.following(model)

        def put(own: ExitStack) -> None:
            for module, entering, leaving in hooks:
                _register(module, entering, own)
                own.callback(module.register_forward_hook(leaving, always_call=True).remove)
            own.callback(model.register_forward_hook(ending).remove)
            following(own)

        gates.put(put, stack)


def _register(module: nn.Module, hook: Callable[..., object], stack: ExitStack) -> None:
    """Register a forward pre-hook behind those of others and before those that make an alias.

    The alias that is made last is the first that a gradient comes to; and a total has to meet the
    tensor before an alias takes its place.
    """
    table = module._forward_pre_hooks
    later = [key for key, other in table.items() if getattr(other, "makes_alias", False)]
    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    for key in later:
        table[key] = table.pop(key)


def _entering(taken: Taken, chosen: Chosen) -> Callable[..., Given | None]:
    gates, short, path = taken.gates, taken.short, taken.path
    alone = _alone_on_its_branch if path == "branch" else _alone

    # Any: a user's values
    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> Given | None:
        call = taken.turns.next(module)
        base = None if call is None else chosen(module, call)
        if base is None:
            taken.open.append(OpenCall(module))
            return None
        gate = short.get(base)
        if gate is not None and len(args) == 1 and not kwargs and not gates.needs_value:
            given = alone(args[0], gate)
            if given is not None:
                kept = path == "branch" or given._is_view()
                tensors = [(ref(given), given._version, base)] if kept else []
                taken.open.append(OpenCall(module, tensors))
                return None if given is args[0] else ((given,), kwargs)
        taken.open.append(OpenCall(module))
        new = taken.enter(args, kwargs, base)
        if not torch.is_grad_enabled():
            taken.without_graph(module)
        return None if new[0] is args and new[1] is kwargs else new

    vars(hook)["makes_alias"] = path == "branch"
    return hook


def _alone_on_its_branch(tensor: object, gate: GradFn) -> Tensor | None:
    """What a module is given for a tensor, hooked by the shortest way; None if that will not do."""
    if type(tensor) is not Tensor or not (tensor.requires_grad and torch.is_grad_enabled()):
        return None
    alias = alias_of(tensor)
    autograd.hook_first(alias, gate)
    return alias


def _alone(tensor: object, gate: GradFn) -> Tensor | None:
    """As above, the tensor itself."""
    if not (is_new(tensor) and torch.is_grad_enabled()):
        return None
    autograd.hook_first(tensor, gate)
    return tensor


def _leaving(taken: Taken) -> Callable[..., None]:
    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        running = taken.open
        if running and running[-1].module is module:
            call = running.pop()
            if call.tensors or call.copies:
                taken.leave(call, output)
            return
        # A hook of others may have broken this call off before its pre-hook came here.
        own = [place for place, call in enumerate(running) if call.module is module]
        if own:
            call = running[own[-1]]
            del running[own[-1] :]
            taken.leave(call, output)

    return hook


def _ending(taken: Taken) -> Callable[..., None]:
    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        taken.end()

    return hook
