"""The door of an attached surgery: how the kinds of site get the hook of each place."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

from torch import Tensor, distributed, nn

from gradsurg.core.list_hook import ListHook
from gradsurg.core.operation import Operation
from gradsurg.core.pitfalls import refusal
from gradsurg.core.site_hook import Joint, SiteHook
from gradsurg.core.traced import TracedHook, why_it_breaks
from gradsurg.plugins.reductions import of_shards
from gradsurg.sites.calls import Leaves, Shared
from gradsurg.sites.places import NO_GRADIENT, Kind, Named, Place, SiteFn, Stage, Things
from gradsurg.sites.selectors import near_in
from gradsurg.torch_internals import module_hooks

if TYPE_CHECKING:
    from gradsurg.core.attachment import Attachment


class AttachmentDoor:
    """The `Door` of an attachment: a `Kind` asks it which hook acts at a place.

    - place: a spot where a gradient passes (`Place`); its site is the string that names it, and
      its thing the module or parameter
    - near: a name of a module or parameter at which a selector may pick places
    - picked: a place at which an operation acts
    - met: a place for which an operation has a `SiteHook`, or a reason why no gradient comes
    - placed: a site whose hook `meet` has returned to the kind, which registers it

    PyTorch gets one hook at a place, a `Joint`, which calls the `SiteHook` of each intervention in
    order. PyTorch's hooks hold this object, and it holds the attachment.
    """

    def __init__(self, attachment: "Attachment") -> None:
        self._attachment = attachment
        self._ledger, self.steps = attachment.ledger, attachment.steps
        self.leaves = Leaves()  # hooks on leaf tensors, which stay when a graph is freed
        self.shared = Shared(attachment.model)  # the numbers of the calls of modules
        self.kept: dict[object, Any] = {}  # Any: see `Door.kept`
        self._stacks: dict[Kind, ExitStack] = {}  # these remove the hooks of each kind
        # The entry of `_stacks` for the kind whose `watch` runs; it is used in `watch` alone.
        self.stack = ExitStack()
        # The caches of `meet` and `picking_at`, emptied when interventions or optimizers change.
        self._joints: dict[Place, Joint] = {}
        self._picking: dict[Place, list[Operation]] = {}
        # Without it, two threads could each make a `SiteHook` for one site. Two `Joint`s, or calls
        # of `fits`, do no harm, so the caches are not read a second time inside the lock.
        self._lock = RLock()

    # For the attachment.

    def watch(self, things: Things) -> None:
        """Replace the hooks of these kinds, with all things at which they may have places."""
        self._joints.clear()
        self._picking.clear()
        operations = self._attachment.operations
        near = frozenset[tuple[Kind, str]]().union(*(each.near for each in operations))
        for kind, listed in things.items():
            self._stacks.pop(kind, ExitStack()).close()
            if found := near_in(listed, kind, near):
                self.stack = self._stacks[kind] = ExitStack()
                kind.watch(self, found, self.shared)

    def close(self) -> None:
        """Remove all hooks, also if removing one fails."""
        with ExitStack() as stack:
            for each in (*self._stacks.values(), self.leaves, self.shared):
                stack.callback(each.close)
        for table in (self._stacks, self._joints, self._picking, self.kept):
            table.clear()

    # For kinds of site.

    @property
    def model(self) -> nn.Module:
        """The model whose places are hooked."""
        return self._attachment.model

    def picking_at(self, place: Place) -> list[Operation]:
        """Return the interventions that pick a place: see `Door.picking_at`."""
        picking = self._picking.get(place)
        if picking is None:
            with self._lock:
                picking = []
                for operation in self._attachment.operations:
                    if place.kind not in operation.kinds:
                        continue
                    if operation.at.fits(place, operation.memory):
                        operation.memory.has_picked = True
                        picking.append(operation)
                    else:
                        operation.memory.rejected[place] = None
                self._picking[place] = picking
        return picking  # empty for a place that no intervention picks

    def meet(
        self,
        place: Place,
        value: Tensor | None = None,
        own: bool = False,
        acted: Sequence[SiteFn] = (),
    ) -> Joint | None:
        """Return the hook of a place, None if no intervention acts there: see `Door.meet`."""
        joint = self._joints.get(place)
        if joint is None:
            if not (picking := self.picking_at(place)):
                return None
            with self._lock:
                joint = self._joints[place] = Joint([each.hook_at(place) for each in picking])
        if value is not None and not value.requires_grad:
            self.note_no_gradient(place, NO_GRADIENT)
            return None  # the joint stays cached: the next call may have a gradient
        # The functions that act on this very tensor already, perhaps under the site id of another
        # place: PyTorch has those of a tensor's own hooks, a kind knows others.
        table = module_hooks.hooks_of(value) if own and value is not None else {}
        if functions := table.values() or acted:
            joint = self._without(functions, joint)
        return None if joint is None else joint.mark_placed()

    def meet_shared(self, places: Sequence[Place]) -> Joint | None:
        """Return the hook of one gradient at several places: see `Door.meet_shared`."""
        first: dict[Operation, SiteHook] = {}
        for place in places:
            for operation in self.picking_at(place):
                hook = operation.hook_at(place)
                acting = first.setdefault(operation, hook)  # at the first place that it picks
                if acting is not hook:
                    self._ledger.enter(operation.label, acting.entry.site, [hook.entry.site])
        hooks = [first[each] for each in self._attachment.operations if each in first]
        return Joint(hooks).mark_placed() if hooks else None

    def meet_all(
        self, places: Sequence[Place], skip: Callable[[], None] | None = None
    ) -> list[ListHook]:
        """Return a hook for each intervention at these places: see `Door.meet_all`."""
        own: dict[Operation, list[Place]] = {each: [] for each in self._attachment.operations}
        for place in places:
            self.meet(place)  # marks the hooks as placed
            for operation in self.picking_at(place):
                own[operation].append(place)
        return [ListHook(each, of_it, skip) for each, of_it in own.items() if of_it]

    def traced(self, kind: Kind, found: Sequence[Named]) -> dict[nn.Module, TracedHook]:
        """Return the hooks that compiled code may hold, by module: see `Door.traced`."""
        attachment = self._attachment
        operations, hooks = self._at(kind), dict[nn.Module, TracedHook]()
        # Compiled code neither measures nor counts, and the passes of aggregators pause hooks.
        if attachment.effects.every or attachment.shadow or attachment.aggregators:
            return hooks
        # An nn.Sequential returns the tensor of its last child: one place, where one hook must act.
        # Eager code sees that in PyTorch's table of a tensor's hooks, which Dynamo cannot trace: so
        # with a container among them no module of the kind is hooked in the graph.
        holds_others = any(next(named.owners[0].children(), None) is not None for named in found)
        if holds_others or any(why_it_breaks(each.intervention) for each in operations):
            return hooks
        for named in found:
            names = {(kind, name) for name in named.names}
            acting = [each for each in operations if names & each.near]
            # The calls of a module with several names take them in turn, and compiled code does
            # not number calls: only an intervention that picks all of its names may act there.
            if all(names <= each.near for each in acting):
                place = Place(kind, named.names[:1], ref(named.owners[0]), 0)
                hooks[named.owners[0]] = hook = TracedHook(acting, place)
                self.stack.callback(hook.close)
        return hooks

    def search_again(self, kind: Kind) -> Sequence[Named]:
        """Return the things of a kind as the model is now: see `Door.search_again`."""
        # A selector may combine several kinds, and its search needs the things of all of them.
        kinds = dict.fromkeys(each for operation in self._at(kind) for each in operation.kinds)
        things = {each: each.things(self.model) for each in kinds}
        near = set[tuple[Kind, str]]()
        for operation in self._at(kind):
            operation.near = operation.at.search(things, operation.memory)
            near |= operation.near
        for table in (self._joints, self._picking):
            for place in [place for place in table if place.kind == kind]:
                del table[place]
        return near_in(things[kind], kind, near)

    def note_no_gradient(self, place: Place, why: str) -> None:
        """Note why no gradient will pass at a place: see `Door.note_no_gradient`."""
        for operation in self.picking_at(place):
            operation.met.add((place.kind, place.names[0]))
            self._ledger.enter(operation.label, place.site, place.names[1:], skipped=why)

    def note(self, kind: Kind, text: str) -> None:
        """Record a warning about the interventions at a kind: see `Door.note`."""
        for operation in self._at(kind):
            operation.note(text)

    def at_end(self, kind: Kind, check: Callable[[], str]) -> None:
        """Have `check` called when the surgery ends: see `Door.at_end`."""
        for operation in self._at(kind):
            operation.end_checks.append(check)
            # A kind that watches anew adds its check again.
            self.stack.callback(operation.end_checks.remove, check)

    @contextmanager
    def on_shards(
        self, group: "distributed.ProcessGroup", sizes: Mapping[str, int]
    ) -> Iterator[None]:
        """In the block the hooks get parts of gradients: see `Door.on_shards`."""
        with of_shards(group), self._attachment.effects.of_shards(group, sizes):
            yield

    def refuse(self, context: str, kind: Kind, site: str = "", **found: object) -> NoReturn:
        """Raise the error for a kind in a context: see `Door.refuse`."""
        operation = self._at(kind)[0]
        stage: Stage = operation.stage
        leaf = next(leaf for leaf in operation.leaves if leaf.kind_at(stage) == kind)
        raise refusal(leaf, context, site, stage, **found)

    # Helpers.

    def _at(self, kind: Kind) -> list[Operation]:
        """The interventions at a kind of site."""
        return [each for each in self._attachment.operations if kind in each.kinds]

    def _without(self, functions: Iterable[Callable[..., object]], joint: Joint) -> Joint | None:
        """The hooks that do not act on a tensor yet; None if all do.

        `functions` are those that act on this tensor. The ledger gets the site ids of hooks that
        are left out as other names of one place. If the tensor was changed in place, PyTorch has
        dropped its hooks, and none is left out.
        """
        # Ours have `hooks`, set by `in_order`, inside the `partial` of `sites.tensors.with_value`.
        plain = (getattr(function, "func", function) for function in functions)
        acting = {hook.operation: hook for own in plain for hook in getattr(own, "hooks", ())}
        for hook in joint.hooks:
            first = acting.get(hook.operation, hook)
            if first is not hook:
                entry, alias = first.entry, hook.entry.site
                # `enter` sets `skipped` anew, so it is handed on.
                self._ledger.enter(entry.intervention, entry.site, [alias], entry.skipped)
        left = [hook for hook in joint.hooks if hook.operation not in acting]
        return joint if len(left) == len(joint.hooks) else Joint(left) if left else None
