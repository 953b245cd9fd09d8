"""Whether the sites that a selector asks for are there."""

from collections.abc import Collection
from contextlib import ExitStack

import torch
from torch import nn

from gradsurg.hooks.controller import HookController
from gradsurg.plugins.fields import SelectionError, only_changed_field
from gradsurg.sites.base import Place, PlaceTest, Selector
from gradsurg.sites.combined import CombinedTest
from gradsurg.sites.graph_tracer import after_backward, may_meet_more_sites
from gradsurg.torch_internals import autograd, compiling


class SiteCount:
    """Asks a selector for an intervention, and tells when none of its sites is there, or another
    number than it expects: as soon as that is known, at the latest after the first backward.

    `met` are the sites whose gates were asked for.
    """

    def __init__(self, at: Selector, controller: HookController, met: Collection[str]) -> None:
        self.selects: PlaceTest = self._noting
        self._at = at
        self._ask = at.new_test()
        self._controller = controller
        self._met = met
        self._kept = False  # whether it has selected anything
        self._left: dict[str, None] = {}  # what it does not select
        self._waits = False  # whether a backward is to show the number of the sites

    def begin(self, model: nn.Module, stack: ExitStack) -> None:
        """All is hooked that is there: tell at once, or have the first forward tell."""
        if self._at.expected is not None and all(
            kind.known_before_forward for kind in self._at.kinds
        ):
            self._end()
            self._count()
        elif self._at.expected is not None or not self._kept:
            self._first_forward(model, stack)
        else:
            self._end()

    def complaint(self) -> str:
        """What is to be said when the block ends; empty if nothing is."""
        if not self._waits:
            return ""
        return (
            f"{self._at.expected} sites were expected, and no backward has come that would show "
            "them all"
        )

    def silence(self) -> str:
        """What is to be said of parts that have selected nothing, where the whole has."""
        silent = (
            self._ask.unmatched_parts() if self._met and isinstance(self._ask, CombinedTest) else []
        )
        if not silent:
            return ""
        return f"nothing was selected by {', '.join(map(repr, silent))}, a part of it"

    def _noting(self, place: Place) -> bool | None:
        """As the selector says, up to the end of the first forward."""
        said = self._ask(place)
        if said:
            self._kept = True
        elif place.whole:
            call = "" if place.call is None else f"#{place.call}"
            node = f"/{place.node}[{place.occurrence}]" if place.node else ""
            self._left[f"{place.name}{call}{node}"] = None
        return said

    def _end(self) -> None:
        self.selects = self._ask

    def _first_forward(self, model: nn.Module, stack: ExitStack) -> None:
        """Have the first forward that makes a graph tell whether there is what was asked for."""
        at = self._at
        # What is met outside the model too may come after it.
        inside = all(kind.place_if_added(model) is None for kind in at.kinds)
        counted = False

        @compiling.untraced
        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            nonlocal counted
            if counted or not torch.is_grad_enabled() or autograd.in_backward():
                return
            counted = True
            handle.remove()
            self._end()
            if at.expected is not None and may_meet_more_sites(output, at):
                self._waits = True
                after_backward(output, self._count)
            elif at.expected is not None:
                self._count()
            elif inside and self._left and not self._kept:
                text = (
                    f"nothing that the first forward has met is selected by {at!r}. It has met: "
                    f"{', '.join(self._left)}"
                )
                raise SelectionError(at, only_changed_field(at), text, self._controller.label)

        handle = model.register_forward_hook(hook)
        stack.callback(handle.remove)

    def _count(self) -> None:
        if not self._controller.on:
            return
        self._waits = False
        expected, found = self._at.expected, len(self._met)
        if found != expected:
            raise LookupError(
                f"{self._controller.label}: {expected} sites were expected, found {found}: "
                f"{', '.join(self._met) or 'none'}"
            )
