"""Nodes: what enters or leaves a node of the autograd graph."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.fields import Contradiction, nearest, validated
from gradsurg.sites._modules import Pattern, Types, matches_type, names_of
from gradsurg.sites._spans import Located, Spans
from gradsurg.sites.base import (
    Gates,
    GradFn,
    Keeps,
    Place,
    Selector,
    Stage,
    matches,
    nothing_matched,
    through,
)
from gradsurg.transforms.base import Scope

FAMILIES = {
    "attention": ("ScaledDotProduct*",),
    "conv": ("*Convolution",),
    "matmul": ("Addmm", "Mm", "Bmm", "Baddbmm"),
    "norm": ("NativeBatchNorm", "CudnnBatchNorm", "NativeLayerNorm", "NativeGroupNorm"),
}


@validated
class Nodes(Selector):
    """The autograd nodes of one kind, made inside the modules whose name fits `module`.

    `pattern` is a node's name without `Backward0` (`Relu`, `Addmm`), a glob or `re:` on it, or a
    family: attention, conv, matmul, norm. `types` is a pattern on the class of the module.
    `side="enter"` acts by a node prehook on the gradients with respect to what the operation
    returned; `side="leave"` by a node posthook on the gradients with respect to what it took,
    `edge` picking one of them. `call` picks a call of the module, `occurrence` one of several such
    nodes in it. Site ids are `module#call/Name[occurrence]`, as
    `encoder.layers.0.linear1#0/AddmmBackward[0]`, and `.edge` behind it at `side="leave"`. The
    module is the innermost one that was running when the node was made; nodes of the model's own
    forward belong to `root`. Raises LookupError after the first forward if no node is selected.
    """

    pattern: Pattern
    module: Pattern = "*"
    side: Literal["enter", "leave"] = "enter"
    call: Annotated[int, Field(ge=0)] | None = None
    occurrence: Annotated[int, Field(ge=0)] | None = None
    edge: Annotated[int, Field(ge=0)] | None = None
    types: Types = "*"
    stage: Stage | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)
    has_value: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.edge is not None and self.side == "enter":
            raise Contradiction("edge", f"needs side=leave, found {self.edge} with side=enter")

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("Nodes", self.stage, self.side, self.edge)

    def selects(self, place: Place) -> bool | None:
        if (
            place.mechanism != self.mechanism
            or not matches(place.name, self.module)
            or not isinstance(place.thing, nn.Module)
            or not matches_type(place.thing, self.types)
        ):
            return False
        if place.node is None:
            return None
        return (
            _fits(place.node, self.pattern)
            and self.call in (None, place.call)
            and self.occurrence in (None, place.occurrence)
        )

    def find(self, model: nn.Module, keeps: Keeps | None = None) -> list[str]:
        keeps = keeps or self.selects
        named = names_of(model)
        found = [
            name
            for module, names in named.items()
            for name in names
            if keeps(Place(self.mechanism, name, module)) is not False
        ]
        if not found:
            choices = [name for names in named.values() for name in names]
            raise nothing_matched("Nodes: module", self.module, choices)
        return found

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        gates: Gates,
        stack: ExitStack,
    ) -> None:
        self.find(model, gates.keeps)
        met = False
        known: dict[str, bool] = {}

        def made(nodes: list[Located], whole: bool) -> None:
            nonlocal met
            chosen = []
            for node in nodes:
                kept = known.get(node.id)
                if kept is None:
                    kept = known[node.id] = bool(gates.keeps(self._place(node)))
                if kept:
                    chosen.append(node)
            # A later forward may go another way, as one in evaluation mode does.
            if whole and not chosen and nodes and not met:
                raise self._nothing(nodes)
            met = met or bool(chosen)
            for located in chosen:
                self._hook_node(located, gates)

        Spans(made).hook(model, stack)

    def _place(self, node: Located) -> Place:
        return Place(
            self.mechanism,
            node.module,
            node.thing,
            node.call,
            node.name,
            node.occurrence,
            whole=True,
        )

    def _nothing(self, nodes: list[Located]) -> LookupError:
        names = sorted({node.name for node in nodes if matches(node.module, self.module)})
        if not names:
            return nothing_matched("Nodes: module", self.module, sorted({n.module for n in nodes}))
        where = "" if self.module == "*" else f" in '{self.module}'"
        return LookupError(
            f"Nodes: no node{where} is selected by '{self.pattern}' (call={self.call}, "
            f"occurrence={self.occurrence}). {nearest(self.pattern, [*names, *FAMILIES])}"
        )

    def _hook_node(self, located: Located, gates: Gates) -> None:
        node = located.node
        match self.side:
            case "enter":
                if len(node._input_metadata) == 1:
                    entering = [gates.gate(located.id)]
                    node.register_prehook(lambda grads: through(entering, grads))
                else:
                    node.register_prehook(lambda grads: _through_several(located.id, gates, grads))
            case "leave":
                leaving = self._edges(located, gates)
                node.register_hook(lambda grads, _: through(leaving, grads))

    def _edges(self, located: Located, gates: Gates) -> list[GradFn]:
        sources = [source for source, _ in located.node.next_functions]
        edges = [index for index, source in enumerate(sources) if source is not None]
        if self.edge not in (None, *edges):
            raise LookupError(
                f"Nodes: {located.id} has no edge {self.edge} that takes a gradient. "
                f"There are: {', '.join(map(str, edges))}."
            )
        chosen = edges if self.edge is None else [self.edge]
        return [
            gates.gate(f"{located.id}.{index}") if index in chosen else _pass
            for index in range(len(sources))
        ]


def _through_several(
    site: str, gates: Gates, grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Only outputs that get a gradient are sites: the statistics that a norm returns get none."""
    entering = [
        _pass if grad is None else gates.gate(f"{site}.{index}") for index, grad in enumerate(grads)
    ]
    return through(entering, grads)


def _fits(name: str, pattern: str) -> bool:
    pattern = re.sub(r"Backward\d*$", "", pattern)
    return any(matches(name, kind) for kind in FAMILIES.get(pattern, (pattern,)))


def _pass(grad: Tensor | None) -> None:
    return None
