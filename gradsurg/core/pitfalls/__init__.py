"""Pitfalls: ways in which PyTorch's hooks mislead, and the table of contexts made from them."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol

from torch import distributed, nn
from torch.jit import ScriptModule
from torch.nn.parallel import DistributedDataParallel

from gradsurg.core.pitfalls.base import Cell, Pitfall
from gradsurg.torch_internals import autograd, compiling


class Selected(Protocol):
    """A selector of one kind of site or of several."""

    @property
    def leaves(self) -> Sequence[object]: ...


CONTEXTS: Mapping[str, str] = {
    "eager": "Plain training.",
    "no_grad": "The model is called under `torch.no_grad()`, and no backward pass follows.",
    "in-place consumer": "The next module writes into the tensor, such as `ReLU(inplace=True)`.",
    "checkpoint, non-reentrant": "The layers are in a `checkpoint(..., use_reentrant=False)`.",
    "checkpoint, reentrant": "The layers are in a `checkpoint(..., use_reentrant=True)`.",
    "autocast + GradScaler": "Mixed precision with a loss scale; the scaler is given to `attach`.",
    "accumulation": "Two backward passes before one optimizer step.",
    "torch.compile after attaching": "The model is compiled in the block.",
    "torch.compile before attaching": "The model was compiled, and called, before attaching.",
    "torch.func": "`torch.func.grad` of a `functional_call` of the model.",
    "double backward": "A gradient is taken with `create_graph=True` and is part of the loss.",
    "autograd.grad": "The gradients come from `torch.autograd.grad`, not from `backward`.",
    "deepcopy": "A copy of the model is made in the block, and trained.",
    "load_state_dict(assign=True)": "The parameters are replaced by others in the block.",
    "threads": "Forward and backward pass run in another thread than `attach`.",
    "DDP": "The model is in `DistributedDataParallel`, in two processes.",
    "FSDP2": "The parameters are sharded by `fully_shard` over two processes.",
    "torchrun": "Like DDP, in processes that torchrun has started.",
}
"""The columns of the table in the README of the sites, with their meanings."""

KINDS = (
    *("Parameters.backward", "Parameters.accumulated", "Parameters.backward_end"),
    *("Parameters.step", "Buckets.sent", "Buckets.reduced", "Outputs", "Inputs.branch"),
    *("Inputs.total", "Nodes.enter", "Nodes.leave", "ModuleGradients.full_backward_pre"),
    *("ModuleGradients.full_backward", "EveryModule.full_backward_pre", "EveryModule.forward"),
    *("Activations", "Weights", "Updates", "SavedTensors", "Uses", "Captured"),
)
"""The rows of that table: kinds of site, each with the stage or other mode that it is used in."""

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)

PITFALLS: tuple[type[Pitfall], ...] = tuple(Pitfall.__subclasses__())

CELLS = tuple(
    cell._replace(kinds=kind)
    for each in PITFALLS
    for cell in each.cells
    for kind in cell.kinds.split()
)
"""The cells of all pitfalls, each with one kind."""

MOMENTS = (
    *("attached", "first_gradient", "further_gradient", "step_ended", "first_steps_ended"),
    "closed",
)
"""The methods by which a pitfall listens."""

LISTENING: Mapping[type[Pitfall], tuple[str, ...]] = {
    each: moments
    for each in PITFALLS
    if (moments := tuple(one for one in MOMENTS if getattr(each, one) is not getattr(Pitfall, one)))
}
"""The pitfalls that listen, with their moments."""


def listening(kinds: Collection[str]) -> Iterator[type[Pitfall]]:
    """Yield the pitfalls that listen and concern one of `kinds`, such as "Inputs.total"."""
    present = {"*", *kinds, *(kind.partition(".")[0] for kind in kinds)}
    for each in LISTENING:
        if any(not present.isdisjoint(cell.kinds.split()) for cell in each.cells):
            yield each


def cells_of(kind: object, stage: str = "") -> list[Cell]:
    """Return the cells of a selector of one kind at a stage, by default the selector's own."""
    modes = ["", *(f".{mode}" for mode in _modes(kind, stage))]
    names = {base.__name__ + mode for base in type(kind).__mro__ for mode in modes}
    return [cell for cell in CELLS if cell.kinds == "*" or cell.kinds in names]


