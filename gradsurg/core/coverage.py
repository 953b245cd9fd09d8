"""Coverage: check that the selected sites exist, and warn of those that never fired."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from weakref import ref

import torch
from torch import Tensor, nn

from gradsurg.core.firing import Firing
from gradsurg.plugins.fields import SelectionError, only_changed_field
from gradsurg.sites.base import Place, PlaceTest, Selector
from gradsurg.sites.combined import CombinedTest
from gradsurg.sites.graph_tracer import after_backward, may_meet_more_sites
from gradsurg.sites.selection import names_of, owned_params
from gradsurg.torch_internals import autograd, compiling
from gradsurg.triggers.base import Clock, Trigger
from gradsurg.triggers.epochs import Epochs

Thing = nn.Module | Tensor


@dataclass(frozen=True, eq=False)
class Known:
    """The modules and parameters of a model at some moment, without holding them.

    `frozen` are the names of the parameters that required no gradient.
    """

    things: Mapping[int, "ref[Thing]"]
    frozen: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> "Known":
        things: list[Thing] = [*model.modules(), *model.parameters()]
        frozen = (name for name, param in model.named_parameters() if not param.requires_grad)
        return cls({id(thing): ref(thing) for thing in things}, frozenset(frozen))

    def __contains__(self, thing: object) -> bool:
        known = self.things.get(id(thing))
        return known is not None and known() is thing


class Coverage:
    """Evaluate a selector for one attachment, and check the number of sites it selects.

    Raises LookupError if there is none, or another number than `expect(n)` asks for, as soon as
    that is known: on attach, after the first forward, or after the first backward. `hooked` are the
    sites that have a hook.
    """

    def __init__(self, at: Selector, label: str, firing: Firing, hooked: Collection[str]) -> None:
        self.at = at
        self.known: Known | None = None
        self._test: PlaceTest = at.new_test()
        self._label = label
        self._firing = firing
        self._hooked = hooked
        self._has_selected = False
        self._rejected: dict[str, None] = {}  # names of places that are not selected
        self._is_checked = False
        self._awaits_backward = False

    def selects(self, place: Place) -> bool | None:
        """Evaluate the selector; up to the end of the first forward record rejected places."""
        selected = self._test(place)
        if not self._is_checked:
            if selected:
                self._has_selected = True
            elif place.whole:
                call = "" if place.call is None else f"#{place.call}"
                node = f"/{place.node}[{place.occurrence}]" if place.node else ""
                self._rejected[f"{place.name}{call}{node}"] = None
        return selected

    def check(self, model: nn.Module, stack: ExitStack) -> None:
        """Check the sites hooked so far, or have the first forward check them."""
        at = self.at
        if at.count is None and self._has_selected:
            self._is_checked = True
        elif at.count is not None and all(kind.known_before_forward for kind in at.kinds):
            self._is_checked = True
            self._check_count()
        else:
            self._check_after_forward(model, stack)

    def end_warning(self) -> str:
        """A warning if the number of sites was never checked, else empty."""
        if not self._awaits_backward:
            return ""
        return (
            f"{self.at.count} sites were expected, and no backward has run that would show all of "
            "them"
        )

    def unmatched_warning(self) -> str:
        """A warning of the parts of a combined selector that have selected nothing, else empty."""
        test = self._test
        silent = test.unmatched_parts() if self._hooked and isinstance(test, CombinedTest) else []
        if not silent:
            return ""
        return f"nothing was selected by {', '.join(map(repr, silent))}, a part of it"

    def unhooked(self, thing: Thing, places: Sequence[Place]) -> str:
        """The name of a selected module or parameter that was added, or thawed, and is not hooked.

        `places` are those of its names. Empty if it is hooked or not selected.
        """
        if self._firing.stage == "step":
            return ""  # parameters are looked for at each step
        # A module compiled in place wraps the one that is hooked.
        known = self.known
        if known is None or thing in known or getattr(thing, "_orig_mod", None) in known:
            name = places[0].name
            if known is None or name not in known.frozen or name in self._hooked:
                return ""
            if any(site.startswith(f"{name}/") for site in self._hooked):  # a use of it
                return ""
        for kind in self.at.kinds:
            later = kind.place_if_added(thing)
            first, *others = (replace(place, mechanism=kind.mechanism) for place in places)
            # A parameter is selected by all its names together, a module by each of them.
            tried = [replace(first, aliases=tuple(others))] if first.whole else [first, *others]
            is_selected = any(self.selects(place) is not False for place in tried)
            if is_selected and (later is None or self.selects(later) is False):
                return first.name
        return ""

    def _check_after_forward(self, model: nn.Module, stack: ExitStack) -> None:
        """Check the sites at the end of the first forward that makes a graph."""
        at = self.at
        # Selectors that act outside the model may find sites after its forward.
        is_inside = all(kind.place_if_added(model) is None for kind in at.kinds)

        @compiling.untraced
        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            if self._is_checked or not torch.is_grad_enabled() or autograd.in_backward():
                return
            handle.remove()
            self._is_checked = True
            if at.count is not None and may_meet_more_sites(output, at):
                self._awaits_backward = True
                after_backward(output, self._check_count)
            elif at.count is not None:
                self._check_count()
            elif is_inside and self._rejected and not self._has_selected:
                text = (
                    f"nothing in the first forward is selected by {at!r}. There were: "
                    f"{', '.join(self._rejected)}"
                )
                raise SelectionError(at, only_changed_field(at), text, self._label)

        handle = model.register_forward_hook(hook)
        stack.callback(handle.remove)

    def _check_count(self) -> None:
        if not self._firing.is_on:
            return
        self._awaits_backward = False
        expected, count = self.at.count, len(self._hooked)
        if count != expected:
            sites = ", ".join(self._hooked) or "none"
            text = f"{expected} sites were expected, found {count}: {sites}"
            raise SelectionError(self.at, "count", text, self._label)


def clock_warnings(
    triggers: Iterable[Trigger], clock: Clock, start: tuple[int, int]
) -> Iterator[str]:
    """Warnings about triggers whose clock (step or epoch) has not advanced since `start`."""
    parts = [part for trigger in triggers for part in trigger.parts]
    epochs = [part for part in parts if isinstance(part, Epochs)]
    has_length = clock.epoch_length is not None
    timed = {type(part).__name__ for part in parts if part.step_based}
    timed |= {type(part).__name__ for part in epochs if has_length or part.length is not None}
    if timed and clock.step == start[0]:
        since = f" since this block began, at step {start[0]}" if start[0] else ""
        yield (
            f"{', '.join(sorted(timed))}: no optimizer step was counted{since}; "
            "attach(model, optimizer), live.bind(optimizer) or call live.tick() after each step"
        )
    has_moved = has_length or clock.counted_epochs > start[1]
    if any(part.length is None for part in epochs) and not has_moved:
        yield (
            "Epochs: no epoch was counted; give Epochs a length, attach with steps_per_epoch, "
            "or call live.next_epoch()"
        )


def unhooked_warnings(coverages: Sequence[Coverage], model: nn.Module) -> Iterator[str]:
    """Warnings of selected modules and parameters that came into the model after the attach."""
    modules: dict[Thing, list[Place]] = {
        module: [Place((), name, module) for name in names]
        for module, names in names_of(model).items()
    }
    trained: dict[Thing, list[Place]] = {
        param: [Place((), name, param, owner=owner, whole=True) for name, owner in named]
        for param, named in owned_params(model).items()
        if param.requires_grad
    }
    part = " or taken for a part of the module around it"  # as Nodes take the nodes it makes
    late = ", as after fully_shard" if any(map(autograd.is_sharded, trained)) else ""
    changed = ("modules were replaced or added", "parameters were replaced, added or unfrozen")
    for change, places, also in zip(changed, (modules, trained), (part, late), strict=True):
        names: dict[str, None] = {}
        for known in {coverage.known for coverage in coverages if coverage.known is not None}:
            own = [coverage for coverage in coverages if coverage.known is known]
            new = [
                (thing, named)
                for thing, named in places.items()
                if thing not in known or named[0].name in known.frozen
            ]
            found = (coverage.unhooked(*each) for coverage in own for each in new)
            names |= dict.fromkeys(filter(None, found))
        if names:
            yield (
                f"{change} while the block was open, and the new ones are not hooked{also}: "
                f"{', '.join(names)}; attach after the change, or remove the intervention and add "
                "it again"
            )
