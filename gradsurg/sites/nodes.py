"""Nodes: what enters or leaves a node of the autograd graph."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from gradsurg.plugins.fields import Contradiction, SelectionError, nearest, validated
from gradsurg.sites.base import GradFn, HookRegistry, Place, PlaceTest, Selector, SiteHook, Stage
from gradsurg.sites.graph_tracer import CallGraph, NodePlace, Tracer, around, plain
from gradsurg.sites.selection import (
    Pattern,
    Types,
    candidates,
    matches,
    matches_type,
    names_of,
    nothing_matched,
)
from gradsurg.transforms.base import Need, Scope

COMPILED = "CompiledFunction"
PRODUCTS = (("Addmm", 1), ("Mm", 0))  # by which edge the gradient of the input leaves
FAMILIES = {
    "activation": (
        *("Relu", "LeakyRelu", "RreluWithNoise", "PreluKernel", "Threshold", "Elu", "Celu"),
        *("Gelu", "Silu", "Mish", "Glu", "Sigmoid", "LogSigmoid", "Tanh", "Softplus"),
        *("Hardtanh", "Hardsigmoid", "Hardswish", "Hardshrink", "Softshrink"),
    ),
    "attention": ("ScaledDotProduct*", "FlashAttention", "EfficientAttention", "CudnnAttention"),
    "conv": ("*Convolution", "*ConvolutionTranspose", "ConvDepthwise?D", "ConvTbc", "SlowConv*D"),
    "loss": (
        *("NllLoss", "NllLoss2D", "LogSoftmax", "MseLoss", "HuberLoss", "SmoothL1Loss"),
        *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "SoftMarginLoss"),
        *("MultiMarginLoss", "MultilabelMarginLoss", "*CtcLoss"),
    ),
    "matmul": (
        *("Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Addmv", "Mv", "Dot", "GroupedMm"),
        *("Linear", "Matmul", "MkldnnLinear", "SparseAddmm"),
    ),
    "norm": (
        *("NativeBatchNorm", "NativeBatchNormLegit*", "BatchNormWithUpdate", "BatchNormNoUpdate"),
        *("CudnnBatchNorm", "MiopenBatchNorm", "NativeLayerNorm", "NativeGroupNorm"),
        "FusedRmsNorm",
    ),
    "rnn": ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn", "LstmMps", "ThnnFused*Cell"),
    "softmax": ("Softmax", "LogSoftmax", "SafeSoftmax", "MaskedSoftmax", "Sparse*Softmax"),
}
"""Names vary with shape, dtype and device. Dropout has none: on a CPU it is a product."""

ONE_NODE = (
    "it acted on nodes that torch.compile has made, each of them many operations in one: in eager "
    "there are others"
)


@validated
class Nodes(Selector):
    """The autograd nodes of one kind, made inside the modules whose name fits `module`.

    `pattern` is a node's name: `Mul` fits every overload, `MulBackward1` that one; a glob or `re:`
    on either; or a family: activation, attention, conv, loss, matmul, norm, rnn, softmax. `types`
    is a pattern on the class of the module. `side="enter"` acts by a node prehook on the gradients
    with respect to what the operation returned; `side="leave"` by a node posthook on the gradients
    with respect to what it took, `edge` picking one of them. `call` picks a call of the module,
    `occurrence` one of several such nodes in it, in the order in which they were made. Site ids are
    `module#call/Name[occurrence]`, as `encoder.layers.0.linear1#0/AddmmBackward[0]`, and `.edge`
    behind it at `side="leave"`. Raises LookupError after the first forward if no node is selected.

    The module is the innermost one that was running when the node was made; nodes of the model's
    own forward belong to `root`. So a weight's cast under autocast, made once, belongs to the call
    that was first, and a view of what was changed in place to who looked at it first. Those of a
    reentrant checkpoint are met in the backward, but not what it computes outside of modules. What
    is made after the model, as the loss, or in a backward is not found: `gs.hook(loss.grad_fn,
    ...)` reaches it. Nor is what no output of the model depends on.
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
    compile_limit: ClassVar[str] = "what is compiled runs as one node"

    def __post_init__(self) -> None:
        if self.edge is not None and self.side == "enter":
            raise Contradiction("edge", f"needs side=leave, found {self.edge} with side=enter")

    @property
    def provides(self) -> frozenset[Need]:
        if self.side == "enter":
            return frozenset()
        kind = plain(self.pattern).removesuffix("Backward")
        return frozenset({"entering", "product"} if (kind, self.edge) in PRODUCTS else {"entering"})

    @property
    def known_in_backward(self) -> bool:
        return self.side == "enter"  # which outputs of a node get a gradient

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
        if place.node is not None and not fits(place.node, self.pattern):
            return False
        asked = ((self.call, place.call), (self.occurrence, place.occurrence))
        if any(number not in (None, found) for number, found in asked if found is not None):
            return False
        known = all(number is None or found is not None for number, found in asked)
        return True if known and place.node is not None else None

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        test = test or self.selects
        named = names_of(model)
        found = [
            name for names in candidates(named, self.mechanism, test).values() for name in names
        ]
        if not found:
            choices = [name for names in named.values() for name in names]
            if any(matches(name, self.module) for name in choices):
                types = sorted({type(module).__name__ for module in named})
                raise nothing_matched(self, "types", str(self.types), types)
            raise nothing_matched(self, "module", self.module, choices)
        return found

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        self.find(model, registry.selects)
        names = names_of(model)
        kept = candidates(names, self.mechanism, registry.selects)
        own = [(module, name) for module in kept for name in kept[module]]
        met = False
        sites: dict[NodePlace, Callable[[Node], object] | None] = {}

        @cache
        def wanted(node: str) -> bool:
            places = (Place(self.mechanism, name, module, node=node) for module, name in own)
            return any(registry.selects(place) is not False for place in places)

        def take(graph: CallGraph) -> None:
            nonlocal met
            chosen = False
            for node, spot in graph.nodes(wanted):
                if spot not in sites:
                    sites[spot] = self._site(node, spot, registry)
                    if sites[spot] and plain(spot.name) == f"{COMPILED}Backward":
                        registry.note(ONE_NODE)
                site = sites[spot]
                if site is not None:
                    chosen = True
                    site(node)
            # A later forward may go another way, as one in evaluation mode does.
            if not (chosen or met) and graph.whole and not graph.empty and not graph.hides_nodes():
                # Others may have all the places that a combination has room for.
                places = (Place(self.mechanism, name, module) for module, name in own)
                if any(registry.selects(place) is not False for place in places):
                    raise self._nothing(graph)
            met = met or chosen

        modules = around(names, kept, inside=True)

        def register(own: ExitStack) -> None:
            Tracer().follow(model, modules, take, own, since=kept)

        registry.register(register, stack)

    def _nothing(self, graph: CallGraph) -> SelectionError:
        made = [spot for _, spot in graph.nodes() if matches(spot.call.name, self.module)]
        names = sorted({plain(spot.name).removesuffix("Backward") for spot in made})
        families = [own for own in FAMILIES if any(fits(spot.name, own) for spot in made)]
        where = "" if self.module == "*" else f" in '{self.module}'"
        compiled = not names or COMPILED in names
        hint = " What is compiled runs as one node: use Outputs there." if compiled else ""
        numbers = {"call": self.call, "occurrence": self.occurrence}
        given = {key: own for key, own in numbers.items() if own is not None}
        asked = ", ".join(f"{key}={own}" for key, own in given.items())
        field = next(iter(given)) if len(given) == 1 else "pattern"
        there = [*families, *names]
        listed = nearest("" if self.pattern in there else self.pattern, there)
        return SelectionError(
            self,
            field,
            f"no node{where} is selected by '{self.pattern}'{f' ({asked})' if asked else ''}"
            f". {listed}{hint}",
        )

    def _site(
        self, node: Node, spot: NodePlace, registry: HookRegistry
    ) -> Callable[[Node], object] | None:
        """How to hook a node like this one at this place, None if it is not selected."""
        call = spot.call
        where = self.mechanism, call.name, call.module, call.number, spot.name, spot.occurrence
        if not registry.selects(Place(*where, whole=True)):
            return None
        site = spot.id
        if self.side == "enter":
            entering = _prehook(site, registry, len(node._input_metadata) == 1)
            return lambda node: node.register_prehook(entering)
        leaving: dict[tuple[bool, ...], Callable[..., object]] = {}

        def leave(node: Node) -> None:
            live = tuple([source is not None for source, _ in node.next_functions])
            if live not in leaving:
                leaving[live] = self._leaving(site, registry, live)
            node.register_hook(leaving[live])

        return leave

    def _leaving(
        self, site: str, registry: HookRegistry, live: Sequence[bool]
    ) -> Callable[..., object]:
        edges = [index for index, takes in enumerate(live) if takes]
        if self.edge not in (None, *edges):
            raise SelectionError(
                self,
                "edge",
                f"{site} has no edge {self.edge} that takes a gradient. "
                f"There are: {', '.join(map(str, edges))}.",
            )
        chosen = edges if self.edge is None else [self.edge]
        return posthook([(index, registry.hook_for(f"{site}.{index}")) for index in chosen])