def _modes(kind: object, stage: str = "") -> list[str]:
    """Return the values of the fields of a selector on which an outcome may depend."""
    given, *others = (getattr(kind, mode, None) for mode in ("stage", "path", "side", "kind"))
    return [*filter(None, [stage or given or next(iter(getattr(kind, "stages", ())), ""), *others])]


def cell(kind: object, context: str, stage: str = "") -> Cell:
    """Return the cell of a selector, at a stage, in a context. Raises KeyError if it has none.

    For a user's kind without a cell, return the cell of another kind in this context.
    """
    is_users = not type(kind).__module__.startswith("gradsurg.")
    for each in [*cells_of(kind, stage), *(CELLS if is_users else ())]:
        if each.context == context:
            return each
    raise KeyError(f"{type(kind).__name__} in {context}")


def refusal(
    kind: object, context: str, site: str = "", stage: str = "", **found: object
) -> Exception:
    """Return the error of a kind that is refused in a context, with the site and a suggestion.

    `found` fills the names in braces of the text.
    """
    of, where = cell(kind, context, stage), f"site '{site}': " if site else ""
    return of.error(f"{type(kind).__name__}: {where}{of.text.format(**found)}")


def outcomes(at: Selected) -> str:
    """Return the outcomes of a selector in each context, with reasons and suggestions.

    Words between asterisks stand for what an error or warning fills in. The README of the sites has
    a table of the contexts: `print(outcomes(gs.Outputs()))`.
    """
    parts = ["refused: an error; reported: no gradient passes; n/a: PyTorch itself fails"]
    for kind in at.leaves:
        cells = cells_of(kind)
        others = {cell.context for cell in cells}
        acts = "; ".join(name for name in CONTEXTS if name not in others)
        parts.append(f"{type(kind).__name__} ({', '.join(_modes(kind))}) acts in: {acts}")
        parts += [f"  {cell.outcome} ({cell.context}): {cell.text}" for cell in cells]
    return re.sub(r"'?\{(\w+)\}'?", r"*\1*", "\n".join(parts))


def visible_contexts(model: nn.Module) -> list[str]:
    """Return the contexts that can be seen when a surgery is attached or planned.

    `model` is the one that the user calls, with its wrappers: those around it are not seen. That a
    compiled model was called before is taken from the process, which may have called another.
    """
    modules = [*model.modules()]
    when = "before" if compiling.has_compiled() else "after"
    tests = {
        "DDP": any(isinstance(module, DistributedDataParallel) for module in modules),
        "static_graph": any(vars(module).get("static_graph") for module in modules),
        "FSDP2": any(map(autograd.is_sharded, model.parameters())),
        f"torch.compile {when} attaching": any(map(compiling.is_compiled, modules)),
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


def visible_cells(at: Selected, model: nn.Module, stage: str = "") -> list[Cell]:
    """Return the cells that hold for a selector in the contexts that can be seen now."""
    contexts = visible_contexts(model)
    return [
        cell for kind in at.leaves for cell in cells_of(kind, stage) if cell.context in contexts
    ]


def refuse_at_once(model: nn.Module, selected: Iterable[tuple[Selected, str]]) -> None:
    """Raise a refusal that holds at all sites: by a static graph, or if all is sharded.

    `selected` are the selectors with their stages.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return  # both need a process group
    params = [*model.parameters()]
    is_static = any(vars(module).get("static_graph") for module in model.modules())
    are_sharded = bool(params) and all(map(autograd.is_sharded, params))
    certain = [*["static_graph"] * is_static, *["FSDP2"] * are_sharded]
    for at, stage in selected if certain else ():
        for kind in at.leaves:
            for cell in cells_of(kind, stage):
                if cell.outcome == "refused" and cell.context in certain:
                    raise refusal(kind, cell.context, stage=stage)
