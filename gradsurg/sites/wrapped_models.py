"""Models inside DistributedDataParallel or compiled by torch.compile."""

from collections.abc import Callable
from contextlib import ExitStack
from weakref import ref

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from gradsurg.sites.selection import COMPILED, own_name
from gradsurg.torch_internals import autograd, compiling


def when_averaged(model: nn.Module, stack: ExitStack, say: Callable[[int], None]) -> None:
    """Call `say` with the number of processes if the gradients of the model are averaged.

    At once if that can be seen; for a model that is itself inside, when it is called there.
    """
    outer = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    if outer:
        say(distributed.get_world_size(outer[0].process_group))
    elif autograd.is_distributed():
        hook = _when_called(say)
        stack.callback(model.register_forward_pre_hook(hook).remove)


def refuse_averaged(at: str, model: nn.Module, stack: ExitStack) -> None:
    """Refuse to act on a `.grad` that is written anew when the backward ends."""

    def refuse(processes: int) -> None:
        raise RuntimeError(
            f"{at}: the model is in DistributedDataParallel, which writes the averaged gradients "
            "into .grad when a backward ends, over what was made of them before. Use "
            "Parameters(stage='step')."
        )

    when_averaged(model, stack, refuse)


def _when_called(say: Callable[[int], None]) -> Callable[..., None]:
    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...]) -> None:
        outer = autograd.averaging()
        if outer is not None:
            say(distributed.get_world_size(outer.process_group))

    return hook


HINT = (
    " (torch.compile had compiled {what} before the block, and compiled code does not see hooks "
    "that come later: attach before its first call, or call torch.compiler.reset() in the block)"
)


def late_hooks_warning(model: nn.Module, whole: bool) -> Callable[[bool], str]:
    """Why hooks that come now may never run, told when the block ends and it is known whether any
    of them has `acted`; empty if nothing says so. `whole`: the model was given compiled.
    """
    if not compiling.has_compiled():
        return lambda acted: ""
    held = ref(model)

    def why(acted: bool) -> str:
        own = held()
        names = () if own is None else dict(own.named_modules())
        inside = [own_name(name) for name in names if name.endswith(COMPILED)]
        if inside:
            return HINT.format(what=", ".join(f"'{name}'" for name in inside))
        if acted and not whole:
            return ""
        return HINT.format(what="code of this process, it may be the model,")

    return why