def posthook(pairs: Sequence[tuple[int, SiteHook]]) -> Callable[..., object]:
    """A node posthook that passes what leaves by some edges through a gate each."""

    def hook(
        grads: Sequence[Tensor | None], entering: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        changed: list[Tensor | None] | None = None
        for index, gate in pairs:
            result = gate(grads[index], None, entering)
            if result is not None:
                changed = changed or list(grads)
                changed[index] = result
        return None if changed is None else tuple(changed)

    return hook


def _prehook(site: str, registry: HookRegistry, alone: bool) -> Callable[..., object]:
    """A node prehook. Only outputs that get a gradient are sites: a norm's statistics get none."""
    if alone:
        gate = registry.hook_for(site)

        def hook_one(grads: Sequence[Tensor | None]) -> tuple[Tensor] | None:
            result = gate(grads[0])
            return None if result is None else (result,)

        return hook_one
    entering: dict[int, GradFn] = {}

    def hook(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        changed: list[Tensor | None] | None = None
        for index, grad in enumerate(grads):
            if grad is not None:
                gate = entering.get(index)
                if gate is None:
                    gate = entering[index] = registry.hook_for(f"{site}.{index}")
                result = gate(grad)
                if result is not None:
                    changed = changed or list(grads)
                    changed[index] = result
        return None if changed is None else tuple(changed)

    return hook


def fits(name: str, pattern: str) -> bool:
    kinds = FAMILIES.get(pattern, (pattern,))
    spelled = {name.rpartition("::")[2], plain(name)}
    # A pattern that spells `Backward` out does not mean the node of a backward's backward.
    if not re.search(r"Backward\d*$", pattern):
        spelled.add(plain(name).removesuffix("Backward"))
    return any(matches(own, kind) for kind in kinds for own in spelled)
