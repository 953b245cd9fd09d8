"""torch.compile replaces the graph and the calls that hooks are made for."""

from torch import nn

from gradsurg.core.pitfalls.base import MODULES, Pitfall
from gradsurg.torch_internals import compiling


class OneNode(Pitfall):
    """Compiled code is one node of the graph, and its operations have no nodes of their own.

    A module that had a hook before the first call breaks the compiled graph, and a module list or
    `nn.Sequential` that holds one runs uncompiled.

    >>> x = torch.ones(2, requires_grad=True)
    >>> torch.compile(lambda x: x.exp().sin(), backend="aot_eager")(x).grad_fn.name()
    'CompiledFunctionBackward'

    https://docs.pytorch.org/docs/stable/torch.compiler_nn_module.html describes hooks of modules.
    """

    context, kinds, error = "torch.compile inside the block", "Nodes", LookupError
    why = "what is compiled runs as one node"
    instead = "Use Outputs there"


class OneNodeBefore(OneNode):
    """The same for code that was compiled before."""

    context = "torch.compile before it"


class HiddenUses(OneNodeBefore):
    """The uses of a tensor are nodes, too."""

    kinds = "Uses"
    why = "the uses inside compiled code are not found"
    instead = "Attach before its first call, or call torch.compiler.reset()"


class LateHooks(Pitfall):
    """Compiled code does not look for hooks that a module had not when it was compiled.

    >>> model, x = nn.Sequential(nn.Linear(1, 1)), torch.ones(1, 1)
    >>> compiled = torch.compile(model, backend="eager"); y = compiled(x)
    >>> handle = model[0].register_forward_hook(lambda *_: print("called"))
    >>> y = compiled(x)  # the hook is not called

    https://docs.pytorch.org/docs/stable/torch.compiler_nn_module.html names the setting behind it,
    `skip_nnmodule_hook_guards`.
    """

    context, outcome = "torch.compile before it", "reported"
    kinds = f"{MODULES} SavedTensors"
    why = "compiled code does not see hooks that come later"
    instead = "attach before its first call, or call torch.compiler.reset() in the block"

    @classmethod
    def reason(cls, model: nn.Module, is_compiled: bool, has_acted: bool) -> str:
        """Why hooks of a model may not have run in a process that had compiled code.

        `is_compiled` says that the compiled form of the model was attached, `has_acted` that any
        hook ran. Empty if nothing explains it.
        """
        named = model.named_modules()
        wrappers = [name for name, module in named if compiling.is_wrapper(module)]
        if not wrappers and has_acted and not is_compiled:
            return ""
        inside = ", ".join(f"'{name.replace('._orig_mod', '')}'" for name in wrappers)
        what = inside or "code of this process, it may be the model,"
        return f" (torch.compile had compiled {what} before, and {cls.why}: {cls.instead})"
