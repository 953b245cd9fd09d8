"""torch.compile, torch.export and torch.jit.script replace the graph and the calls of modules."""

from typing import ClassVar

from torch import nn

from gradsurg.core.pitfalls.base import MODULES, Pitfall, refused, reported
from gradsurg.torch_internals import compiling

_LATE = "compiled code does not see hooks that come later"
_BEFORE = "attach before its first call, or call torch.compiler.reset() in the block"
_AS_ONE_NODE = "what is compiled runs as one node. Use Outputs there."


class OneNode(Pitfall):
    """Compiled code is one node of the graph, and its operations have no nodes of their own.

    A module that had a hook before the first call breaks the compiled graph, and a module list or
    `nn.Sequential` that holds one runs uncompiled.

    >>> x = torch.ones(2, requires_grad=True)
    >>> torch.compile(lambda x: x.exp().sin(), backend="aot_eager")(x).grad_fn.name()
    'CompiledFunctionBackward'

    https://docs.pytorch.org/docs/stable/torch.compiler_nn_module.html describes hooks of modules.
    """

    rows: ClassVar = {
        ("torch.compile inside the block", "Nodes"): refused(_AS_ONE_NODE, LookupError),
        ("torch.compile before it", "Nodes"): refused(_AS_ONE_NODE, LookupError),
        ("torch.compile before it", "Uses"): refused(
            "the uses inside compiled code are not found. "
            "Attach before its first call, or call torch.compiler.reset().",
            LookupError,
        ),
    }


class LateHooks(Pitfall):
    """Compiled code does not look for hooks that a module had not when it was compiled.

    >>> model, x = nn.Sequential(nn.Linear(1, 1)), torch.ones(1, 1)
    >>> compiled = torch.compile(model, backend="eager"); y = compiled(x)
    >>> handle = model[0].register_forward_hook(lambda *_: print("called"))
    >>> y = compiled(x)  # the hook is not called

    https://docs.pytorch.org/docs/stable/torch.compiler_nn_module.html names the setting behind it,
    `skip_nnmodule_hook_guards`.
    """

    rows: ClassVar = {
        ("torch.compile before it", f"{MODULES} SavedTensors"): reported(f"{_LATE}; {_BEFORE}"),
    }

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


class NoModuleCalls(Pitfall):
    """An exported model calls none of the modules; a scripted one calls them without their hooks.

    >>> model = nn.Sequential(nn.ReLU())
    >>> exported = torch.export.export(model, (torch.ones(1),)).module()
    >>> [node.target.__name__ for node in exported.graph.nodes if "relu" in node.name]
    ['relu.default']
    >>> scripted = torch.jit.script(model)
    >>> handle = scripted[0].register_forward_hook(lambda *_: print("called"))
    >>> y = scripted(torch.ones(1))  # the hook is not called

    https://docs.pytorch.org/docs/stable/export.html, https://docs.pytorch.org/docs/stable/jit.html
    """

    rows: ClassVar = {
        ("torch.export", "Nodes Uses Captured SavedTensors"): refused(
            "an exported model is one graph of operations, which calls none of its modules. Select "
            "nodes without module=, parameters, 'root' or 'block', or attach to the model before "
            "torch.export.",
            LookupError,
        ),
        ("TorchScript", f"{MODULES} SavedTensors Nodes Uses Captured"): refused(
            "it is a ScriptModule, which runs no Python hooks. Act at Parameters or Weights, at a "
            "module that is not scripted, or call torch.jit.script after the block.",
            ValueError,
        ),
    }
