"""Uses: the gradient of each use of a tensor, before autograd sums them."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from gradsurg.plugins.fields import SelectionError, validated
from gradsurg.sites.graph_tracer import CallGraph, Edge, Tracer, around, check_called
from gradsurg.sites.nodes import posthook
from gradsurg.sites.places import (
    NO_GRADIENT,
    Attached,
    Place,
    PlaceTest,
    Selector,
    SiteFn,
    Stage,
)
from gradsurg.sites.selection import (
    ROOT,
    Pattern,
    candidates,
    matches,
    names_of,
    nothing_matched,
    owned_params,
    params_of,
)
from gradsurg.torch_internals import autograd

CONSTANT = "a constant to torch.func, which was not given it"
NO_USE = "no use of it inside the model's call"


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
        trained = [place.name for param, place in params.items() if param.requires_grad]
        if not trained:
            check_called(self, model, modules)
        if modules or trained:
            return [*(names[0] for names in modules.values()), *trained]
        if params:
            frozen = ", ".join(place.name for place in params.values())
            text = f"all that '{self.pattern}' matches is frozen: {frozen}"
            raise SelectionError(self, "pattern", text)
        choices = [name for names in names_of(model).values() for name in names if name != ROOT]
        raise nothing_matched(self, "pattern", self.pattern, [*choices, *params_of(model)])

    def hook(self, attached: Attached) -> None:
        model = attached.model
        modules, params = self._candidates(model, attached.selects)
        for names in modules.values():
            attached.expect(names[0])
        for param, place in params.items():
            attached.expect(place.name, skipped="" if param.requires_grad else "frozen")
        owners = {alias.owner for place in params.values() for alias in (place, *place.aliases)}
        chosen = {*modules, *(owner for owner in owners if owner is not None)}
        take = _UseHooker(self, modules, params, attached).take
        followed = around(names_of(model), chosen, inside=False)
        Tracer().follow(model, followed, take, attached.stack, outputs=set(modules))

    def _candidates(
        self, model: nn.Module, test: PlaceTest
    ) -> tuple[dict[nn.Module, list[str]], dict[nn.Parameter, Place]]:
        """Return the modules with their names and the parameters that may be selected."""
        params: dict[nn.Parameter, Place] = {}
        for param, named in owned_params(model).items():
            first, *others = (Place(self.mechanism, name, param, owner=of) for name, of in named)
            place = replace(first, aliases=tuple(others))
            if test(place) is not False:
                params[param] = place
        return candidates(names_of(model), self.mechanism, test), params


class _UsedTensor(NamedTuple):
    """The output of a module call or a parameter, whose uses are looked for."""

    site: str
    place: Place


class _UseHooker:
    """Hooks the uses in the graph of each outermost module call."""

    def __init__(
        self,
        selector: Uses,
        modules: Mapping[nn.Module, Sequence[str]],
        params: Mapping[nn.Parameter, Place],
        attached: Attached,
    ) -> None:
        self.selector, self.modules, self.params = selector, modules, params
        self.attached = attached
        # By the names of the tensor and the number of the use; None if not selected.
        self.hooks: dict[tuple[object, ...], SiteFn | None] = {}
        self.resolved: set[str] = set()  # tensors whose placeholder has left the ledger

    def take(self, graph: CallGraph) -> None:
        if graph.empty:
            return
        tensors = self._tensors(graph)
        counts: Counter[Edge] = Counter()
        hooks: defaultdict[Node, list[tuple[int, SiteFn]]] = defaultdict(list)
        for edge, node, index in graph.uses(tensors):
            hook = self._hook_for(tensors[edge], counts[edge])
            counts[edge] += 1
            if hook is not None:
                hooks[node].append((index, hook))
        for node, pairs in hooks.items():
            node.register_hook(posthook(pairs))
        uses = [(used, counts[edge]) for edge, owners in tensors.items() for used in owners]
        if not any(self.hooks.values()) and graph.whole and not graph.hides_nodes():
            raise self._nothing_selected({used.site: count for used, count in uses})
        for used, count in uses:
            if count or graph.whole:
                self._resolve(used, "" if count else NO_USE)

    def _tensors(self, graph: CallGraph) -> dict[Edge, list[_UsedTensor]]:
        """Return the tensors whose uses are looked for, each edge with all its names."""
        tensors: defaultdict[Edge, list[_UsedTensor]] = defaultdict(list)
        mechanism = self.selector.mechanism
        for call, path, edge in graph.returned:
            place = Place(mechanism, call.name, call.module, call.number)
            used = _UsedTensor(call.id + path, place)
            if edge[0] is not None:
                tensors[edge].append(used)
            elif graph.whole:
                self._resolve(used, NO_GRADIENT)
        for param, place in self.params.items():
            # A functional_call may have replaced the parameter.
            current = getattr(place.owner, place.name.rpartition(".")[2], param)
            used = _UsedTensor(place.name, place)
            if not isinstance(current, Tensor) or not current.requires_grad:
                continue
            if autograd.in_functorch() and not autograd.is_wrapped(current):
                self._resolve(used, CONSTANT)
            else:
                tensors[get_gradient_edge(current)[:2]].append(used)
        return tensors

    def _hook_for(self, owners: Sequence[_UsedTensor], number: int) -> SiteFn | None:
        """Return the hook of a use, whose site is the first selected owner; others are aliases."""
        key = *(used.site for used in owners), number
        if key not in self.hooks:
            names = [
                f"{name}/use[{number}]"
                for site, place in owners
                if self.attached.selects(replace(place, occurrence=number, whole=True))
                for name in (site, *(alias.name for alias in place.aliases))
            ]
            if names:
                self.attached.expect(names[0], names[1:])
            self.hooks[key] = self.attached.hook_at(names[0]) if names else None
        return self.hooks[key]

    def _resolve(self, used: _UsedTensor, reason: str) -> None:
        """Replace the site expected before the call in the ledger by its uses, or the reason why
        there are none.
        """
        site, place = used
        if site not in self.resolved:
            self.resolved.add(site)
            thing = place.thing
            self.attached.forget(self.modules[thing][0] if isinstance(thing, nn.Module) else site)
            if reason:
                self.attached.expect(f"{site}/use[{self.selector.use or 0}]", skipped=reason)

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
