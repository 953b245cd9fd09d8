"""What torch.compile does to hooks that come too late."""

from collections.abc import Callable
from weakref import ref

from torch import nn

from gradsurg.sites._modules import COMPILED, own_name
from gradsurg.torch_internals import compiling

HINT = (
    " (torch.compile had compiled {what} before the block, and compiled code does not see hooks "
    "that come later: attach before its first call, or call torch.compiler.reset() in the block)"
)


def blind(model: nn.Module, whole: bool) -> Callable[[bool], str]:
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
