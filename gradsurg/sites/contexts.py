"""The table of contexts: what each kind of site does under compile, checkpoints, DDP and others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

from torch import nn
from torch.amp import GradScaler
from torch.jit import ScriptModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from gradsurg.torch_internals import autograd, compiling

Outcome = Literal["acts", "warned", "reported", "refused", "n/a"]

MODES = ("stage", "path", "side", "kind")
"""The fields of selectors on which an outcome may depend; `Row.stage` is the value of one."""


class Kind(Protocol):
    """The part of a selector that this module needs."""

    stages: ClassVar[Any]  # Any: an attribute is invariant, and kinds have a tuple of literals

    @property
    def kinds(self) -> Sequence["Kind"]: ...


@dataclass(frozen=True)
class Row:
    """The outcome of one kind of site in one context, if it does not simply act.

    A `kind` of "*" is every kind. `stage` is the stage or another mode of the kind, as the side of
    `Nodes`; empty for all. `why` completes "<kind>: <why>", `instead` is the way out, a sentence
    without its period. Both may have names in braces, which `refusal` fills. `error` is the class
    that is raised.
    """

    kind: str
    context: str
    outcome: Outcome
    why: str
    instead: str = ""
    stage: str = ""
    error: type[Exception] = RuntimeError


CONTEXTS: Mapping[str, str] = {
    "eager": "Plain training.",
    "no_grad": "The model is called under `torch.no_grad()`, and no backward pass follows.",
    "in-place consumer": "The next module writes into the tensor, as `ReLU(inplace=True)` does.",
    "checkpoint, non-reentrant": "The layers are in a `checkpoint(..., use_reentrant=False)`.",
    "checkpoint, reentrant": "The layers are in a `checkpoint(..., use_reentrant=True)`.",
    "autocast + GradScaler": "Mixed precision with a loss scale; the scaler is given to `attach`.",
    "accumulation": "Two backward passes before one optimizer step.",
    "torch.compile inside the block": "The model is compiled after attaching.",
    "torch.compile before it": "The model was compiled, and called, before attaching.",
    "torch.func": "`torch.func.grad` of a `functional_call` of the model.",
    "double backward": "A gradient is taken with `create_graph=True` and is part of the loss.",
    "autograd.grad": "The gradients come from `torch.autograd.grad`, not from `backward`.",
    "deepcopy": "A copy of the model is made in the block, and trained.",
    "load_state_dict(assign=True)": "The parameters are replaced by others in the block.",
    "threads": "Forward and backward pass run in another thread than `attach`.",
    "DDP": "The model is in `DistributedDataParallel`, in two processes.",
    "FSDP2": "The parameters are sharded by `fully_shard` over two processes.",
    "torchrun": "As DDP, in processes that torchrun has started.",
}
"""The columns of the table in the README, with what they mean."""

KINDS: tuple[tuple[str, str], ...] = (
    ("Parameters", "backward"),
    ("Parameters", "accumulated"),
    ("Parameters", "backward_end"),
    ("Parameters", "step"),
    ("Buckets", "sent"),
    ("Buckets", "reduced"),
    ("Outputs", ""),
    ("Inputs", "branch"),
    ("Inputs", "total"),
    ("Nodes", "enter"),
    ("Nodes", "leave"),
    ("ModuleGradients", "full_backward_pre"),
    ("ModuleGradients", "full_backward"),
    ("EveryModule", "full_backward_pre"),
    ("EveryModule", "forward"),
    ("Activations", ""),
    ("Weights", ""),
    ("Updates", ""),
    ("SavedTensors", ""),
    ("Uses", ""),
    ("Captured", ""),
)
"""The rows of that table: kinds of site, each with the stage or other mode that it is used in."""

_OF_PARAMETERS = "Parameters Buckets Weights Updates"
_OF_MODULES = "Outputs Inputs Activations EveryModule ModuleGradients"
_FULL_HOOKS = "ModuleGradients EveryModule.full_backward_pre EveryModule.full_backward"
_ONE_NODE = "what is compiled runs as one node"
_OUTPUTS = "Use Outputs there"
_NON_REENTRANT = "Use checkpoint(use_reentrant=False)"
_EXPORTED = "an exported model is one graph of operations, which calls none of its modules"
_EARLIER = "or attach to the model before torch.export"


def _rows(
    outcome: Outcome,
    context: str,
    kinds: str,
    why: str,
    instead: str = "",
    error: type[Exception] = RuntimeError,
) -> tuple[Row, ...]:
    """Return a row for each of several kinds, given as `Kind` or `Kind.stage`."""
    pairs = (kind.partition(".") for kind in kinds.split())
    return tuple(Row(kind, context, outcome, why, instead, mode, error) for kind, _, mode in pairs)


_refused, _reported, _warned = (partial(_rows, name) for name in ("refused", "reported", "warned"))

ROWS: tuple[Row, ...] = (
    *_reported(
        "no_grad",
        f"{_OF_PARAMETERS} Outputs Inputs Nodes ModuleGradients EveryModule.full_backward_pre"
        " EveryModule.full_backward SavedTensors Uses Captured",
        "no gradient is computed, so nothing passes",
        "Run a backward pass in the block",
    ),
    *_refused(
        "in-place consumer",
        _FULL_HOOKS,
        "PyTorch allows no in-place change of a tensor with a full backward hook",
        "Use Outputs or Inputs, or inplace=False",
    ),
    *_refused(
        "in-place consumer",
        "Inputs.branch",
        "the module wrote to its input in place, and the gradient of this branch cannot be told "
        "from that of the tensor itself",
        "Use path='total', or Outputs of the module before",
    ),
    *_reported(
        "checkpoint, reentrant",
        "Uses",
        "the forward pass makes no graph, and the uses are made in the backward pass",
        _NON_REENTRANT,
    ),
    *_rows(
        "n/a",
        "checkpoint, reentrant",
        "Captured",
        "the parameters are hidden from torch.autograd.grad",
        _NON_REENTRANT,
    ),
    *_warned(
        "accumulation",
        "Parameters.accumulated Parameters.backward_end Buckets",
        "each pass acts on the running sum, with what it made of it in earlier passes",
        "Use stage='step' for the sum of all passes, or stage='backward' for each alone",
    ),
    *(
        Row("Nodes", f"torch.compile {when}", "refused", _ONE_NODE, _OUTPUTS, error=LookupError)
        for when in ("inside the block", "before it")
    ),
    *_rows(
        "acts",
        "torch.compile inside the block",
        "Outputs Inputs Activations ModuleGradients",
        "each hooked module breaks the compiled graph, and a module list or nn.Sequential that "
        "holds one runs uncompiled: its hooks count calls in Python",
    ),
    *_refused(
        "torch.compile before it",
        "Uses",
        "the uses inside compiled code are not found",
        "Attach before its first call, or call torch.compiler.reset()",
        LookupError,
    ),
    *_reported(
        "torch.compile before it",
        f"{_OF_MODULES} SavedTensors",
        "compiled code does not see hooks that come later",
        "Attach before its first call, or call torch.compiler.reset() in the block",
    ),
    *_reported(
        "torch.func",
        f"{_OF_PARAMETERS} Captured",
        "the gradients are of the tensors given to functional_call, not of the parameters",
        "Use Outputs or Inputs",
    ),
    *_refused(
        "torch.func",
        _FULL_HOOKS,
        "torch.func has no full backward hooks",
        "Use Outputs or Inputs",
    ),
    *_refused(
        "torch.func",
        "SavedTensors",
        "PyTorch has no saved-tensor hooks inside torch.func",
        "Use Activations",
    ),
    *_refused(
        "double backward",
        "SavedTensors",
        "it is read back under create_graph, and PyTorch cannot differentiate what is done",
        "Use Activations, or no create_graph",
    ),
    *_reported(
        "autograd.grad",
        "Parameters.accumulated Parameters.backward_end Parameters.step Buckets",
        "torch.autograd.grad does not write to .grad",
        "Use stage='backward', or Captured",
    ),
    *_reported(
        "deepcopy",
        f"{_OF_PARAMETERS} Outputs Inputs Nodes ModuleGradients Activations SavedTensors Uses"
        " Captured",
        "a copy of the model has no hooks",
        "Attach to the copy",
    ),
    *_reported(
        "load_state_dict(assign=True)",
        f"{_OF_PARAMETERS} Captured",
        "the new parameters are not hooked",
        "Attach after the change, or remove the intervention and add it again",
    ),
    *_reported(
        "threads",
        "Captured",
        "the calls of torch.autograd.grad are seen in the thread of attach alone",
        "Attach in the thread that calls it",
    ),
    *_refused(
        "FSDP2",
        "Parameters.backward Parameters.backward_end Buckets Weights Updates Captured",
        "it is a DTensor: autograd computes with another tensor, and its hooks do not run",
        "Use Parameters with stage='step' or stage='accumulated' for the averaged gradient, or "
        "Outputs, Inputs or Nodes",
        TypeError,
    ),
    *_refused(
        "FSDP2",
        "SharedParameters",
        "the passes of an aggregator for single tasks reach no sharded parameters",
        "Use DistributedDataParallel",
        TypeError,
    ),
    # Contexts that are no column of the README's table.
    *_refused(
        "FSDP2, meshes",
        "Parameters",
        "sharded over a mesh of {ndim} dimensions, needs one dimension",
        error=TypeError,
    ),
    *_refused(
        "FSDP2, resumed",
        "Parameters",
        "the surgery has the state of {made} processes, each with its part of the parameters; "
        "found {found} processes",
        error=ValueError,
    ),
    *_refused(
        "FSDP2, accumulated",
        "Parameters",
        "the parameters are sharded, and {reason}",
        "Use stage='step'",
        ValueError,
    ),
    *_refused(
        "attached in a backward pass",
        "Buckets",
        "cannot be attached inside a backward pass, as DistributedDataParallel would average some "
        "gradients wrongly",
        "Attach before it",
    ),
    *_refused(
        "foreign communication hook",
        "Buckets",
        "the model has the communication hook {hook} already, and can have only one",
        "Use Buckets(reduce=...) in its place",
    ),
    *_refused(
        "different averages",
        "Buckets",
        "all of a model need the same reduce and power_rank, found {found} and {own}",
        error=ValueError,
    ),
    *_refused(
        "static_graph",
        "SharedParameters",
        "an aggregator runs backward passes for single tasks, which "
        "DistributedDataParallel(static_graph=True) does not average correctly",
        "Use static_graph=False",
    ),
    *_warned(
        "shared weight, reentrant checkpoint",
        "Parameters.backward Parameters.accumulated",
        "each checkpoint runs a backward pass of its own, and it acts once for each use",
        "Use stage='backward_end' or stage='step', or checkpoint(use_reentrant=False)",
    ),
    *_warned(
        "shared weight, reentrant checkpoint",
        "Inputs.total",
        "each checkpoint has its own copy of a tensor that several take, and it acts on each",
        "Use Outputs of the module that made the tensor, or checkpoint(use_reentrant=False)",
    ),
    *_warned(
        "shared weight, reentrant checkpoint",
        "Uses",
        "the uses in several checkpoints are one site, as each checkpoint is a graph of its own",
        _NON_REENTRANT,
    ),
    *_refused(
        "checkpoint",
        "Activations EveryModule",
        "it is recomputed by a checkpoint, which must give the same values again: {why}",
    ),
    *_refused(
        "other saved-tensor hooks",
        "SavedTensors",
        "there are hooks already, as those of a checkpoint, and a node takes one pair alone",
        "Choose the module without node=",
    ),
    *_refused(
        "legacy hooks",
        "ModuleGradients EveryModule",
        "it had hooks of the deprecated register_backward_hook kind, which PyTorch does not have "
        "beside full ones",
        "Use Outputs or Inputs",
        ValueError,
    ),
    *_refused(
        "nested tensors",
        "ModuleGradients EveryModule",
        "a full backward hook gets tensors and tuples of them, and those that need a gradient are "
        "inside {where}",
        "Use Outputs or Inputs",
    ),
    *_refused(
        "in-place write",
        "Outputs",
        "the module {fault}: the gradient of its output cannot be told from that of its input",
        "Use Outputs of the module before",
    ),
    *_refused(
        "in-place write",
        "Inputs",
        "the module {fault}: a hook would see none or a part of the gradient",
        "Use Outputs of the module before, or path='total', which allows writes to a tensor that "
        "is no view",
    ),
    *_refused(
        "TorchScript",
        f"{_OF_MODULES} SavedTensors Nodes Uses Captured",
        "it is a ScriptModule, which runs no Python hooks",
        "Act at Parameters or Weights, at a module that is not scripted, or call torch.jit.script "
        "after the block",
        ValueError,
    ),
    *(
        Row(kind, "torch.export", "refused", _EXPORTED, f"{instead}, {_EARLIER}", error=LookupError)
        for kind, instead in (
            ("Nodes", "Leave out module="),
            ("Uses", "Select parameters"),
            ("SavedTensors", "Select 'root' or 'block'"),
            ("Captured", "Select parameters"),
        )
    ),
    *_refused(
        "LBFGS",
        "Parameters",
        "LBFGS also steps without gradients, so that no step of it can be skipped",
        "Choose another optimizer",
        ValueError,
    ),
    *_refused(
        "LBFGS",
        "Updates MatchedUpdates",
        "cannot act on LBFGS, which computes curvature from its own updates",
        "Choose another optimizer",
        ValueError,
    ),
    *_refused(
        "several optimizers",
        "Updates MatchedUpdates Weights",
        "the transform needs a whole group at once, and two optimizers share it",
        "Select the parameters of each in an intervention of its own",
        ValueError,
    ),
    *_refused(
        "sparse gradient",
        "Parameters Buckets Captured",
        "{transform} does not act on the values of a sparse gradient alone",
        "Use an elementwise transform that keeps zero, or sparse=False",
        ValueError,
    ),
    *_refused(
        "loss scale",
        "Parameters.backward Parameters.accumulated Parameters.backward_end Buckets Captured"
        " Outputs Inputs Nodes ModuleGradients Uses EveryModule.full_backward_pre"
        " EveryModule.full_backward",
        "{transform} depends on the size of the gradient, which is times the loss scale here",
        "Use Parameters(stage='step')",
        ValueError,
    ),
    *_refused(
        "stateful transform",
        "SavedTensors",
        "it is many tensors, and {what} remembers one thing for each site",
        "Choose modules or nodes",
        ValueError,
    ),
    *_refused(
        "is_grads_batched",
        "Captured",
        "it gets many gradients at once by is_grads_batched=True, and a transform takes one",
        "Call torch.autograd.grad for each of them",
    ),
    *_refused(
        "vmap",
        "*",
        "{transform} keeps one state for a site, which has many gradients at once there",
        "Differentiate for each of them",
    ),
)


def find(kind: str, context: str, modes: Iterable[str] = ()) -> Row | None:
    """Return the row of a kind, used in some modes, in a context; None if it acts there."""
    for one in ROWS:
        if one.context == context and one.kind in ("*", kind) and one.stage in ("", *modes):
            return one
    return None


def row(selector: Kind, context: str, stage: str = "") -> Row:
    """Return the row of a selector, at a stage, in a context. Raises KeyError if it has none."""
    kind = type(selector).__name__
    found = find(kind, context, _modes(selector, stage))
    if found is None:
        raise KeyError(f"{kind} in {context}")
    return found


def refusal(
    selector: Kind, context: str, site: str = "", stage: str = "", **found: object
) -> Exception:
    """Return the error of a kind that is refused in a context, with the site and the way out.

    `found` fills the names in braces of the row's sentences.
    """
    one = row(selector, context, stage)
    where = f"site '{site}': " if site else ""
    return one.error(f"{type(selector).__name__}: {where}{sentences(one, **found)}")


def sentences(one: Row, **found: object) -> str:
    """Return the reason and the way out of a row."""
    way_out = f". {one.instead}." if one.instead else "."
    return (one.why + way_out).format(**found) if found else one.why + way_out


def _modes(selector: Kind, stage: str = "") -> list[str]:
    """Return the values of the fields of a selector on which an outcome may depend."""
    values = [getattr(selector, mode, None) for mode in MODES]
    return [stage or values[0] or selector.stages[0], *(value for value in values[1:] if value)]


def outcomes(at: Kind) -> str:
    """Return a text of what a selector does in each context, with reasons and ways out.

    The contexts are those of the table in the README of the sites: `print(outcomes(gs.Outputs()))`.
    """
    parts = []
    for one in at.kinds:
        kind, modes = type(one).__name__, _modes(one)
        found = {context: find(kind, context, modes) for context in CONTEXTS}
        acts = [context for context, of in found.items() if of is None or of.outcome == "acts"]
        parts.append(f"{kind} ({', '.join(modes)}) acts in: {'; '.join(acts)}")
        others = [of for of in ROWS if of.context not in CONTEXTS and of.kind in ("*", kind)]
        others = [of for of in others if of.stage in ("", *modes)]
        for of in (*filter(None, found.values()), *others):
            parts.append(f"  {of.outcome} in {of.context}: {sentences(of)}")
    return "\n".join(parts)


def visible_contexts(
    model: nn.Module, optimizers: Sequence[Optimizer] = (), scaler: GradScaler | None = None
) -> list[str]:
    """Return the contexts that can be seen when a surgery is attached or planned.

    `model` is the one that the user calls, with its wrappers: those around it are not seen. That a
    compiled model was called before is taken from the process, which may have called another.
    """
    modules = list(model.modules())
    wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
    late = "torch.compile before it" if compiling.has_compiled() else ""
    tests = {
        "DDP": bool(wrappers),
        "static_graph": any(wrapper.static_graph for wrapper in wrappers),
        "FSDP2": any(map(autograd.is_sharded, model.parameters())),
        late or "torch.compile inside the block": any(map(compiling.is_compiled, modules)),
        "TorchScript": any(isinstance(module, ScriptModule) for module in modules),
        "autocast + GradScaler": scaler is not None and scaler.is_enabled(),
        "LBFGS": any(isinstance(optimizer, LBFGS) for optimizer in optimizers),
    }
    kinds = {_checkpoint(module) for module in modules}
    return [*(context for context, is_here in tests.items() if is_here), *sorted(kinds - {""})]


def _checkpoint(module: nn.Module) -> str:
    """Return the context of a module that checkpoints its call by a setting of its own.

    That of PyTorch's `checkpoint_wrapper`, or of `gradient_checkpointing_enable` of transformers.
    """
    fields = vars(module)
    function = fields.get("checkpoint_fn")
    if fields.get("gradient_checkpointing"):
        function = fields.get("_gradient_checkpointing_func")
    keywords = getattr(function, "keywords", {})
    if function is None:
        return ""
    return f"checkpoint, {'' if keywords.get('use_reentrant') else 'non-'}reentrant"


def visible_rows(
    at: Kind,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    scaler: GradScaler | None = None,
    stage: str = "",
) -> list[Row]:
    """Return the rows that hold for a selector in the contexts that can be seen now."""
    contexts = visible_contexts(model, optimizers, scaler)
    pairs = ((one, context) for one in at.kinds for context in contexts)
    rows = (find(type(one).__name__, context, _modes(one, stage)) for one, context in pairs)
    return [*filter(None, rows)]
