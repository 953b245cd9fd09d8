"""torch.compile, torch.export and torch.jit.script replace the graph and the calls of modules."""

from torch import nn

from gradsurg.core.pitfalls.base import MODULES, Cell, Pitfall
from gradsurg.plugins.messages import shortened
from gradsurg.torch_internals import compiling

_BEFORE = "Attach before its first call, or call torch.compiler.reset() in the block"
_AS_ONE_NODE = "compiled code runs as one node. Use Outputs."


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

    https://docs.pytorch.org/docs/stable/torch.compiler_nn_module.html, pytorch#117758
    https://docs.pytorch.org/docs/stable/export.html, https://docs.pytorch.org/docs/stable/jit.html
    """

    cells = (
        Cell("torch.compile after attaching", "Nodes", LookupError).refused(_AS_ONE_NODE),
        Cell("torch.compile before attaching", "Nodes", LookupError).refused(_AS_ONE_NODE),
        Cell("torch.compile before attaching", "Uses", LookupError).refused(
            "the uses inside compiled code are not found. "
            "Attach before the first compiled call, or call torch.compiler.reset()."
        ),
        Cell("torch.compile before attaching", f"{MODULES} SavedTensors").reported(
            f"compiled code ignores hooks that are registered later. {_BEFORE}."
        ),
        Cell("torch.export", "Nodes Uses Captured SavedTensors", LookupError).refused(
            "exported models call no modules. Attach before torch.export, or use Parameters, "
            "Outputs('root'), SavedTensors('block') or Nodes without module=."
        ),
        Cell("TorchScript", f"{MODULES} SavedTensors Nodes Uses Captured", ValueError).refused(
            "a ScriptModule runs no Python hooks. Use Parameters or Weights, or call "
            "torch.jit.script after the block."
        ),
    )

    @classmethod
    def reason(cls, model: nn.Module, is_compiled: bool, has_acted: bool) -> str:
        """Why hooks of a model may not have run in a process that had compiled code, as sentences.

        `is_compiled`: the compiled form of the model was attached. `has_acted`: some hook ran.
        Empty if nothing explains it.
        """
        named = model.named_modules()
        wrappers = [name for name, module in named if compiling.is_wrapper(module)]
        if not wrappers and has_acted and not is_compiled:
            return ""
        if inside := shortened(f"'{name.replace('._orig_mod', '')}'" for name in wrappers):
            return f". Compiled before attaching: {inside}. {_BEFORE}"
        return f". Was the model compiled? {_BEFORE}"
