"""The table of contexts: what each kind of site does under compile, checkpoints, DDP and others."""

import builtins
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parallel import DistributedDataParallel

from gradsurg.sites.places import Selector, Stage
from gradsurg.torch_internals import autograd, compiling


class Staged(Protocol):
    """A selector, or one of its leaves."""

    @property
    def stage(self) -> Stage | None: ...


@dataclass(frozen=True)
class Row:
    """The outcome of one kind of site in one context, if it does not simply act.

    It is acts, warned, reported, refused or n/a. A `kind` of "*" is every kind. `stage` is the
    stage or another mode of the kind, as the side of `Nodes`; empty for all. `why` completes
    "<kind>: <why>", `instead` is the way out; `refusal` fills their names in braces with values.
    """

    kind: str
    context: str
    outcome: str
    why: str
    instead: str = ""
    stage: str = ""
    error: type[Exception] = RuntimeError

    @property
    def sentences(self) -> str:
        """The reason and the way out."""
        return f"{self.why}. {self.instead}." if self.instead else f"{self.why}."


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

GROUPS = {
    "$PARAMETERS": "Parameters Buckets Weights Updates",
    "$RUNNING": "Parameters.accumulated Parameters.backward_end Buckets",
    "$MODULES": "Outputs Inputs Activations EveryModule ModuleGradients",
    "$FULL_HOOKS": "ModuleGradients EveryModule.full_backward_pre EveryModule.full_backward",
    "$SHARDS": "Parameters.backward Parameters.backward_end Weights Updates MatchedUpdates",
    "$GRADIENTS": "Outputs Inputs Nodes Uses Captured",
}


def _kinds_in(text: str) -> list[tuple[str, str]]:
    """Return the kinds in a text such as "Outputs Nodes.enter $RUNNING", each with its mode."""
    names = " ".join(GROUPS.get(name, name) for name in text.split()).split()
    return [(kind, mode) for kind, _, mode in (name.partition(".") for name in names)]


KINDS = _kinds_in(
    "Parameters.backward Parameters.accumulated Parameters.backward_end Parameters.step"
    " Buckets.sent Buckets.reduced Outputs Inputs.branch Inputs.total Nodes.enter Nodes.leave"
    " ModuleGradients.full_backward_pre ModuleGradients.full_backward"
    " EveryModule.full_backward_pre EveryModule.forward Activations Weights Updates SavedTensors"
    " Uses Captured"
)
"""The rows of that table: kinds of site, each with the stage or other mode that it is used in."""

