"""Pitfalls: ways in which PyTorch's hooks mislead, one file each, and the table made from them."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple, Protocol

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parallel import DistributedDataParallel

from gradsurg.core.pitfalls.base import Outcome, Pitfall, Texts
from gradsurg.torch_internals import autograd, compiling


class Staged(Protocol):
    """A selector, or one of its leaves."""

    @property
    def stage(self) -> str | None: ...


class Selected(Protocol):
    """A selector of one kind of site or of several."""

    @property
    def leaves(self) -> Sequence[Staged]: ...


class Cell(NamedTuple):
    """The outcome of one kind of site in one context, if it does not simply act.

    `stage` is the stage or another mode of the kind, as the side of `Nodes`; empty for all.
    """

    kind: str
    stage: str
    pitfall: type[Pitfall]
    context: str
    outcome: Outcome
    sentences: str


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
"""The columns of the table in the README of the sites, with their meanings."""


def _kinds_in(text: str) -> list[tuple[str, str]]:
    """Return the kinds in a text such as "Outputs Nodes.enter", each with its mode."""
    return [(kind, mode) for kind, _, mode in (name.partition(".") for name in text.split())]


KINDS = _kinds_in(
    "Parameters.backward Parameters.accumulated Parameters.backward_end Parameters.step"
    " Buckets.sent Buckets.reduced Outputs Inputs.branch Inputs.total Nodes.enter Nodes.leave"
    " ModuleGradients.full_backward_pre ModuleGradients.full_backward"
    " EveryModule.full_backward_pre EveryModule.forward Activations Weights Updates SavedTensors"
    " Uses Captured"
)
"""The rows of that table: kinds of site, each with the stage or other mode that it is used in."""


def _all_of(cause: type[Pitfall]) -> Iterator[type[Pitfall]]:
    for each in cause.__subclasses__():
        yield from (each, *_all_of(each))


for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)

PITFALLS: tuple[type[Pitfall], ...] = tuple(_all_of(Pitfall))

ROWS: tuple[Cell, ...] = tuple(
    Cell(kind, mode, each, each.context, each.outcome, each.sentences())
    for each in PITFALLS
    for kind, mode in _kinds_in(each.kinds)
)


MOMENTS = (
    *("attached", "first_gradient", "further_gradient", "forward_ended", "step_ended"),
    *("state_loaded", "closed"),
)
"""The methods by which a pitfall listens."""

LISTENING = tuple(
    each
    for each in PITFALLS
    if any(getattr(each, moment) is not getattr(Pitfall, moment) for moment in MOMENTS)
)


def listeners_of(pitfall: Pitfall) -> Iterator[tuple[str, Callable[..., Texts]]]:
    """Yield the moments at which a pitfall listens, with its methods."""
    for moment in MOMENTS:
        if getattr(type(pitfall), moment) is not getattr(Pitfall, moment):
            yield moment, getattr(pitfall, moment)


def listening(kinds: Collection[str]) -> Iterator[type[Pitfall]]:
    """Yield the pitfalls that listen, of which a kind is one of `kinds`, as "Inputs.total"."""
    for each in LISTENING:
        names = {*each.kinds.split()}
        if "*" in names or any({kind, kind.partition(".")[0]} & names for kind in kinds):
            yield each


def rows_of(kind: Staged, stage: str = "") -> list[Cell]:
    """Return the rows of a kind, as its fields say it, at a stage (its own, if empty)."""
    names = {"*", *(base.__name__ for base in type(kind).__mro__)}
    modes = _modes(kind, stage)
    return [row for row in ROWS if row.kind in names and row.stage in ("", *modes)]


def _modes(kind: Staged, stage: str = "") -> list[str]:
    """Return the values of the fields of a selector on which an outcome may depend."""
    given, *others = (getattr(kind, mode, None) for mode in ("stage", "path", "side", "kind"))
    return [*filter(None, [stage or given or next(iter(getattr(kind, "stages", ())), ""), *others])]


def row(kind: Staged, context: str, stage: str = "") -> Cell:
    """Return the row of a selector, at a stage, in a context. Raises KeyError if it has none.

    A user's kind that has none gets that of another kind.
    """
    is_users = not type(kind).__module__.startswith("gradsurg.")
    for each in [*rows_of(kind, stage), *(ROWS if is_users else ())]:
        if each.context == context:
            return each
    raise KeyError(f"{type(kind).__name__} in {context}")


def refusal(
    kind: Staged, context: str, site: str = "", stage: str = "", **found: object
) -> Exception:
    """Return the error of a kind that is refused in a context, with the site and the way out.

    `found` fills the names in braces of the row's sentences.
    """
    pitfall, where = row(kind, context, stage).pitfall, f"site '{site}': " if site else ""
    return pitfall.error(f"{type(kind).__name__}: {where}{pitfall.sentences(**found)}")


def outcomes(at: Selected) -> str:
    """Return a text of what a selector does in each context, with reasons and ways out.

    The contexts are those of the table in the README of the sites: `print(outcomes(gs.Outputs()))`.
    """
    parts = []
    for kind in at.leaves:
        rows = rows_of(kind)
        others = {row.context for row in rows}
        acts = "; ".join(name for name in CONTEXTS if name not in others)
        parts.append(f"{type(kind).__name__} ({', '.join(_modes(kind))}) acts in: {acts}")
        parts += [f"  {row.outcome} in {row.context}: {row.sentences}" for row in rows]
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


def visible_rows(at: Selected, model: nn.Module, stage: str = "") -> list[Cell]:
    """Return the rows that hold for a selector in the contexts that can be seen now."""
    contexts = visible_contexts(model)
    return [row for kind in at.leaves for row in rows_of(kind, stage) if row.context in contexts]


def refuse_at_once(model: nn.Module, selected: Iterable[tuple[Selected, str]]) -> None:
    """Raise a refusal that holds at all sites: by a static graph, or if all is sharded.

    `selected` are the selectors with their stages.
    """
    is_static = any(vars(module).get("static_graph") for module in model.modules())
    # Most often the first parameter is not sharded, and the others are not asked for.
    has_params = next(model.parameters(), None) is not None
    are_sharded = has_params and all(map(autograd.is_sharded, model.parameters()))
    certain = [*["static_graph"] * is_static, *["FSDP2"] * are_sharded]
    for at, stage in selected if certain else ():
        for kind in at.leaves:
            for row in rows_of(kind, stage):
                if row.outcome == "refused" and row.context in certain:
                    raise refusal(kind, row.context, stage=stage)
