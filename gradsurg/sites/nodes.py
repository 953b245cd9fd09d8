"""Nodes: the gradients that enter or leave a node of the autograd graph."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradsurg.plugins.fields import Contradiction, SelectionError, validated
from gradsurg.plugins.messages import nearest
from gradsurg.sites.base import Attached, Place, PlaceTest, Selector, SiteHook, Stage
from gradsurg.sites.graph_tracer import CallGraph, NodePlace, Tracer, around, check_called, plain
from gradsurg.sites.selection import (
    Pattern,
    Types,
    candidates,
    matches,
    matches_type,
    names_of,
    nothing_matched,
    unnumbered,
)
from gradsurg.torch_internals import compiling
from gradsurg.transforms.base import Need

PRODUCTS = (("Addmm", 1), ("Mm", 0))  # node and the edge of the gradient with respect to the input
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
"""Node names without `Backward`, which vary with shape, dtype and device. Dropout has no family:
on a CPU it is a multiplication."""

ONE_COMPILED_NODE = (
    "torch.compile has compiled it, so that its operations are one node; use Outputs there"
)
ONE_NODE = (
    "it acted on nodes that torch.compile has made, each of them many operations in one: in eager "
    "there are others"
)


@validated
class Nodes(Selector):
    """The autograd nodes of one kind, made inside the modules whose name fits `module`.

    `pattern` is the name of a node: `Mul` fits every overload, `MulBackward1` only that one; or a
    glob or `re:` on either; or a family: activation, attention, conv, loss, matmul, norm, rnn,
    softmax. `types` is a pattern on the class of the module. `call` picks one call of the module,
    `occurrence` one of several such nodes in the call, in the order in which they were made.

    `side="enter"` is a node prehook on the gradients with respect to the outputs of the operation;
    `side="leave"` a node posthook on those with respect to its inputs, of which `edge` picks one.
    Site ids are `module#call/Name[occurrence]`, such as
    `encoder.layers.0.linear1#0/AddmmBackward[0]`, followed by `.edge` at `side="leave"`.

    A node belongs to the innermost module that was running when it was made; nodes made in the
    model's own forward belong to `root`. So a weight's autocast cast, made once, belongs to the
    first call that needs it; a view of a tensor changed in place, to the first call that reads it.
    Nodes of a reentrant checkpoint are hooked in the backward pass, except those made outside of
    modules. Not found are nodes on which no output of the model depends, and nodes made after the
    model (use `gs.hook(loss.grad_fn, ...)`) or in a backward pass. Raises LookupError after the
    first forward if no node is selected.
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
        if place.node is not None and not fits_node(place.node, self.pattern):
            return False
        asked = ((self.call, place.call), (self.occurrence, place.occurrence))
        if any(wanted not in (None, actual) for wanted, actual in asked if actual is not None):
            return False
        known = all(wanted is None or actual is not None for wanted, actual in asked)
        return True if known and place.node is not None else None

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        named = names_of(model)
        selected = candidates(named, self.mechanism, test or self.selects)
        check_called(self, model, selected)
        if selected:
            return [name for names in selected.values() for name in names]
        choices = [name for names in named.values() for name in names]
        if any(matches(name, self.module) for name in choices):
            types = sorted({type(module).__name__ for module in named})
            raise nothing_matched(self, "types", str(self.types), types)
        raise nothing_matched(self, "module", self.module, choices)

    def hook(self, attached: Attached) -> None:
        self.find(attached.model, attached.selects)
        NodeHooker(self, attached, partial(self._hooker, attached), "pattern", self.module)

    def _hooker(self, attached: Attached, node: Node, place: NodePlace) -> "Register":
        site = place.id
        if plain(place.name) == compiling.COMPILED:
            attached.note(ONE_NODE)
        if self.side == "enter":
            prehook = _prehook(site, attached, len(node._input_metadata) == 1)
            return lambda node: node.register_prehook(prehook)

        @cache
        def posthook_of(live: tuple[bool, ...]) -> Callable[..., object]:
            edges = [index for index, takes_gradient in enumerate(live) if takes_gradient]
            if self.edge not in (None, *edges):
                listed = ", ".join(map(str, edges))
                text = f"{site} has no edge {self.edge} that takes a gradient. There are: {listed}."
                raise SelectionError(self, "edge", text)
            selected = edges if self.edge is None else [self.edge]
            return posthook([(index, attached.hook_at(f"{site}.{index}")) for index in selected])

        return lambda node: node.register_hook(
            posthook_of(tuple([source is not None for source, _ in node.next_functions]))
        )


Register = Callable[[Node], object]
"""Registers hooks on a node."""