# contexts | outcome | kinds or kind.mode | error if no RuntimeError, and below: reason. Way out.
TABLE = """
no_grad | reported | $PARAMETERS $GRADIENTS $FULL_HOOKS SavedTensors
  no gradient is computed, so nothing passes. Run a backward pass in the block.
in-place consumer | refused | $FULL_HOOKS
  PyTorch allows no in-place change of a tensor with a full backward hook. Use Outputs or Inputs, or
  inplace=False.
in-place consumer | refused | Inputs.branch
  the module wrote to its input in place, and the gradient of this branch cannot be told from that
  of the tensor itself. Use path='total', or Outputs of the module before.
checkpoint, reentrant | reported | Uses
  the forward pass makes no graph, and the uses are made in the backward pass. Use
  checkpoint(use_reentrant=False).
checkpoint, reentrant | n/a | Captured
  the parameters are hidden from torch.autograd.grad. Use checkpoint(use_reentrant=False).
accumulation | warned | $RUNNING
  each pass acts on the running sum, with what it made of it in earlier passes. Use stage='step' for
  the sum of all passes, or stage='backward' for each alone.
torch.compile inside the block; torch.compile before it | refused | Nodes | LookupError
  what is compiled runs as one node. Use Outputs there.
torch.compile inside the block | acts | Outputs Inputs Activations ModuleGradients
  each hooked module breaks the compiled graph, and a module list or nn.Sequential that holds one
  runs uncompiled: its hooks count calls in Python.
torch.compile before it | refused | Uses | LookupError
  the uses inside compiled code are not found. Attach before its first call, or call
  torch.compiler.reset().
torch.compile before it | reported | $MODULES SavedTensors
  compiled code does not see hooks that come later. Attach before its first call, or call
  torch.compiler.reset() in the block.
torch.func | reported | $PARAMETERS Captured
  the gradients are of the tensors given to functional_call, not of the parameters. Use Outputs or
  Inputs.
torch.func | refused | $FULL_HOOKS
  torch.func has no full backward hooks. Use Outputs or Inputs.
torch.func | refused | SavedTensors
  PyTorch has no saved-tensor hooks inside torch.func. Use Activations.
double backward | refused | SavedTensors
  it is read back under create_graph, and PyTorch cannot differentiate what is done. Use
  Activations, or no create_graph.
autograd.grad | reported | $RUNNING Parameters.step
  torch.autograd.grad does not write to .grad. Use stage='backward', or Captured.
deepcopy | reported | $PARAMETERS $GRADIENTS ModuleGradients Activations SavedTensors
  a copy of the model has no hooks. Attach to the copy.
load_state_dict(assign=True) | reported | $PARAMETERS Captured
  the new parameters are not hooked. Attach after the change, or remove the intervention and add it
  again.
threads | reported | Captured
  the calls of torch.autograd.grad are seen in the thread of attach alone. Attach in the thread that
  calls it.
FSDP2 | refused | $SHARDS Buckets Captured | TypeError
  sharded parameters are DTensors: autograd computes with other tensors, and their hooks do not run.
  Use Parameters with stage='step' or stage='accumulated' for the averaged gradient, or Outputs,
  Inputs or Nodes.

FSDP2, meshes | refused | Parameters | TypeError
  sharded over a mesh of {ndim} dimensions, needs one dimension.
FSDP2, resumed | refused | Parameters | ValueError
  the surgery has the state of {made} processes, each with its part of the parameters; found {found}
  processes.
FSDP2, accumulated | refused | Parameters | ValueError
  the parameters are sharded, and {reason}. Use stage='step'.
FSDP2, aggregators | refused | SharedParameters | TypeError
  the parameters are sharded, and {reason}. Use another aggregator, or DistributedDataParallel.
attached in a backward pass | refused | Buckets
  cannot be attached inside a backward pass, as DistributedDataParallel would average some gradients
  wrongly. Attach before it.
foreign communication hook | refused | Buckets
  the model has the communication hook {hook} already, and can have only one. Use
  Buckets(reduce=...) in its place.
different averages | refused | Buckets | ValueError
  all of a model need the same reduce and power_rank, found {found} and {own}.
static_graph | refused | SharedParameters
  an aggregator runs backward passes for single tasks, which
  DistributedDataParallel(static_graph=True) does not average correctly. Use static_graph=False.
shared weight, reentrant checkpoint | warned | Parameters.backward Parameters.accumulated
  each checkpoint runs a backward pass of its own, and it acts once for each use. Use
  stage='backward_end' or stage='step', or checkpoint(use_reentrant=False).
shared weight, reentrant checkpoint | warned | Inputs.total
  each checkpoint has its own copy of a tensor that several take, and it acts on each. Use Outputs
  of the module that made the tensor, or checkpoint(use_reentrant=False).
shared weight, reentrant checkpoint | warned | Uses
  the uses in several checkpoints are one site, as each checkpoint is a graph of its own. Use
  checkpoint(use_reentrant=False).
checkpoint | refused | Activations EveryModule
  it is recomputed by a checkpoint, which must give the same values again: {why}.
nested modules | refused | SavedTensors
  another intervention selects {outer} around it and not the module itself, and a saved tensor
  belongs to the innermost module alone. Let both select the same modules.
other saved-tensor hooks | refused | SavedTensors
  there are hooks already, as those of a checkpoint, and a node takes one pair alone. Choose the
  module without node=.
legacy hooks | refused | ModuleGradients EveryModule | ValueError
  it had hooks of the deprecated register_backward_hook kind, which PyTorch does not have beside
  full ones. Use Outputs or Inputs.
nested tensors | refused | ModuleGradients EveryModule
  a full backward hook gets tensors and tuples of them, and those that need a gradient are inside
  {where}. Use Outputs or Inputs.
in-place write | refused | Outputs
  the module {fault}: the gradient of its output cannot be told from that of its input. Use Outputs
  of the module before.
in-place write | refused | Inputs
  the module {fault}: a hook would see none or a part of the gradient. Use Outputs of the module
  before, or path='total', which allows writes to a tensor that is no view.
TorchScript | refused | $MODULES SavedTensors Nodes Uses Captured | ValueError
  it is a ScriptModule, which runs no Python hooks. Act at Parameters or Weights, at a module that
  is not scripted, or call torch.jit.script after the block.
torch.export | refused | Nodes | LookupError
  an exported model is one graph of operations, which calls none of its modules. Leave out module=,
  or attach to the model before torch.export.
torch.export | refused | Uses Captured | LookupError
  an exported model is one graph of operations, which calls none of its modules. Select parameters,
  or attach to the model before torch.export.
torch.export | refused | SavedTensors | LookupError
  an exported model is one graph of operations, which calls none of its modules. Select 'root' or
  'block', or attach to the model before torch.export.
LBFGS | refused | Parameters | ValueError
  LBFGS also steps without gradients, so that no step of it can be skipped. Choose another
  optimizer.
LBFGS | refused | Updates MatchedUpdates | ValueError
  cannot act on LBFGS, which computes curvature from its own updates. Choose another optimizer.
several optimizers | refused | Updates MatchedUpdates Weights | ValueError
  the transform needs a whole group at once, and two optimizers share it. Select the parameters of
  each in an intervention of its own.
sparse gradient | refused | Parameters Buckets Captured | ValueError
  {transform} does not act on the values of a sparse gradient alone. Use an elementwise transform
  that keeps zero, or sparse=False.
loss scale | refused | $RUNNING Parameters.backward $GRADIENTS $FULL_HOOKS | ValueError
  {transform} depends on the size of the gradient, which is times the loss scale here. Use
  Parameters(stage='step').
stateful transform | refused | SavedTensors | ValueError
  it is many tensors, and {what} remembers one thing for each site. Choose modules or nodes.
is_grads_batched | refused | Captured
  it gets many gradients at once by is_grads_batched=True, and a transform takes one. Call
  torch.autograd.grad for each of them.
vmap | refused | *
  {transform} keeps one state for a site, which has many gradients at once there. Differentiate for
  each of them.
"""


