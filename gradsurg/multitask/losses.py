"""The losses of one `live.backward` call, and the hooks that see their gradients."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node

from gradsurg.plugins.fields import FieldError, SelectionError, in_short
from gradsurg.plugins.messages import unknown
from gradsurg.triggers.base import Clock

if TYPE_CHECKING:
    from gradsurg.core.operation import Operation

Losses = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
"""Scalar losses by task name, or in order as a sequence or a 1-D tensor."""

PER_TASK_STAGES = ("backward", "use", "captured")
"""The stages at which a transform sees the gradient of each task."""

_LINEAR = {"linear", "deterministic"}


@dataclass(frozen=True)
class BackwardCall:
    """The arguments of one `live.backward` call, and the attached hooks.

    `last` means that no further batch of this optimizer step follows. `retain_graph` means that the
    graph is kept for another backward pass.
    """

    losses: Mapping[str, Tensor]
    interventions: "Sequence[Operation]"
    last: bool
    retain_graph: bool

    @property
    def device(self) -> torch.device:
        """The device of the first loss."""
        return next(iter(self.losses.values())).device

    @cached_property
    def task_specific(self) -> "list[Operation]":
        """The interventions whose trigger names a task."""
        return [each for each in self.interventions if each.named_tasks]

    @cached_property
    def task_independent(self) -> "list[Operation]":
        """The interventions that act on the gradients of all tasks."""
        return [each for each in self.interventions if not each.named_tasks]

    @property
    def at_leaves(self) -> "list[Operation]":
        """The interventions that act on each task at the leaves, and not on the combination."""
        return [each for each in self.interventions if each.stage == "backward"]

    @property
    def has_nonlinear(self) -> bool:
        """Whether a transform of this step has to see each task's gradient.

        A linear transform of the weighted sum equals the weighted sum of the transformed gradients.
        """
        return any(
            each.stage in PER_TASK_STAGES
            and each.answer is not False
            and not (each.answer and each.intervention.operator.properties >= _LINEAR)
            for each in self.interventions
        )

    def check_task_names(self, names: Sequence[str]) -> None:
        """Raise SelectionError if a trigger names a task that is not in `names`."""
        for each in self.task_specific:
            for part in each.named_tasks:
                if part.task not in names:
                    fault = f"there is no loss '{part.task}' in the first live.backward"
                    text = unknown(fault, part.task, names)
                    raise SelectionError(part, "task", text, f"{each.label}: {in_short(part)}")

    def check_stateless(self, num_tasks: int) -> None:
        """Raise FieldError if the state of a hook would mix the gradients of several tasks."""
        if num_tasks == 1:
            return
        for each in self.task_independent:
            if each.stage in PER_TASK_STAGES and each.stateful:
                text = (
                    "act after the aggregator, by Parameters(stage='step'), or on one task, by the "
                    f"trigger ForTask('<task>'): {each.stateful} has one state for each site, "
                    f"which {num_tasks} tasks would share"
                )
                stateful = [link for link in each.intervention.links if repr(link) == each.stateful]
                owner = stateful[0] if stateful else each.intervention.operator
                raise FieldError(owner, [("", text)], each.label)

    @contextmanager
    def task(self, name: str, clock: Clock) -> Iterator[None]:
        """Give transforms and triggers the name of the task during its backward pass."""
        clock.task = name
        for each in self.interventions:
            each.has_several_tasks = True
        for each in self.task_specific:
            each.reevaluate()
        try:
            yield
        finally:
            clock.task = ""
            for each in self.task_specific:
                each.reevaluate()


@contextmanager
def paused(interventions: "Sequence[Operation]") -> Iterator[None]:
    """Pause the interventions: their hooks neither act nor count."""
    for each in interventions:
        each.switch(False)
    try:
        yield
    finally:
        for each in interventions:
            each.switch(True)


@contextmanager
def skipping(interventions: "Sequence[Operation]", nodes: Collection[Node]) -> Iterator[None]:
    """Make the hooks of the interventions neither act nor count at these nodes."""
    for each in interventions:
        each.skip_nodes(nodes)
    try:
        yield
    finally:
        for each in interventions:
            each.skip_nodes(())


def named_losses(losses: Losses) -> dict[str, Tensor]:
    """Return the losses by name; the losses of a sequence are named 0, 1 and so on.

    Raises TypeError or ValueError, with the name, for an invalid loss.
    """
    match losses:
        case Tensor():
            if losses.ndim > 1:
                raise ValueError(f"losses: must be a 1-D tensor, found shape {list(losses.shape)}")
            given = dict(enumerate(losses.reshape(-1).unbind()))
        case Mapping():
            given = dict(losses)
        case Iterable() if not isinstance(losses, str):  # also the values of a mapping
            given = dict(enumerate(losses))
        case _:
            raise TypeError(f"losses: must be a mapping or a sequence of tensors, found {losses!r}")
    if not given:
        raise ValueError("losses: must have at least one loss, found none")
    for name, loss in given.items():
        _check_loss(name, loss)
    named = {str(name): loss for name, loss in given.items()}
    if len(named) < len(given):
        twice = next(name for name in named if sum(name == str(key) for key in given) > 1)
        raise ValueError(f"losses: two have the name '{twice}'")
    return named


def scaled(losses: Losses, scaler: GradScaler | None) -> Losses:
    """Return the losses times the loss scale; without a scaler return them unchanged."""
    if scaler is None:
        return losses
    return {name: scaler.scale(loss) for name, loss in named_losses(losses).items()}


def _check_loss(name: object, loss: object) -> None:
    if not isinstance(name, str | int) or name == "" or "/" in str(name):
        raise ValueError(f"losses: a name must be a nonempty text without '/', found {name!r}")
    if not isinstance(loss, Tensor):
        raise TypeError(f"losses['{name}']: must be a tensor, found {loss!r}")
    if loss.ndim:
        raise ValueError(
            f"losses['{name}']: must be a scalar, found shape {list(loss.shape)}: take its mean"
        )
    if not loss.is_floating_point():
        raise TypeError(f"losses['{name}']: must be a real number, found {loss.dtype}")
    if not loss.requires_grad:
        raise ValueError(
            f"losses['{name}']: does not require a gradient: none of its inputs does, or it was "
            "computed under no_grad"
        )


def loss_values(losses: Mapping[str, Tensor], scale: float) -> dict[str, float]:
    """Return the losses as numbers, divided by the loss scale.

    Synchronizes with the device: once, or for each loss if they are on several devices.
    """
    kinds = {loss.device.type for loss in losses.values()}
    if kinds == {"cpu"} or len({loss.device for loss in losses.values()}) > 1:
        numbers = [loss.item() for loss in losses.values()]  # a wait for each device
    else:
        numbers = torch.stack([loss.detach().double() for loss in losses.values()]).tolist()
    return {name: number / scale for name, number in zip(losses, numbers, strict=True)}
