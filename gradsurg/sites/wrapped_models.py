"""How DistributedDataParallel and torch.compile affect hooks."""

from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from gradsurg.core.pitfalls import refusal
from gradsurg.sites.places import Selector
from gradsurg.sites.selection import COMPILED, WRAPPERS, uncompiled_name
from gradsurg.torch_internals import autograd, compiling

HINT = (
    " (torch.compile had compiled {what} before, and compiled code does not see hooks that come "
    "later: attach before its first call, or call torch.compiler.reset() in the block)"
)


def of_first_process(value: object) -> object:
    """Return the value that process 0 has; every process calls it."""
    if isinstance(value, Tensor):
        shared = value.clone()
        distributed.broadcast(shared, 0)
        return shared
    values = [value]
    distributed.broadcast_object_list(values, 0)
    return values[0]


def when_averaged(model: nn.Module, stack: ExitStack, act: Callable[[int], None]) -> None:
    """Call `act` with the number of processes over which gradients of the model are averaged."""
    when_wrapped(model, stack, lambda ddp: act(distributed.get_world_size(ddp.process_group)))


def refuse_static_graph(at: Selector, model: nn.Module, stack: ExitStack) -> None:
    """Raise RuntimeError if the model is in a DistributedDataParallel with static_graph=True.

    With an aggregator the weights of its ranks drift apart.
    """

    def check(wrapper: DistributedDataParallel) -> None:
        if wrapper.static_graph:
            raise refusal(at, "static_graph")

    when_wrapped(model, stack, check)


def when_wrapped(
    model: nn.Module, stack: ExitStack, act: Callable[[DistributedDataParallel], None]
) -> None:
    """Call `act` with each DistributedDataParallel in or around the model.

    One inside the model is found at once, one around it when the model is called.
    """
    wrappers = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    around = WRAPPERS[model]() if model in WRAPPERS else None
    if wrappers or around is not None:
        for wrapper in wrappers if around is None else [around]:
            act(wrapper)
    elif distributed.is_available() and distributed.is_initialized():

        @compiling.untraced
        def hook(module: nn.Module, args: tuple[object, ...]) -> None:
            wrapper = autograd.active_ddp()
            if wrapper is not None:
                act(wrapper)

        stack.callback(model.register_forward_pre_hook(hook).remove)


def late_hooks_reason(model: nn.Module, is_compiled: bool, has_acted: bool) -> str:
    """Why hooks may not have run in a process that had compiled code; empty if nothing explains it.

    `is_compiled` means that the compiled model itself was attached, `has_acted` that any hook ran.
    """
    modules = dict(model.named_modules())
    inside = [uncompiled_name(name) for name in modules if name.endswith(COMPILED)]
    if inside:
        return HINT.format(what=", ".join(f"'{name}'" for name in inside))
    if has_acted and not is_compiled:
        return ""
    return HINT.format(what="code of this process, it may be the model,")