def _rows(table: str) -> Iterator[Row]:
    """Yield the rows of the table's text, one for each kind and context."""
    for block in re.split(r"\n+(?! )", table.strip()):
        header, *lines = block.splitlines()
        contexts, outcome, names, *error = header.split(" | ")
        why, _, instead = " ".join(map(str.strip, lines)).rstrip(".").partition(". ")
        raised = vars(builtins)[error[0]] if error else RuntimeError
        for context, (kind, mode) in product(contexts.split("; "), _kinds_in(names)):
            yield Row(kind, context, outcome, why, instead, mode, raised)


ROWS: tuple[Row, ...] = tuple(_rows(TABLE))


def rows_of(kind: Staged, stage: str = "") -> list[Row]:
    """Return the rows of a kind, as its fields say it, at a stage (its own, if empty)."""
    names = {"*", *(base.__name__ for base in type(kind).__mro__)}
    modes = _modes(kind, stage)
    return [one for one in ROWS if one.kind in names and one.stage in ("", *modes)]


def _modes(kind: Staged, stage: str = "") -> list[str]:
    """Return the values of the fields of a selector on which an outcome may depend."""
    given, *others = (getattr(kind, mode, None) for mode in ("stage", "path", "side", "kind"))
    return [*filter(None, [stage or given or next(iter(getattr(kind, "stages", ())), ""), *others])]


