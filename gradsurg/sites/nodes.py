"""Nodes: what enters or leaves a node of the autograd graph."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.fields import Contradiction, nearest, validated
from gradsurg.sites._spans import Located, Spans
from gradsurg.sites.base import (
    Gates,
    GradFn,
    Selector,
    Stage,
    check_pattern,
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
    family: attention, conv, matmul, norm. `side="enter"` acts by a node prehook on the gradients
    with respect to what the operation returned; `side="leave"` by a node posthook on the gradients
    with respect to what it took, `edge` picking one of them. `call` picks a call of the module,
    `occurrence` one of several such nodes in it. Site ids are
    `module#call/Name[occurrence]`, as `encoder.layers.0.linear1#0/AddmmBackward[0]`, and `.edge`
    behind it at `side="leave"`. The module is the innermost one that was running when the node was
    made; nodes of the model's own forward belong to `root`. Raises LookupError after the first
    forward if no node is selected.
    """

    pattern: Annotated[str, AfterValidator(check_pattern)]
    module: Annotated[str, AfterValidator(check_pattern)] = "*"
    side: Literal["enter", "leave"] = "enter"
    call: Annotated[int, Field(ge=0)] | None = None
    occurrence: Annotated[int, Field(ge=0)] | None = None
    edge: Annotated[int, Field(ge=0)] | None = None
    stage: Stage | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)
    has_value: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.edge is not None and self.side == "enter":
            raise Contradiction("edge", f"needs side=leave, found {self.edge} with side=enter")

    def find(self, model: nn.Module) -> list[str]:
        modules = [name or "root" for name, _ in model.named_modules()]
        found = [name for name in modules if matches(name, self.module)]
        if not found:
            raise nothing_matched("Nodes: module", self.module, modules)
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
        self.find(model)
        met = False

        def made(nodes: list[Located], whole: bool) -> None:
            nonlocal met
            chosen = [node for node in nodes if self._selects(node)]
            # A later forward may go another way, as one in evaluation mode does.
            if whole and not chosen and nodes and not met:
                raise self._nothing(nodes)
            met = met or bool(chosen)
            for located in chosen:
                self._hook_node(located, gates)

        Spans(made).hook(model, stack)

    def _selects(self, node: Located) -> bool:
        return (
            _fits(node.name, self.pattern)
            and matches(node.module, self.module)
            and self.call in (None, node.call)
            and self.occurrence in (None, node.occurrence)
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
