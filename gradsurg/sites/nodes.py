"""Nodes: the gradients that enter or leave a node of the autograd graph."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradsurg.plugins.fields import Contradiction, SelectionError, validated
from gradsurg.plugins.messages import nearest
from gradsurg.sites.base import Attached, Place, PlaceTest, Selector, SiteFn, Stage
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
from gradsurg.torch_internals import autograd, compiling
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
    "rectifier": ("Relu", "Hardtanh"),  # ReLU6 is a Hardtanh from 0 to 6
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
    glob or `re:` on either; or a family: activation, attention, conv, loss, matmul, norm,
    rectifier, rnn, softmax. A rectifier is a ReLU or ReLU6; to PyTorch the latter is a Hardtanh, so
    that `nn.Hardtanh` is one too. `types` is a pattern on the class of the module. `call` picks one
    call of the module, `occurrence` one of several such nodes in the call, in the order in which
    they were made.

    `side="enter"` is a node prehook on the gradients with respect to the outputs of the operation;
    `side="leave"` a node posthook on those with respect to its inputs, of which `edge` picks one.
    Site ids are `module#call/Name[occurrence]`, such as
    `encoder.layers.0.linear1#0/AddmmBackward[0]`, followed by `.edge` at `side="leave"`.
    `edge="residual"` selects, of the additions that end a residual connection, the edge into the
    branch, and none of other nodes. Both operands of such an addition come from one tensor; the
    branch is the one that is further from it in the graph, with a matrix product or a convolution.

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
    edge: Annotated[int, Field(ge=0)] | Literal["residual"] | None = None
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

        prehooks: dict[str, Callable[..., object]] = {}

        @cache
        def posthook_at(site: str, takes_gradient: tuple[bool, ...]) -> Callable[..., object]:
            edges = [index for index, takes in enumerate(takes_gradient) if takes]
            if self.edge not in (None, *edges):
                listed = ", ".join(map(str, edges))
                text = f"{site} has no edge {self.edge} that takes a gradient. There are: {listed}."
                raise SelectionError(self, "edge", text)
            selected = [index for index in edges if self.edge in (None, index)]
            return posthook([(index, attached.hook_at(f"{site}.{index}")) for index in selected])

        @cache
        def residual_hook_at(site: str, edge: int) -> Callable[..., object]:
            return posthook([(edge, attached.hook_at(site))])

        def hook_node(node: Node, site: str) -> None:
            if self.side == "enter":
                prehook = prehooks.get(site)
                if prehook is None:
                    is_single = len(autograd.outputs_of(node)) == 1
                    prehook = prehooks[site] = _prehook(site, attached, is_single)
                node.register_prehook(prehook)
            elif self.edge == "residual":
                edge = residual_edge(node)
                if edge is not None:
                    node.register_hook(residual_hook_at(f"{site}.{edge}", edge))
            else:
                sources = tuple([source is not None for source, _ in node.next_functions])
                node.register_hook(posthook_at(site, sources))

        NodeHooker(self, attached, hook_node, "pattern", self.module)


class NodeHooker:
    """Calls `hook` with each node at a selected place, in each graph of the model, and its site.

    Raises LookupError after the first forward without a selected node. The pattern on nodes is in
    `field`, `modules` is that on modules.
    """

    def __init__(
        self,
        selector: Selector,
        attached: Attached,
        hook: Callable[[Node, str], None],
        field: str,
        modules: str,
    ) -> None:
        self.selector, self.field, self.modules = selector, field, modules
        self.attached, self.hook = attached, hook
        model, named = attached.model, names_of(attached.model)
        selected = candidates(named, selector.mechanism, attached.selects)
        self.parts = {name: part for part, names in selected.items() for name in names}
        self.sites: dict[NodePlace, str] = {}  # empty: not selected
        self.wanted = cache(lambda node: plain(node) == compiling.COMPILED or self._may_be(node))
        modules_followed = around(named, selected, inside=True)
        Tracer().follow(model, modules_followed, self._take, attached.stack)
        attached.check_at_end(self._left_out)

    def _take(self, graph: CallGraph) -> None:
        for node, place in graph.nodes(self.wanted):
            site = self.sites.get(place)
            if site is None:
                site = place.id if self._selects(place, graph.outside) else ""
                self.sites[place] = site
            if site:
                self.hook(node, site)
        # A later forward may take another path, such as one in evaluation mode.
        complete = graph.whole and not graph.empty and not graph.hides_nodes()
        # In a combination other parts may have used up its limit.
        if complete and not any(self.sites.values()) and self._may_be(None):
            raise self._nothing_selected(graph)

    def _may_be(self, node: str | None) -> bool:
        """Return whether a node of this name may be selected, or any if it is None."""
        mechanism, selects = self.selector.mechanism, self.attached.selects
        places = (Place(mechanism, name, part, node=node) for name, part in self.parts.items())
        return any(selects(place) is not False for place in places)

    def _selects(self, place: NodePlace, outside: bool) -> bool:
        call, mechanism = place.call, self.selector.mechanism
        where = mechanism, call.name, call.module, call.number, place.name, place.occurrence
        full = Place(*where, whole=True)
        if outside and self.attached.selects(replace(full, call=None)) is None:
            raise unnumbered(call.name)
        selected = bool(self.attached.selects(full))
        if selected and plain(place.name) == compiling.COMPILED:
            self.attached.note(ONE_NODE)
        return selected

    def _left_out(self) -> str:
        """Return a warning of the selected modules that are compiled, empty if there are none."""
        compiled = [place for place in self.sites if plain(place.name) == compiling.COMPILED]
        names = dict.fromkeys(place.call.name for place in compiled if not self.sites[place])
        listed = ", ".join(name for name in names if name in self.parts)
        return f"it did not act inside {listed}: {ONE_COMPILED_NODE}" if listed else ""

    def _nothing_selected(self, graph: CallGraph) -> SelectionError:
        """Return the error for a graph without a selected node, with the choices."""
        pattern = getattr(self.selector, self.field)
        made = [place for _, place in graph.nodes()]
        inside = {place.name for place in made if place.call.name in self.parts}
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


def posthook(hooks: Sequence[tuple[int, SiteFn]]) -> Callable[..., object]:
    """Return a node posthook that applies one hook at each of some edges."""
    return lambda grads, entering: _changed(grads, hooks, entering)


def residual_edge(node: Node) -> int | None:
    """Return the edge of an addition that leads through its residual branch, None without one.

    Both operands come from one tensor, and the branch is the one that is further from it; the other
    is the skip connection, perhaps with a projection. The branch has a matrix product or a
    convolution: the sums in a rotary embedding or a gelu are no residual connections.
    """
    operands = [following for following, _ in node.next_functions if following is not None]
    if len(operands) != 2 or any(map(_is_parameter, operands)):
        return None
    distances: list[dict[Node, int]] = [{operand: 0} for operand in operands]
    ends, common = [[operand] for operand in operands], set[Node]()
    for distance in count(1):
        common = {*distances[0]} & {*distances[1]}
        if common or not any(ends):
            break
        for known, end in zip(distances, ends, strict=True):
            following = {
                each for last in end for each, _ in last.next_functions if each is not None
            }
            end[:] = [each for each in following - known.keys() if not _is_parameter(each)]
            known.update(dict.fromkeys(end, distance))
    if not common:
        return None
    nearest = min(common, key=lambda each: distances[0][each] + distances[1][each])
    lengths = [known[nearest] for known in distances]
    branch = int(lengths[1] > lengths[0])
    inside = [each for each, far in distances[branch].items() if far < lengths[branch]]
    if lengths[0] == lengths[1] or not any(_computes(each.name()) for each in inside):
        return None
    return [following for following, _ in node.next_functions].index(operands[branch])


def _is_parameter(node: Node) -> bool:
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _computes(name: str) -> bool:
    return fits_node(name, "matmul") or fits_node(name, "conv")


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
    hooks: Sequence[tuple[int, SiteFn]],
    entering: tuple[Tensor | None, ...] = (),
) -> tuple[Tensor | None, ...] | None:
    """Apply hooks to the gradients with these indices; return None if all are unchanged."""
    changed: list[Tensor | None] | None = None
    for index, hook in hooks:
        result = hook(grads[index], None, entering)
        if result is not None:
            changed = changed or list(grads)
            changed[index] = result
    return None if changed is None else tuple(changed)