def row(kind: Staged, context: str, stage: str = "") -> Row:
    """Return the row of a selector, at a stage, in a context. Raises KeyError if it has none.

    A user's kind that has none gets that of another kind.
    """
    is_users = not type(kind).__module__.startswith("gradsurg.")
    for one in [*rows_of(kind, stage), *(ROWS if is_users else ())]:
        if one.context == context:
            return one
    raise KeyError(f"{type(kind).__name__} in {context}")


def refusal(
    kind: Staged, context: str, site: str = "", stage: str = "", **found: object
) -> Exception:
    """Return the error of a kind that is refused in a context, with the site and the way out.

    `found` fills the names in braces of the row's sentences.
    """
    one, where = row(kind, context, stage), f"site '{site}': " if site else ""
    text = one.sentences.format(**found) if found else one.sentences
    return one.error(f"{type(kind).__name__}: {where}{text}")


def outcomes(at: Selector) -> str:
    """Return a text of what a selector does in each context, with reasons and ways out.

    The contexts are those of the table in the README of the sites: `print(outcomes(gs.Outputs()))`.
    """
    parts = []
    for kind in at.leaves:
        rows = rows_of(kind)
        others = {one.context for one in rows if one.outcome != "acts"}
        acts = "; ".join(name for name in CONTEXTS if name not in others)
        parts.append(f"{type(kind).__name__} ({', '.join(_modes(kind))}) acts in: {acts}")
        parts += [f"  {one.outcome} in {one.context}: {one.sentences}" for one in rows]
    return re.sub(r"'?\{(\w+)\}'?", r"*\1*", "\n".join(parts))


def visible_contexts(model: nn.Module) -> list[str]:
    """Return the contexts that can be seen when a surgery is attached or planned.

    `model` is the one that the user calls, with its wrappers: those around it are not seen. That a
    compiled model was called before is taken from the process, which may have called another.
    """
    modules = [*model.modules()]
    when = "before it" if compiling.has_compiled() else "inside the block"
    tests = {
        "DDP": any(isinstance(module, DistributedDataParallel) for module in modules),
        "static_graph": any(vars(module).get("static_graph") for module in modules),
        "FSDP2": any(map(autograd.is_sharded, model.parameters())),
        f"torch.compile {when}": any(map(compiling.is_compiled, modules)),
        "TorchScript": any(isinstance(module, ScriptModule) for module in modules),
    }
    checkpoints = {_checkpoint(module) for module in modules} - {""}
    return [*(context for context, is_here in tests.items() if is_here), *sorted(checkpoints)]


def _checkpoint(module: nn.Module) -> str:
    """Return the context of a module that checkpoints its call by a setting of its own.

    That of PyTorch's `checkpoint_wrapper`, or of `gradient_checkpointing_enable` of transformers.
    """
    is_enabled = vars(module).get("gradient_checkpointing")
    name = "_gradient_checkpointing_func" if is_enabled else "checkpoint_fn"
    function = vars(module).get(name)
    how = "" if getattr(function, "keywords", {}).get("use_reentrant") else "non-"
    return f"checkpoint, {how}reentrant" if function else ""


def visible_rows(at: Selector, model: nn.Module, stage: str = "") -> list[Row]:
    """Return the rows that hold for a selector in the contexts that can be seen now."""
    contexts = visible_contexts(model)
    return [one for kind in at.leaves for one in rows_of(kind, stage) if one.context in contexts]


def refuse_at_once(model: nn.Module, selected: Iterable[tuple[Selector, str]]) -> None:
    """Raise a refusal that holds at all sites: by a static graph, or if all is sharded.

    `selected` are the selectors with their stages.
    """
    is_static = any(vars(module).get("static_graph") for module in model.modules())
    sharded = [autograd.is_sharded(param) for param in model.parameters()]
    are_sharded = bool(sharded) and all(sharded)
    certain = [*["static_graph"] * is_static, *["FSDP2"] * are_sharded]
    for at, stage in selected if certain else ():
        for kind in at.leaves:
            for one in rows_of(kind, stage):
                if one.outcome == "refused" and one.context in certain:
                    raise refusal(kind, one.context, stage=stage)
