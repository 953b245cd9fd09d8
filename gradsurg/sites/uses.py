"""Uses: the gradient of each use of a tensor, before autograd sums them."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from gradsurg.plugins.fields import SelectionError, validated
from gradsurg.sites.base import (
    NO_GRADIENT,
    Attached,
    Place,
    PlaceTest,
    Selector,
    SiteHook,
    Stage,
)
from gradsurg.sites.graph_tracer import CallGraph, Edge, Tracer, around
from gradsurg.sites.nodes import posthook
from gradsurg.sites.selection import ROOT, Pattern, matches, names_of, nothing_matched, params_of
from gradsurg.torch_internals import autograd

CONSTANT = "a constant to torch.func, which was not given it"
NO_USE = "no use of it inside the model's call"


class UsedTensor(NamedTuple):
    """A tensor that may be used: the output of a module call, or a parameter."""

    site: str
    place: Place
    aliases: tuple[str, ...] = ()


@validated
class Uses(Selector):
    """Each use of the module outputs and of the parameters whose name fits `pattern`.

    A tensor hook gets the sum over all uses of a tensor. Here each operation that takes the tensor
    is a site of its own, hooked by a node posthook. `use` picks the n-th use, in the order in which
    the operations ran; an operation that takes a tensor twice counts twice. Site ids are
    `encoder.0#0/use[1]` (with the path of the tensor before the slash if a module returns several)
    and `embed.weight/use[0]`. The model itself is `root`, which a pattern must spell out.

    Only uses inside the outermost module call on which an output depends are found: not one in the
    loss. A view of the tensor is one use, as is the cast of a weight under autocast; an operation
    that changes the tensor in place is its last use. Modules that return the same tensor share its
    uses. In a reentrant checkpoint uses are hooked in the backward pass, and those of a parameter
    are counted from 0 in each recomputation; uses of the tensors that it returns are not found. A
    tensor that replaces a parameter in a `functional_call` has the name of the parameter. Raises
    LookupError after the first forward if no use is selected.
    """

    pattern: Pattern
    use: Annotated[int, Field(ge=0)] | None = None
    stage: Stage | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("use",)
    compile_limit: ClassVar[str] = "what is compiled is one use"

    def selects(self, place: Place) -> bool | None:
        names = [alias.name for alias in (place, *place.aliases)]
        if place.mechanism != self.mechanism or not any(
            matches(name, self.pattern) and (name != ROOT or self.pattern == ROOT) for name in names
        ):
            return False
        if self.use is None:
            return True
        return None if place.occurrence is None else place.occurrence == self.use

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        modules, params = self._candidates(model, test or self.selects)
        if not modules and not params:
            choices = [name for names in names_of(model).values() for name in names if name != ROOT]
            choices += params_of(model)
            raise nothing_matched(self, "pattern", self.pattern, choices)
        if not modules and not any(param.requires_grad for param in params):
            frozen = ", ".join(used.site for used in params.values())
            raise SelectionError(
                self, "pattern", f"all that '{self.pattern}' matches is frozen: {frozen}"
            )
        trained = [used.site for param, used in params.items() if param.requires_grad]
        return [*(names[0] for names in modules.values()), *trained]

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        modules, params = self._candidates(model, attached.selects)
        for names in modules.values():
            attached.expect(names[0])
        for param, used in params.items():
            attached.expect(used.site, skipped="" if param.requires_grad else "frozen")
        owners = {
            place.owner for used in params.values() for place in (used.place, *used.place.aliases)
        }
        chosen = {*modules, *(owner for owner in owners if owner is not None)}
        hook_uses = _UseHooker(self, modules, params, attached)
        followed = around(names_of(model), chosen, inside=False)
        Tracer().follow(model, followed, hook_uses, stack, outputs=set(modules))

    def _candidates(
        self, model: nn.Module, test: PlaceTest
    ) -> tuple[dict[nn.Module, list[str]], dict[nn.Parameter, UsedTensor]]:
        """Return the modules and the parameters that may be selected, with their names."""
        modules: dict[nn.Module, list[str]] = {}
        places: dict[nn.Parameter, list[Place]] = {}
        for module, names in names_of(model).items():
            selected = [n for n in names if test(Place(self.mechanism, n, module)) is not False]
            if selected:
                modules[module] = selected
            for prefix in names:
                for short, param in module.named_parameters(recurse=False, remove_duplicate=False):
                    name = short if prefix == ROOT else f"{prefix}.{short}"
                    place = Place(self.mechanism, name, param, owner=module)
                    places.setdefault(param, []).append(place)
        params: dict[nn.Parameter, UsedTensor] = {}
        for param, (first, *others) in places.items():
            place = replace(first, aliases=tuple(others))
            if test(place) is not False:
                params[param] = UsedTensor(place.name, place, tuple(other.name for other in others))
        return modules, params


class _UseHooker:
    """Hooks the uses in the graph of each outermost module call."""

    def __init__(
        self,
        selector: Uses,
        modules: dict[nn.Module, list[str]],
        params: dict[nn.Parameter, UsedTensor],
        attached: Attached,
    ) -> None:
        self.selector = selector
        self.modules = modules
        self.params = params
        self.attached = attached
        self.decisions: dict[tuple[str, int], bool] = {}
        self.hooked: set[str] = set()
        self.resolved: set[str] = set()  # tensors whose placeholder has left the ledger

    def __call__(self, graph: CallGraph) -> None:
        if graph.empty:
            return
        tensors = self._tensors(graph)
        counts: Counter[Edge] = Counter()
        hooks: defaultdict[Node, list[tuple[int, SiteHook]]] = defaultdict(list)
        for edge, node, index in graph.uses(tensors):
            hook = self._hook_for(tensors[edge], counts[edge])
            counts[edge] += 1
            if hook is not None:
                hooks[node].append((index, hook))
        for node, pairs in hooks.items():
            node.register_hook(posthook(pairs))
        uses = {used.site: counts[edge] for edge, owners in tensors.items() for used in owners}
        if not hooks and not self.hooked and graph.whole and not graph.hides_nodes():
            raise self._nothing_selected(uses)
        for used in (used for owners in tensors.values() for used in owners):
            if used.site in self.resolved:
                continue
            if uses[used.site]:
                self._resolve(used)
            elif graph.whole:
                self._skip(used, NO_USE)

    def _tensors(self, graph: CallGraph) -> dict[Edge, list[UsedTensor]]:
        """Return the tensors whose uses are looked for, each edge with all its names."""
        tensors: dict[Edge, list[UsedTensor]] = {}
        mechanism = self.selector.mechanism
        for call, path, edge in graph.returned:
            used = UsedTensor(call.id + path, Place(mechanism, call.name, call.module, call.number))
            if edge[0] is not None:
                tensors.setdefault(edge, []).append(used)
            elif graph.whole:
                self._skip(used, NO_GRADIENT)
        for param, used in self.params.items():
            current = _current(param, used.place)
            if not current.requires_grad:
                continue
            if autograd.in_functorch() and not autograd.is_wrapped(current):
                self._skip(used, CONSTANT)
            else:
                tensors.setdefault(get_gradient_edge(current)[:2], []).append(used)
        return tensors

    def _hook_for(self, owners: list[UsedTensor], number: int) -> SiteHook | None:
        """Return the hook of a use, whose site is the first selected owner; others are aliases."""
        selected = [used for used in owners if self._selects(used, number)]
        if not selected:
            return None
        names = [name for used in selected for name in (used.site, *used.aliases)]
        first, *others = (f"{name}/use[{number}]" for name in names)
        if first not in self.hooked:
            self.hooked.add(first)
            self.attached.expect(first, others)
        return self.attached.hook_at(first)

    def _selects(self, used: UsedTensor, number: int) -> bool:
        key = used.site, number
        if key not in self.decisions:
            place = replace(used.place, occurrence=number, whole=True)
            self.decisions[key] = bool(self.attached.selects(place))
        return self.decisions[key]

    def _skip(self, used: UsedTensor, reason: str) -> None:
        """Record once why a tensor has no uses."""
        if used.site not in self.resolved:
            self._resolve(used)
            self.attached.expect(f"{used.site}/use[{self.selector.use or 0}]", skipped=reason)

    def _resolve(self, used: UsedTensor) -> None:
        """Remove the site expected before the call from the ledger: its uses take its place."""
        self.resolved.add(used.site)
        thing = used.place.thing
        name = self.modules[thing][0] if isinstance(thing, nn.Module) else used.site
        self.attached.forget(name)

    def _nothing_selected(self, counts: Mapping[str, int]) -> SelectionError:
        uses = ", ".join(f"{site}: {count}" for site, count in counts.items()) or "none"
        given = " What torch.func was not given is a constant there." * autograd.in_functorch()
        return SelectionError(
            self.selector,
            "pattern" if self.selector.use is None else "use",
            f"no use is selected by '{self.selector.pattern}' (use={self.selector.use}). "
            f"Uses inside the model's call: {uses}. One in the loss is not found."
            f" Nor is one in what is compiled.{given}",
        )


def _current(param: nn.Parameter, place: Place) -> Tensor:
    """Return the tensor in place of the parameter, which `functional_call` may replace."""
    table = {} if place.owner is None else place.owner._parameters
    current = table.get(place.name.rpartition(".")[2])
    return param if current is None else current