class NodeHooker:
    """Hooks the nodes at selected places in each graph of the model.

    `hooker` is called once for each selected place, and returns the function that hooks the nodes
    there. Raises LookupError after the first forward without a selected node; `field` has the
    pattern on nodes and `modules` is that on modules.
    """

    def __init__(
        self,
        selector: Selector,
        attached: Attached,
        hooker: Callable[[Node, NodePlace], Register],
        field: str,
        modules: str,
    ) -> None:
        self.selector, self.field, self.modules = selector, field, modules
        self.attached, self.hooker = attached, hooker
        named, self.mechanism = names_of(attached.model), selector.mechanism
        selected = candidates(named, self.mechanism, attached.selects)
        self.places = [
            Place(self.mechanism, name, module) for module in selected for name in selected[module]
        ]
        self.registers: dict[NodePlace, Register | None] = {}  # None: not selected
        self.has_hooked = False
        self.compiled: dict[str, None] = {}  # names of modules that are compiled and left out
        self.wanted = cache(lambda node: plain(node) == compiling.COMPILED or self._may_be(node))
        followed = around(named, selected, inside=True)

        def register(removals: ExitStack) -> None:
            Tracer().follow(attached.model, followed, self._take, removals)

        attached.register(register, attached.stack)
        attached.check_at_end(
            lambda: (
                f"it did not act inside {', '.join(self.compiled)}: {ONE_COMPILED_NODE}"
                if self.compiled
                else ""
            )
        )

    def _take(self, graph: CallGraph) -> None:
        for node, place in graph.nodes(self.wanted):
            if place not in self.registers:
                self.registers[place] = self._register_at(node, place, graph.outside)
            register = self.registers[place]
            if register is not None:
                self.has_hooked = True
                register(node)
        # A later forward may take another path, such as one in evaluation mode.
        complete = graph.whole and not graph.empty and not graph.hides_nodes()
        # In a combination other parts may have used up its limit.
        if complete and not self.has_hooked and self._may_be(None):
            raise self._nothing_selected(graph)

    def _may_be(self, node: str | None) -> bool:
        """Return whether a node of this name may be selected, or any if it is None."""
        return any(
            self.attached.selects(replace(place, node=node)) is not False for place in self.places
        )

    def _register_at(self, node: Node, place: NodePlace, outside: bool) -> Register | None:
        call = place.call
        where = self.mechanism, call.name, call.module, call.number, place.name, place.occurrence
        full = Place(*where, whole=True)
        if outside and self.attached.selects(replace(full, call=None)) is None:
            raise unnumbered(call.name)
        if self.attached.selects(full):
            return self.hooker(node, place)
        if plain(place.name) == compiling.COMPILED and self._is_inside(place):
            self.compiled[call.name] = None
        return None

    def _is_inside(self, place: NodePlace) -> bool:
        return any(place.call.name == selected.name for selected in self.places)

    def _nothing_selected(self, graph: CallGraph) -> SelectionError:
        """Return the error for a graph without a selected node, with the choices."""
        pattern = getattr(self.selector, self.field)
        made = [place for _, place in graph.nodes()]
        inside = {place.name for place in made if self._is_inside(place)}
        families = [name for name in FAMILIES if any(fits_node(node, name) for node in inside)]
        choices = [*families, *sorted({plain(name).removesuffix("Backward") for name in inside})]
        numbers = {name: getattr(self.selector, name, None) for name in ("call", "occurrence")}
        given = [f" ({name}={number})" for name, number in numbers.items() if number is not None]
        where = "" if self.modules == "*" else f" in '{self.modules}'"
        is_compiled = any(plain(place.name) == compiling.COMPILED for place in made)
        hint = " What is compiled runs as one node: use Outputs there." * is_compiled
        listed = nearest("" if pattern in choices else pattern, choices)
        text = f"no node{where} is selected by '{pattern}'{''.join(given)}. {listed}{hint}"
        return SelectionError(self.selector, self.field, text)


def posthook(hooks: Sequence[tuple[int, SiteHook]]) -> Callable[..., object]:
    """Return a node posthook that applies one hook at each of some edges."""
    return lambda grads, entering: _changed(grads, hooks, entering)


def fits_node(name: str, pattern: str) -> bool:
    """Return whether the name of a node fits a pattern or belongs to a family."""
    patterns = FAMILIES.get(pattern, (pattern,))
    spellings = {name.rpartition("::")[2], plain(name)}
    # A pattern that ends in `Backward` does not mean a node of a double backward.
    if not re.search(r"Backward\d*$", pattern):
        spellings.add(plain(name).removesuffix("Backward"))
    return any(
        matches(spelling, node_pattern) for node_pattern in patterns for spelling in spellings
    )


def _prehook(site: str, attached: Attached, single: bool) -> Callable[..., object]:
    """Return a node prehook; of several outputs, those that get a gradient are sites."""
    if single:
        site_hook = attached.hook_at(site)

        def hook(grads: Sequence[Tensor | None]) -> tuple[Tensor] | None:
            result = site_hook(grads[0])
            return None if result is None else (result,)

        return hook
    hook_of = cache(lambda index: attached.hook_at(f"{site}.{index}"))
    return lambda grads: _changed(
        grads, [(index, hook_of(index)) for index, grad in enumerate(grads) if grad is not None]
    )


def _changed(
    grads: Sequence[Tensor | None],
    hooks: Sequence[tuple[int, SiteHook]],
    entering: tuple[Tensor | None, ...] = (),
) -> tuple[Tensor | None, ...] | None:
    """Apply hooks to the gradients with these indices; return None if all are unchanged."""
    results = {index: hook(grads[index], None, entering) for index, hook in hooks}
    changed = {index: result for index, result in results.items() if result is not None}
    if not changed:
        return None
    return tuple(changed.get(index, grad) for index, grad in enumerate(grads))
