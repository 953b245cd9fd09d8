"""The losses of one `live.backward` call, and the hooks that see their gradients."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node

from gradsurg.hooks.controller import HookController
from gradsurg.plugins.fields import FieldError, SelectionError
from gradsurg.plugins.messages import nearest
from gradsurg.triggers.base import Clock

Losses = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
"""Scalar losses by task name, or in order as a sequence or a 1-D tensor."""

PER_TASK_STAGES = ("backward", "use", "captured")
"""The stages at which a transform sees the gradient of each task."""

_LINEAR = {"linear", "deterministic"}


@dataclass(frozen=True)
class BackwardCall:
    """The arguments of one `live.backward` call, and the attached hooks.

    `last` means that no further batch of this optimizer step follows, `retain_graph` that the graph
    is kept for another backward pass.
    """

    losses: Mapping[str, Tensor]
    controllers: Sequence[HookController]
    last: bool
    retain_graph: bool

    @property
    def device(self) -> torch.device:
        """The device of the first loss."""
        return next(iter(self.losses.values())).device

    @cached_property
    def task_specific(self) -> list[HookController]:
        """The controllers whose trigger names a task."""
        return [controller for controller in self.controllers if controller.named_tasks]

    @cached_property
    def task_independent(self) -> list[HookController]:
        """The controllers that act on the gradients of all tasks."""
        return [controller for controller in self.controllers if not controller.named_tasks]

    @property
    def at_leaves(self) -> list[HookController]:
        """The controllers that acted on each task's gradient at the leaves, and must not act on the
        combined one."""
        return [controller for controller in self.controllers if controller.stage == "backward"]

    @property
    def has_nonlinear(self) -> bool:
        """Whether a transform of this step has to see each task's gradient.

        A linear transform of the weighted sum equals the weighted sum of the transformed gradients.
        """
        return any(
            controller.stage in PER_TASK_STAGES
            and controller.firing is not False
            and not (controller.firing and controller.transform.properties >= _LINEAR)
            for controller in self.controllers
        )

    def check_task_names(self, names: Sequence[str]) -> None:
        """Raise SelectionError if a trigger names a task that is not in `names`."""
        for controller in self.task_specific:
            for part in controller.named_tasks:
                if part.task not in names:
                    text = f"there is no loss '{part.task}'. {nearest(part.task, list(names))}"
                    text += " The first live.backward must have it"
                    raise SelectionError(part, "task", text, f"{controller.label}: {part!r}")

    def check_stateless(self, num_tasks: int) -> None:
        """Raise FieldError if the state of a hook would mix the gradients of several tasks."""
        if num_tasks == 1:
            return
        for controller in self.task_independent:
            if controller.stage in PER_TASK_STAGES and controller.stateful:
                text = (
                    f"{controller.stateful} has a state for each site, which the gradients of "
                    f"{num_tasks} tasks would share: act after the aggregator, at Parameters with "
                    "stage 'step', or on one task, by a ForTask trigger"
                )
                links = [link for _, link in controller.links]
                stateful = [link for link in links if repr(link) == controller.stateful]
                owner = stateful[0] if stateful else controller.transform
                raise FieldError(owner, [("", text)], controller.label)

    @contextmanager
    def task(self, name: str, clock: Clock) -> Iterator[None]:
        """Tell transforms and triggers the name of the task during its backward pass."""
        clock.task = name
        for controller in self.controllers:
            controller.has_several_tasks = True
        for controller in self.task_specific:
            controller.reevaluate()
        try:
            yield
        finally:
            clock.task = ""
            for controller in self.task_specific:
                controller.reevaluate()


@contextmanager
def paused(controllers: Sequence[HookController]) -> Iterator[None]:
    """Pause the controllers: their hooks neither act nor count."""
    for controller in controllers:
        controller.pause()
    try:
        yield
    finally:
        for controller in controllers:
            controller.resume()


@contextmanager
def skipping(controllers: Sequence[HookController], nodes: Collection[Node]) -> Iterator[None]:
    """Make the hooks of the controllers neither act nor count at these nodes."""
    for controller in controllers:
        controller.skip_nodes(nodes)
    try:
        yield
    finally:
        for controller in controllers:
            controller.skip_nodes(())


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
    """Return the losses times the loss scale; as they are without a scaler."""
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
    detached = [loss.detach().double() for loss in losses.values()]
    if len({loss.device for loss in detached}) == 1:
        numbers = torch.stack(detached).tolist()
    else:
        numbers = [loss.item() for loss in detached]
    return {name: number / scale for name, number in zip(losses, numbers, strict=True)}
