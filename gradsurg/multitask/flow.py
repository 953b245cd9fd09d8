"""Whose gradient flows, and which of the transforms act meanwhile."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, device
from torch.autograd.graph import Node

from gradsurg.plugins.fields import FieldError, SelectionError, nearest
from gradsurg.surgery.attached import Attached
from gradsurg.triggers.base import Clock
from gradsurg.triggers.for_task import ForTask

_STEADY = {"linear", "deterministic"}
EARLY = ("backward", "use", "captured")  # the stages at which a transform meets each task


@dataclass(frozen=True)
class Call:
    """One live.backward: its losses by task, its `last` and `retain`, and what is attached.

    `last` says that no further batch of the step comes, `retain` that the graph stays for another
    backward. `picky` are those of the attached that act on some tasks only.
    """

    losses: Mapping[str, Tensor]
    attached: Sequence[Attached]
    picky: Sequence[Attached]
    last: bool
    retain: bool

    @property
    def device(self) -> device:
        """Where the first loss is."""
        return next(iter(self.losses.values())).device

    @property
    def steady(self) -> list[Attached]:
        """The attached that act whatever the task."""
        return [own for own in self.attached if own not in self.picky]


@contextmanager
def flowing(task: str, clock: Clock, call: Call) -> Iterator[None]:
    """The gradient of this task flows in the block: transforms and triggers know it."""
    clock.task = task
    for own in call.attached:
        own.expect_tasks()
    for own in call.picky:
        own.operation.begin_again()
    try:
        yield
    finally:
        clock.task = ""
        for own in call.picky:
            own.operation.begin_again()


@contextmanager
def paused(attached: Sequence[Attached]) -> Iterator[None]:
    """None of these acts or counts in the block."""
    for own in attached:
        own.operation.pause()
    try:
        yield
    finally:
        for own in attached:
            own.operation.resume()


@contextmanager
def sparing(attached: Sequence[Attached], nodes: Collection[Node]) -> Iterator[None]:
    """What comes to these nodes is neither acted on nor counted in the block."""
    for own in attached:
        own.operation.spare(nodes)
    try:
        yield
    finally:
        for own in attached:
            own.operation.spare(())


def at_leaves(attached: Sequence[Attached]) -> list[Attached]:
    """Those that have met the gradient of each task, and are not to meet what was made of them."""
    return [own for own in attached if own.intervention.stage == "backward"]


def pickers(attached: Sequence[Attached]) -> list[Attached]:
    """Those that act on some tasks only."""
    return [own for own in attached if _picked(own)]


def acts_unlike_on_parts(attached: Sequence[Attached]) -> bool:
    """Whether any that acts at this step makes of a sum another thing than of its parts: it is to
    meet the gradient of each task, and not their weighed sum.
    """
    return any(
        own.intervention.stage in EARLY
        and own.operation.firing is not False
        and not (own.operation.firing and own.intervention.operator.properties >= _STEADY)
        for own in attached
    )


def check_tasks(picky: Sequence[Attached], names: Sequence[str]) -> None:
    """Refuse a trigger that waits for a task which is not there."""
    for own in picky:
        for part in _picked(own):
            if part.task not in names:
                text = f"there is no loss '{part.task}'. {nearest(part.task, list(names))}"
                text += " The first live.backward must have it"
                raise SelectionError(part, "task", text, f"{own.label}: {part!r}")


def check_stateful(attached: Sequence[Attached], num_tasks: int) -> None:
    """Refuse a memory through which the gradients of several tasks would pass in turn."""
    if num_tasks == 1:
        return
    for own in attached:
        if own.intervention.stage in EARLY and own.stateful and not _picked(own):
            text = (
                f"{own.stateful} remembers what passes at a site, and there the gradients of "
                f"{num_tasks} tasks pass one after the other; it can act at Parameters with "
                "stage='step', after them, or at one task, by when=ForTask(...)"
            )
            raise FieldError(own.intervention.operator, [("", text)], own.label)


def _picked(attached: Attached) -> list[ForTask]:
    return [part for part in attached.intervention.when.parts if isinstance(part, ForTask)]
