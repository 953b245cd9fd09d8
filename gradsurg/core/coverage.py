"""Coverage: check that the selected sites exist, and warn of those that never fired."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from gradsurg.core.firing import Firing
from gradsurg.plugins.fields import SelectionError, only_changed_field
from gradsurg.sites.base import Place, Selector
from gradsurg.sites.combined import Selection
from gradsurg.sites.graph_tracer import after_backward, may_meet_more_sites
from gradsurg.sites.selection import COMPILED, TRACED, names_of, owned_params, scanned
from gradsurg.torch_internals import autograd, compiling
from gradsurg.triggers.base import Clock, Trigger
from gradsurg.triggers.epochs import Epochs


class Snapshot:
    """The modules and parameters of a model at one moment, held weakly, to notice changes."""

    def __init__(self, model: nn.Module) -> None:
        things: tuple[nn.Module | Tensor, ...] = (*model.modules(), *model.parameters())
        self._known = {id(thing): ref(thing) for thing in things}
        self._frozen = {id(param) for param in model.parameters() if not param.requires_grad}

    def knows(self, thing: object) -> bool:
        """Return whether the module or parameter was there, then perhaps not compiled in place."""
        known = self._known.get(id(thing))
        if known is not None and known() is thing:
            return True
        compiled = vars(thing).get("_modules", {}).get(COMPILED)
        return compiled is not None and self.knows(compiled)

    def changed(self, things: Mapping[Any, list[Place]]) -> dict[Any, list[Place]]:
        """Return the things that are new, and those that were frozen parameters. Any: a key."""
        return {
            thing: places
            for thing, places in things.items()
            if id(thing) in self._frozen or not self.knows(thing)
        }


snapshot_of = scanned(Snapshot)


class Coverage:
    """Evaluate a selector for one attachment, and check the number of sites it selects.

    Raises LookupError if there is none, or another number than `expect(n)` asks for, as soon as
    that is known: on attach, after the first forward, or after the first backward. `hooked` are the
    sites that have a hook.
    """

    def __init__(self, at: Selector, label: str, firing: Firing, hooked: Collection[str]) -> None:
        self._at = at
        self.selects = Selection(at)
        self._label = label
        self._firing = firing
        self._hooked = hooked
        self._awaits_backward = False
        self._was_traced = False
        self.snapshot = Snapshot(nn.Identity())

    def check(self, model: nn.Module, stack: ExitStack) -> None:
        """Check the sites hooked so far, or have the first forward check them.

        The modules and parameters of the model are remembered, to notice new and unfrozen ones on
        detach.
        """
        at, self.snapshot = self._at, snapshot_of(model)
        if at.count is not None and all(kind.known_before_forward for kind in at.kinds):
            self._check_count()
        elif at.count is not None or not self.selects.matched:
            self._check_after_forward(model, stack)

    def close(self) -> None:
        """Forget the modules and parameters of the model."""
        self.snapshot = Snapshot(nn.Identity())

    def end_warning(self) -> str:
        """A warning if the sites were never checked after a forward, for a known reason."""
        if self._was_traced:
            return TRACED
        if not self._awaits_backward:
            return ""
        return (
            f"{self._at.count} sites were expected, and no backward has run that would show all of "
            "them"
        )

    def unmatched_warning(self) -> str:
        """A warning of the parts of a combined selector that have selected nothing, else empty."""
        silent = [*self.selects.unmatched_parts()] if self._hooked else []
        if not silent:
            return ""
        return f"nothing was selected by {', '.join(map(repr, silent))}, a part of it"

    def unhooked(self, things: Mapping[Any, list[Place]]) -> Iterator[str]:
        """Names of the selected ones of the changed modules and parameters that are not hooked.

        Any: a module or a parameter, each with the places of its names.
        """
        if self._firing.stage == "step":
            return  # parameters are looked for at each step
        for thing, places in things.items():
            uses = f"{places[0].name}/"
            if self.snapshot.knows(thing) and any(site.startswith(uses) for site in self._hooked):
                continue
            for kind in self._at.kinds:
                later = kind.place_if_added(thing)
                first, *others = (replace(place, mechanism=kind.mechanism) for place in places)
                # A parameter is selected by all its names together, a module by each of them.
                tried = [replace(first, aliases=tuple(others))] if first.whole else [first, *others]
                is_selected = any(self.selects(place) is not False for place in tried)
                if is_selected and (later is None or self.selects(later) is False):
                    yield first.name

    def _check_after_forward(self, model: nn.Module, stack: ExitStack) -> None:
        """Check the sites at the end of the first forward that makes a graph."""
        at = self._at
        is_done = False
        # Selectors that act outside the model may find sites after its forward.
        is_inside = all(kind.place_if_added(model) is None for kind in at.kinds)

        @compiling.untraced
        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            nonlocal is_done
            if is_done or not torch.is_grad_enabled() or autograd.in_backward():
                return
            self._was_traced = compiling.in_jit_trace()
            if self._was_traced:
                return
            is_done = True
            handle.remove()
            if at.count is not None and may_meet_more_sites(output, at):
                self._awaits_backward = True
                after_backward(output, self._check_count)
            elif at.count is not None:
                self._check_count()
            elif is_inside and self.selects.rejected and not self.selects.matched:
                text = (
                    f"nothing in the first forward is selected by {at!r}. There were: "
                    f"{', '.join(self.selects.rejected)}"
                )
                raise SelectionError(at, only_changed_field(at), text, self._label)

        handle = model.register_forward_hook(hook)
        stack.callback(handle.remove)

    def _check_count(self) -> None:
        if not self._firing.is_on:
            return
        self._awaits_backward = False
        expected, count = self._at.count, len(self._hooked)
        if count != expected:
            sites = ", ".join(self._hooked) or "none"
            text = f"{expected} sites were expected, found {count}: {sites}"
            raise SelectionError(self._at, "count", text, self._label)


def clock_warnings(
    triggers: Iterable[Trigger], clock: Clock, start: tuple[int, int], with_epochs: bool = True
) -> Iterator[str]:
    """Warnings about triggers whose clock (step or epoch) has not advanced since `start`.

    Not those of epochs in the middle of the first one, when `with_epochs` is False.
    """
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
    if with_epochs and any(part.length is None for part in epochs) and not has_moved:
        yield (
            "Epochs: no epoch was counted; give Epochs a length, attach with steps_per_epoch, "
            "or call live.next_epoch()"
        )


def unhooked_warnings(coverages: Sequence[Coverage], model: nn.Module) -> Iterator[str]:
    """Warnings of selected modules and parameters that came into the model after the attach."""
    modules = {
        module: [Place((), name, module) for name in names]
        for module, names in names_of(model).items()
    }
    trained = {
        param: [Place((), name, param, owner=owner, whole=True) for name, owner in named]
        for param, named in owned_params(model).items()
        if param.requires_grad
    }
    part = " or taken for a part of the module around it"  # as Nodes take the nodes it makes
    late = ", as after fully_shard" if any(map(autograd.is_sharded, trained)) else ""
    changed = ("modules were replaced or added", "parameters were replaced, added or unfrozen")
    for change, places, also in zip(changed, (modules, trained), (part, late), strict=True):
        changes = {one: one.changed(places) for one in {each.snapshot for each in coverages}}
        found = (name for each in coverages for name in each.unhooked(changes[each.snapshot]))
        names = dict.fromkeys(found)
        if names:
            yield (
                f"{change} while the block was open, and the new ones are not hooked{also}: "
                f"{', '.join(names)}; attach after the change, or remove the intervention and add "
                "it again"
            )
