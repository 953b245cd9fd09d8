"""Whose gradient flows, and which of the transforms act meanwhile."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, device
from torch.autograd.graph import Node

from gradsurg.hooks.controller import HookController
from gradsurg.plugins.fields import FieldError, SelectionError, nearest
from gradsurg.triggers.base import Clock

_STEADY = {"linear", "deterministic"}
EARLY = ("backward", "use", "captured")  # the stages at which a transform meets each task


@dataclass(frozen=True)
class Call:
    """One live.backward: its losses by task, its `last` and `retain`, and what is attached.

    `last` says that no further batch of the step comes, `retain` that the graph stays for another
    backward. `picky` are those of the attached that act on some tasks only.
    """

    losses: Mapping[str, Tensor]
    attached: Sequence[HookController]
    picky: Sequence[HookController]
    last: bool
    retain: bool

    @property
    def device(self) -> device:
        """Where the first loss is."""
        return next(iter(self.losses.values())).device

    @property
    def steady(self) -> list[HookController]:
        """The attached that act whatever the task."""
        return [own for own in self.attached if own not in self.picky]


@contextmanager
def flowing(task: str, clock: Clock, call: Call) -> Iterator[None]:
    """The gradient of this task flows in the block: transforms and triggers know it."""
    clock.task = task
    for own in call.attached:
        own.has_several_tasks = True
    for own in call.picky:
        own.reevaluate()
    try:
        yield
    finally:
        clock.task = ""
        for own in call.picky:
            own.reevaluate()


@contextmanager
def paused(attached: Sequence[HookController]) -> Iterator[None]:
    """None of these acts or counts in the block."""
    for own in attached:
        own.pause()
    try:
        yield
    finally:
        for own in attached:
            own.resume()


@contextmanager
def sparing(attached: Sequence[HookController], nodes: Collection[Node]) -> Iterator[None]:
    """What comes to these nodes is neither acted on nor counted in the block."""
    for own in attached:
        own.skip_nodes(nodes)
    try:
        yield
    finally:
        for own in attached:
            own.skip_nodes(())


def at_leaves(attached: Sequence[HookController]) -> list[HookController]:
    """Those that have met the gradient of each task, and are not to meet what was made of them."""
    return [own for own in attached if own.stage == "backward"]


def pickers(attached: Sequence[HookController]) -> list[HookController]:
    """Those that act on some tasks only."""
    return [own for own in attached if own.named_tasks]


def acts_unlike_on_parts(attached: Sequence[HookController]) -> bool:
    """Whether any that acts at this step makes of a sum another thing than of its parts: it is to
    meet the gradient of each task, and not their weighed sum.
    """
    return any(
        own.stage in EARLY
        and own.firing is not False
        and not (own.firing and own.transform.properties >= _STEADY)
        for own in attached
    )


def check_tasks(picky: Sequence[HookController], names: Sequence[str]) -> None:
    """Refuse a trigger that waits for a task which is not there."""
    for own in picky:
        for part in own.named_tasks:
            if part.task not in names:
                text = f"there is no loss '{part.task}'. {nearest(part.task, list(names))}"
                text += " The first live.backward must have it"
                raise SelectionError(part, "task", text, f"{own.label}: {part!r}")


def check_stateful(attached: Sequence[HookController], num_tasks: int) -> None:
    """Refuse a memory through which the gradients of several tasks would pass in turn."""
    if num_tasks == 1:
        return
    for own in attached:
        if own.stage in EARLY and own.stateful and not own.named_tasks:
            text = (
                f"{own.stateful} remembers what passes at a site, and there the gradients of "
                f"{num_tasks} tasks pass one after the other; it can act at Parameters with "
                "stage='step', after them, or at one task, by when=ForTask(...)"
            )
            raise FieldError(own.transform, [("", text)], own.label)
