"""What torch.compile does to hooks that come too late."""

from collections.abc import Callable
from contextlib import ExitStack
from weakref import ref

from torch import nn

from gradsurg import engine
from gradsurg.sites._modules import COMPILED, own_name

HINT = (
    " (torch.compile had compiled {what} before the block, and compiled code does not see hooks "
    "that come later: attach before its first call, or call torch.compiler.reset() in the block)"
)


def blind(model: nn.Module, stack: ExitStack) -> Callable[[], str]:
    """Why hooks that come now may never run, told when the block ends; empty if nothing says so."""
    if not engine.has_compiled():
        return lambda: ""
    held = ref(model)
    called: list[bool] = []

    @engine.untraced
    def hook(module: nn.Module, args: tuple[object, ...]) -> None:
        if module is held() and not called:
            called.append(True)

    stack.callback(model.register_forward_pre_hook(hook).remove)

    def why() -> str:
        inside = [own_name(name) for name in dict(model.named_modules()) if name.endswith(COMPILED)]
        if inside:
            return HINT.format(what=", ".join(f"'{name}'" for name in inside))
        return "" if called else HINT.format(what="code of this process, it may be the model,")

    return why
