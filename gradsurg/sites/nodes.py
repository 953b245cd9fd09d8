"""Nodes: the gradients that enter or leave a node of the autograd graph."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradsurg.plugins.fields import Contradiction, SelectionError, validated
from gradsurg.plugins.messages import nearest
from gradsurg.sites.base import Attached, GradFn, Place, PlaceTest, Selector, SiteHook, Stage
from gradsurg.sites.graph_tracer import CallGraph, NodePlace, Tracer, around, plain
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
from gradsurg.transforms.base import Need

COMPILED = "CompiledFunction"
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
        if selected:
            return [name for names in selected.values() for name in names]
        choices = [name for names in named.values() for name in names]
        if any(matches(name, self.module) for name in choices):
            types = sorted({type(module).__name__ for module in named})
            raise nothing_matched(self, "types", str(self.types), types)
        raise nothing_matched(self, "module", self.module, choices)

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        self.find(model, attached.selects)
        named = names_of(model)
        selected = candidates(named, self.mechanism, attached.selects)
        places = [(module, name) for module, names in selected.items() for name in names]
        hooked_before = False
        hookers: dict[NodePlace, Callable[[Node], object] | None] = {}  # None: not selected

        @cache
        def wanted(node: str) -> bool:
            tried = (Place(self.mechanism, name, module, node=node) for module, name in places)
            return any(attached.selects(place) is not False for place in tried)

        def take(graph: CallGraph) -> None:
            nonlocal hooked_before
            hooked = False
            for node, place in graph.nodes(wanted):
                if place not in hookers:
                    hookers[place] = self._hooker(node, place, attached, graph.outside)
                    if hookers[place] and plain(place.name) == f"{COMPILED}Backward":
                        attached.note(ONE_NODE)
                register = hookers[place]
                if register is not None:
                    hooked = True
                    register(node)
            # A later forward may take another path, such as one in evaluation mode.
            complete = graph.whole and not graph.empty and not graph.hides_nodes()
            if complete and not (hooked or hooked_before):
                # In a combination other parts may have used up its limit.
                tried = (Place(self.mechanism, name, module) for module, name in places)
                if any(attached.selects(place) is not False for place in tried):
                    raise self._nothing_selected(graph)
            hooked_before = hooked_before or hooked

        modules = around(named, selected, inside=True)

        def compiled_inside() -> str:
            compiled = {id(part._modules.get("_orig_mod")) for part in model.modules()}
            names = [
                name
                for module, (name, *_) in names_of(model).items()
                if module is not model
                and (id(module) in compiled or getattr(module, "_compiled_call_impl", None))
                and attached.selects(Place(self.mechanism, name, module)) is not False
            ]
            if not names or COMPILED in self.pattern:
                return ""
            return f"it did not act inside {', '.join(names)}: {ONE_COMPILED_NODE}"

        attached.check_at_end(compiled_inside)

        def register(removals: ExitStack) -> None:
            Tracer().follow(model, modules, take, removals, since=selected)

        attached.register(register, stack)

    def _nothing_selected(self, graph: CallGraph) -> SelectionError:
        places = [place for _, place in graph.nodes() if matches(place.call.name, self.module)]
        names = sorted({plain(place.name).removesuffix("Backward") for place in places})
        families = [
            family for family in FAMILIES if any(fits_node(place.name, family) for place in places)
        ]
        where = "" if self.module == "*" else f" in '{self.module}'"
        compiled = not names or COMPILED in names
        hint = " What is compiled runs as one node: use Outputs there." if compiled else ""
        numbers = {"call": self.call, "occurrence": self.occurrence}
        given = {key: number for key, number in numbers.items() if number is not None}
        asked = ", ".join(f"{key}={number}" for key, number in given.items())
        field = next(iter(given)) if len(given) == 1 else "pattern"
        choices = [*families, *names]
        listed = nearest("" if self.pattern in choices else self.pattern, choices)
        return SelectionError(
            self,
            field,
            f"no node{where} is selected by '{self.pattern}'{f' ({asked})' if asked else ''}"
            f". {listed}{hint}",
        )

    def _hooker(
        self, node: Node, place: NodePlace, attached: Attached, outside: bool
    ) -> Callable[[Node], object] | None:
        """Return a function that hooks nodes like this one at this place; None if not selected."""
        call = place.call
        where = self.mechanism, call.name, call.module, call.number, place.name, place.occurrence
        full = Place(*where, whole=True)
        if outside and attached.selects(replace(full, call=None)) is None:
            raise unnumbered(call.name)
        if not attached.selects(full):
            return None
        site = place.id
        if self.side == "enter":
            prehook = _prehook(site, attached, len(node._input_metadata) == 1)
            return lambda node: node.register_prehook(prehook)
        posthooks: dict[tuple[bool, ...], Callable[..., object]] = {}

        def register(node: Node) -> None:
            live = tuple([source is not None for source, _ in node.next_functions])
            if live not in posthooks:
                posthooks[live] = self._posthook(site, attached, live)
            node.register_hook(posthooks[live])

        return register

    def _posthook(
        self, site: str, attached: Attached, live: Sequence[bool]
    ) -> Callable[..., object]:
        edges = [index for index, takes_gradient in enumerate(live) if takes_gradient]
        if self.edge not in (None, *edges):
            raise SelectionError(
                self,
                "edge",
                f"{site} has no edge {self.edge} that takes a gradient. "
                f"There are: {', '.join(map(str, edges))}.",
            )
        selected = edges if self.edge is None else [self.edge]
        return posthook([(index, attached.hook_at(f"{site}.{index}")) for index in selected])


def posthook(hooks: Sequence[tuple[int, SiteHook]]) -> Callable[..., object]:
    """Return a node posthook that applies one hook at each of some edges."""

    def hook(
        grads: Sequence[Tensor | None], entering: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        changed: list[Tensor | None] | None = None
        for index, edge_hook in hooks:
            result = edge_hook(grads[index], None, entering)
            if result is not None:
                changed = changed or list(grads)
                changed[index] = result
        return None if changed is None else tuple(changed)

    return hook


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

        def hook_single(grads: Sequence[Tensor | None]) -> tuple[Tensor] | None:
            result = site_hook(grads[0])
            return None if result is None else (result,)

        return hook_single
    hooks: dict[int, GradFn] = {}

    def hook(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        changed: list[Tensor | None] | None = None
        for index, grad in enumerate(grads):
            if grad is not None:
                output_hook = hooks.get(index)
                if output_hook is None:
                    output_hook = hooks[index] = attached.hook_at(f"{site}.{index}")
                result = output_hook(grad)
                if result is not None:
                    changed = changed or list(grads)
                    changed[index] = result
        return None if changed is None else tuple(changed)

    return hook
