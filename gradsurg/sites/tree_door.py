"""A door that writes down which sites are asked for, for `tree`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor, nn

from gradsurg.core.pitfalls import refusal
from gradsurg.sites.calls import Leaves, Shared
from gradsurg.sites.places import (
    NO_GRADIENT,
    Ask,
    Kind,
    Memory,
    Named,
    Place,
    PlacesHook,
    Selector,
    SiteFn,
    Stage,
    Traced,
    things_of,
)
from gradsurg.sites.selectors import near_in
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.sites.tree_table import SiteLine, TensorSpec
from gradsurg.torch_internals import module_hooks

NOT_REACHED = "not met"


class Notebook:
    """A door whose hooks change nothing, for one selector; without one it gives no hooks.

    `lines` are the sites met, `nodes` the picked autograd nodes, with whether gradients that enter
    them are asked for.
    """

    def __init__(
        self, model: nn.Module, at: Selector | None = None, stage: Stage | None = None
    ) -> None:
        self.model, self.at, self.memory = model, at, Memory(stage)
        self.stack, self.leaves, self.steps = ExitStack(), Leaves(), OptimizerSteps()
        self.shared = Shared(model)
        self.kept: dict[object, Any] = {}  # Any: see `Door.kept`
        self.lines: dict[str, SiteLine] = {}
        self.nodes: dict[str, bool] = {}
        self._wanted: dict[Place, bool] = {}
        self._met: set[tuple[Kind, str]] = set()  # names at which there were places
        self._sites: dict[object, str] = {}  # by the function that PyTorch calls

    def close(self) -> None:
        """Remove all hooks."""
        for each in (self.stack, self.leaves, self.shared, self.steps):
            each.close()

    def watch(self) -> None:
        """Have the kinds of site register their hooks.

        Raises LookupError, listing the choices, if the selector picks no names.
        """
        assert self.at is not None
        things = things_of(self.model, self.at.leaves, self.memory.stage)
        near = self.at.search(things, self.memory)
        self.at.check(things, self.memory)
        for kind, found in things.items():
            if picked := near_in(found, kind, near):
                kind.watch(self, picked, self.shared)

    def not_met(self) -> Iterator[SiteLine]:
        """Yield the sites that were expected at modules and parameters where no place was."""
        assert self.at is not None
        for site, why in self.at.unmet(self.model, self.memory, self._met):
            yield SiteLine(site, left_out=why or NOT_REACHED)

    def write(self, site: str) -> None:
        """Write down that a site would be hooked."""
        if site not in self.lines or not self.lines[site].selected:
            self.lines[site] = SiteLine(site)

    # The door.

    def picking_at(self, place: Place) -> Sequence[object]:
        if place not in self._wanted:
            memory = self.memory
            picked = self._wanted[place] = self.at is not None and self.at.fits(place, memory)
            memory.has_picked = memory.has_picked or picked
            if not picked:
                memory.rejected[place] = None
            elif place.node and not place.item:
                self.nodes[place.site] = (place.kind.name, place.kind.mode) == ("Nodes", "enter")
        return (self.at,) if self._wanted[place] else ()

    def search_again(self, kind: Kind) -> Sequence[Named]:
        return ()

    def meet(
        self,
        place: Place,
        value: Tensor | None = None,
        own: bool = False,
        acted: Sequence[SiteFn] = (),
    ) -> "_Hook | None":
        if not self.picking_at(place):
            return None
        if value is not None and not value.requires_grad:
            self.note_no_gradient(place, NO_GRADIENT)
            return None
        table = module_hooks.hooks_of(value) if own and value is not None else {}
        acting = (self._sites.get(getattr(f, "func", f)) for f in table.values() or acted)
        first = next(filter(None, acting), place.site)
        hook = self._hook(first, [place])
        return hook if first == place.site else None

    def meet_shared(self, places: Sequence[Place]) -> "_Hook | None":
        wanted = [place for place in places if self.picking_at(place)]
        return self._hook(wanted[0].site, wanted) if wanted else None

    def traced(self, kind: Kind, found: Sequence[Named]) -> dict[nn.Module, Traced]:
        return {}  # the forward of a copy runs, which is not compiled

    def meet_all(
        self, places: Sequence[Place], skip: Callable[[], None] | None = None
    ) -> Sequence[PlacesHook]:
        for place in places:
            self.meet(place)
        return ()  # so that nothing is hooked

    def note_no_gradient(self, place: Place, why: str) -> None:
        if self.picking_at(place):
            self._met.add((place.kind, place.name))
            self.lines.setdefault(place.site, SiteLine(place.site, left_out=why))

    def note(self, kind: Kind, text: str) -> None:
        """Ignore a warning for the end of a block."""

    def at_end(self, kind: Kind, check: Callable[[], str]) -> None:
        """Ignore a check for the end of a block."""

    def on_shards(self, group: object, sizes: Mapping[str, int]) -> AbstractContextManager[object]:
        return nullcontext()

    def refuse(self, context: str, kind: Kind, site: str = "", **found: object) -> NoReturn:
        assert self.at is not None
        stage = self.memory.stage
        leaf = next(leaf for leaf in self.at.leaves if leaf.kind_at(stage) == kind)
        raise refusal(leaf, context, site, stage or "", **found)

    def _hook(self, site: str, places: Sequence[Place]) -> "_Hook":
        """Write down a site, which has the names of these places too."""
        self.write(site)
        for place in places:
            self._met.add((place.kind, place.name))
            for name in (replace(place, names=(name,)).site for name in place.names):
                if name != site:
                    self.lines[name] = SiteLine(name, same_as=site)
        hook = _Hook(lambda tensor: self.lines.update({site: SiteLine(site, tensor)}))
        self._sites[hook.call] = site
        return hook


@dataclass(eq=False)
class _Hook:
    """A hook that changes nothing; `see` gets the tensors that it is called with."""

    see: Callable[[TensorSpec | None], None]
    asks: frozenset[Ask] = frozenset()
    stateful: str = ""
    varies: str = ""
    unsteady: str = ""
    moment: object = None

    def call(
        self,
        grad: Tensor | None,
        value: Tensor | None = None,
        entering: tuple[Tensor | None, ...] = (),
        layer: object = None,
    ) -> None:
        if grad is not None:  # an activation, as there is no backward pass
            self.see(TensorSpec.of(grad))

    def keeping_states(self) -> AbstractContextManager[object]:
        return nullcontext()

    def count_bytes(self, number: int) -> None:
        """Ignore bytes that were sent."""
