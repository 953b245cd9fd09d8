"""How DistributedDataParallel and torch.compile affect hooks."""

from collections.abc import Callable
from contextlib import ExitStack

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from gradsurg.sites.selection import COMPILED, uncompiled_name
from gradsurg.torch_internals import autograd, compiling

HINT = (
    " (torch.compile had compiled {what} before the block, and compiled code does not see hooks "
    "that come later: attach before its first call, or call torch.compiler.reset() in the block)"
)


def when_averaged(model: nn.Module, stack: ExitStack, act: Callable[[int], None]) -> None:
    """Call `act` with the number of processes if gradients of the model are averaged over them.

    A DistributedDataParallel inside the model is found at once, one around it when the model is
    called.
    """

    def act_on_size(wrapper: DistributedDataParallel) -> None:
        act(distributed.get_world_size(wrapper.process_group))

    _when_wrapped(model, stack, act_on_size)


def refuse_static_graph(label: str, model: nn.Module, stack: ExitStack) -> None:
    """Raise RuntimeError if the model is in a DistributedDataParallel with static_graph=True.

    With an aggregator the weights of its ranks drift apart.
    """

    def refuse(wrapper: DistributedDataParallel) -> None:
        if wrapper.static_graph:
            raise RuntimeError(
                f"{label}: an aggregator runs backward passes for single tasks, which "
                "DistributedDataParallel(static_graph=True) does not average correctly. Use "
                "static_graph=False."
            )

    _when_wrapped(model, stack, refuse)


def _when_wrapped(
    model: nn.Module, stack: ExitStack, act: Callable[[DistributedDataParallel], None]
) -> None:
    """Call `act` with the DistributedDataParallel in or around the model, as `when_averaged`."""
    wrappers = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    if wrappers:
        act(wrappers[0])
    elif distributed.is_available() and distributed.is_initialized():

        @compiling.untraced
        def hook(module: nn.Module, args: tuple[object, ...]) -> None:
            wrapper = autograd.active_ddp()
            if wrapper is not None:
                act(wrapper)

        stack.callback(model.register_forward_pre_hook(hook).remove)


def refuse_averaged(site: str, model: nn.Module, stack: ExitStack) -> None:
    """Raise RuntimeError if DistributedDataParallel overwrites `.grad` at the end of a backward."""

    def refuse(processes: int) -> None:
        raise RuntimeError(
            f"{site}: the model is in DistributedDataParallel, which writes the averaged gradients "
            "into .grad when a backward ends, over what was made of them before. Use "
            "Parameters(stage='step'), or stage='reduced'."
        )

    when_averaged(model, stack, refuse)


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
