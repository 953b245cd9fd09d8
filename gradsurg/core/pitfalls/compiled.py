"""torch.compile, torch.export and torch.jit.script replace the graph and the calls of modules."""

from torch import nn

from gradsurg.core.pitfalls.base import MODULES, Cell, Pitfall
from gradsurg.torch_internals import compiling

_LATE = "compiled code does not see hooks that come later"
_BEFORE = "attach before its first call, or call torch.compiler.reset() in the block"
_AS_ONE_NODE = "what is compiled runs as one node. Use Outputs there."


class OtherCode(Pitfall):
    """Compiled, exported and scripted code replaces the calls of modules and the nodes of a graph.

    Compiled code is one node. It ignores hooks registered after the compilation
    (`skip_nnmodule_hook_guards`). A module that had one breaks the compiled graph, and a module
    list or `nn.Sequential` that holds one runs uncompiled. An exported model calls none of its
    modules. A scripted one calls them without hooks.

    >>> model, x = nn.Sequential(nn.Linear(1, 1)), torch.ones(1, 1)
    >>> other = [torch.compile(model, backend="aot_eager"), torch.jit.script(model)]
    >>> other += [torch.export.export(model, (x,)).module()]
    >>> other[0](x).grad_fn.name()
    'CompiledFunctionBackward'
    >>> handle = model[0].register_forward_hook(lambda *_: print("called"))
    >>> results = [call(x) for call in other]  # the hook is not called

    https://docs.pytorch.org/docs/stable/torch.compiler_nn_module.html
    https://docs.pytorch.org/docs/stable/export.html, https://docs.pytorch.org/docs/stable/jit.html
    """

    cells = (
        Cell("torch.compile inside the block", "Nodes", LookupError).refused(_AS_ONE_NODE),
        Cell("torch.compile before it", "Nodes", LookupError).refused(_AS_ONE_NODE),
        Cell("torch.compile before it", "Uses", LookupError).refused(
            "the uses inside compiled code are not found. "
            "Attach before its first call, or call torch.compiler.reset()."
        ),
        Cell("torch.compile before it", f"{MODULES} SavedTensors").reported(f"{_LATE}; {_BEFORE}"),
        Cell("torch.export", "Nodes Uses Captured SavedTensors", LookupError).refused(
            "an exported model calls none of its modules. Select nodes without module=, "
            "parameters, 'root' or 'block', or attach before torch.export."
        ),
        Cell("TorchScript", f"{MODULES} SavedTensors Nodes Uses Captured", ValueError).refused(
            "it is a ScriptModule, which runs no Python hooks. Act at Parameters or Weights, or "
            "call torch.jit.script after the block."
        ),
    )

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
        compiled = inside or "code of this process, it may be the model,"
        return f" (torch.compile had compiled {compiled} before, and {_LATE}: {_BEFORE})"
