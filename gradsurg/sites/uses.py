"""Uses: the gradient of one use of a tensor, before those of all its uses are summed."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer

from gradsurg.plugins.fields import SelectionError, validated
from gradsurg.sites.base import (
    NO_GRADIENT,
    HookRegistry,
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
from gradsurg.transforms.base import Scope

CONSTANT = "a constant to torch.func, which was not given it"
NO_USE = "no use of it inside the model's call"


class Used(NamedTuple):
    """A tensor that may be used: what a call returned, or a parameter with its other names."""

    site: str
    place: Place
    aliases: tuple[str, ...] = ()


@validated
class Uses(Selector):
    """Each use of the module outputs and of the parameters whose name fits `pattern`.

    A hook on a tensor gets the sum over all its uses, once; here every operation that takes the
    tensor is a site of its own, by a posthook on that node. `use` picks the n-th of them, in the
    order in which they were made; an operation that takes a tensor twice is two. Site ids are
    `encoder.0#0/use[1]`, with the path of the tensor before the slash where a module returns
    several, and `embed.weight/use[0]`. The model itself is `root`, which a pattern must spell out.

    Only uses inside the outermost module call are found, and those that an output of it depends on:
    a use in the loss is not. A view of the tensor is one use, whatever is made of the view, as is a
    weight's cast under autocast; what changes the tensor in place is its last. Modules that return
    one and the same tensor share its uses. In a reentrant checkpoint uses are met in the backward,
    where those of a parameter are counted from 0 again in each recomputation; that of what the
    checkpoint returns is not found. What stands for a parameter in a `functional_call` goes by its
    name. Raises LookupError after the first forward if no use is
    selected.
    """

    pattern: Pattern
    use: Annotated[int, Field(ge=0)] | None = None
    stage: Stage | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("use",)
    compile_limit: ClassVar[str] = "what is compiled is one use"

    def selects(self, place: Place) -> bool | None:
        names = [own.name for own in (place, *place.aliases)]
        if place.mechanism != self.mechanism or not any(
            matches(name, self.pattern) and (name != ROOT or self.pattern == ROOT) for name in names
        ):
            return False
        if self.use is None:
            return True
        return None if place.occurrence is None else place.occurrence == self.use

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        modules, params = self._chosen(model, test or self.selects)
        if not modules and not params:
            names = [name for own in names_of(model).values() for name in own if name != ROOT]
            names += params_of(model)
            raise nothing_matched(self, "pattern", self.pattern, names)
        if not modules and not any(param.requires_grad for param in params):
            frozen = ", ".join(used.site for used in params.values())
            raise SelectionError(
                self, "pattern", f"all that '{self.pattern}' matches is frozen: {frozen}"
            )
        trained = [used.site for param, used in params.items() if param.requires_grad]
        return [*(names[0] for names in modules.values()), *trained]

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        modules, params = self._chosen(model, registry.selects)
        for names in modules.values():
            registry.expect(names[0])
        for param, used in params.items():
            registry.expect(used.site, skipped="" if param.requires_grad else "frozen")
        owners = {
            place.owner for used in params.values() for place in (used.place, *used.place.aliases)
        }
        chosen = {*modules, *(owner for owner in owners if owner is not None)}
        take = _Take(self, modules, params, registry)
        followed = around(names_of(model), chosen, inside=False)
        Tracer().follow(model, followed, take, stack, outputs=set(modules))

    def _chosen(
        self, model: nn.Module, test: PlaceTest
    ) -> tuple[dict[nn.Module, list[str]], dict[nn.Parameter, Used]]:
        """The modules and the parameters that may be selected, with their names."""
        modules: dict[nn.Module, list[str]] = {}
        places: dict[nn.Parameter, list[Place]] = {}
        for module, names in names_of(model).items():
            kept = [n for n in names if test(Place(self.mechanism, n, module)) is not False]
            if kept:
                modules[module] = kept
            for prefix in names:
                for own, param in module.named_parameters(recurse=False, remove_duplicate=False):
                    name = own if prefix == ROOT else f"{prefix}.{own}"
                    place = Place(self.mechanism, name, param, owner=module)
                    places.setdefault(param, []).append(place)
        params: dict[nn.Parameter, Used] = {}
        for param, (first, *others) in places.items():
            place = replace(first, aliases=tuple(others))
            if test(place) is not False:
                params[param] = Used(place.name, place, tuple(other.name for other in others))
        return modules, params


class _Take:
    """Hooks the uses in the graph of each outermost call."""

    def __init__(
        self,
        selector: Uses,
        modules: dict[nn.Module, list[str]],
        params: dict[nn.Parameter, Used],
        registry: HookRegistry,
    ) -> None:
        self.selector = selector
        self.modules = modules
        self.params = params
        self.registry = registry
        self.known: dict[tuple[str, int], bool] = {}
        self.met: set[str] = set()
        self.told: set[str] = set()

    def __call__(self, graph: CallGraph) -> None:
        if graph.empty:
            return
        tensors = self._tensors(graph)
        counts: Counter[Edge] = Counter()
        hooks: defaultdict[Node, list[tuple[int, SiteHook]]] = defaultdict(list)
        for edge, node, index in graph.uses(tensors):
            gate = self._gate(tensors[edge], counts[edge])
            counts[edge] += 1
            if gate is not None:
                hooks[node].append((index, gate))
        for node, pairs in hooks.items():
            node.register_hook(posthook(pairs))
        found = {used.site: counts[edge] for edge, owners in tensors.items() for used in owners}
        if not hooks and not self.met and graph.whole and not graph.hides_nodes():
            raise self._nothing(found)
        for used in (used for owners in tensors.values() for used in owners):
            if used.site in self.told:
                continue
            if found[used.site]:
                self._told(used)
            elif graph.whole:
                self._leave_out(used, NO_USE)

    def _tensors(self, graph: CallGraph) -> dict[Edge, list[Used]]:
        """The tensors whose uses are looked for, each by its edge with all that it goes by."""
        tensors: dict[Edge, list[Used]] = {}
        mechanism = self.selector.mechanism
        for call, path, edge in graph.returned:
            used = Used(call.id + path, Place(mechanism, call.name, call.module, call.number))
            if edge[0] is not None:
                tensors.setdefault(edge, []).append(used)
            elif graph.whole:
                self._leave_out(used, NO_GRADIENT)
        for param, used in self.params.items():
            now = _now(param, used.place)
            if not now.requires_grad:
                continue
            if autograd.in_functorch() and not autograd.is_wrapped(now):
                self._leave_out(used, CONSTANT)
            else:
                tensors.setdefault(get_gradient_edge(now)[:2], []).append(used)
        return tensors

    def _gate(self, owners: list[Used], number: int) -> SiteHook | None:
        """The gate of a use: that of the first owner which is selected; the others are aliases."""
        chosen = [used for used in owners if self._keeps(used, number)]
        if not chosen:
            return None
        names = [name for used in chosen for name in (used.site, *used.aliases)]
        first, *others = (f"{name}/use[{number}]" for name in names)
        if first not in self.met:
            self.met.add(first)
            self.registry.expect(first, others)
        return self.registry.hook_for(first)

    def _keeps(self, used: Used, number: int) -> bool:
        key = used.site, number
        if key not in self.known:
            place = replace(used.place, occurrence=number, whole=True)
            self.known[key] = bool(self.registry.selects(place))
        return self.known[key]

    def _leave_out(self, used: Used, why: str) -> None:
        """An expected site has no uses: say why, once."""
        if used.site not in self.told:
            self._told(used)
            self.registry.expect(f"{used.site}/use[{self.selector.use or 0}]", skipped=why)

    def _told(self, used: Used) -> None:
        """The site that was expected before the call is known by its uses now."""
        self.told.add(used.site)
        thing = used.place.thing
        self.registry.forget(self.modules[thing][0] if isinstance(thing, nn.Module) else used.site)

    def _nothing(self, found: Mapping[str, int]) -> SelectionError:
        uses = ", ".join(f"{site}: {count}" for site, count in found.items()) or "none"
        given = " What torch.func was not given is a constant there." * autograd.in_functorch()
        return SelectionError(
            self.selector,
            "pattern" if self.selector.use is None else "use",
            f"no use is selected by '{self.selector.pattern}' (use={self.selector.use}). "
            f"Uses inside the model's call: {uses}. One in the loss is not found."
            f" Nor is one in what is compiled.{given}",
        )


def _now(param: nn.Parameter, place: Place) -> Tensor:
    """What its module takes for the parameter now, as during a `functional_call`."""
    table = {} if place.owner is None else place.owner._parameters
    now = table.get(place.name.rpartition(".")[2])
    return param if now is None else now
