"""Steps are not counted."""

from collections.abc import Iterator

from gradsurg.core.pitfalls.base import AttachmentLike, Pitfall
from gradsurg.triggers.epochs import Epochs


class UncountedSteps(Pitfall):
    """A step hook is called by `optimizer.step`, and by nothing else that changes the weights.

    Wrappers of an optimizer may have a `step` of their own.

    >>> weight = torch.ones(1, requires_grad=True); optimizer = torch.optim.SGD([weight])
    >>> handle = optimizer.register_step_post_hook(lambda *_: print("step"))
    >>> with torch.no_grad(): weight -= 0.1  # the hook is not called

    https://docs.pytorch.org/docs/stable/optim.html, `Optimizer.register_step_post_hook`.
    """

    context, kinds, outcome = "no optimizer", "*", "warned"
    why = "{triggers}: no optimizer step was counted{since}"
    instead = "attach(model, optimizer), live.bind(optimizer) or call live.tick() after each step"


class UncountedEpochs(UncountedSteps):
    """PyTorch has no epochs: the training loop counts them."""

    context, why = "epochs", "Epochs: no epoch was counted"
    instead = "give Epochs a length, attach with steps_per_epoch, or call live.next_epoch()"


class OtherOptimizer(UncountedSteps):
    """The weights change, and the optimizer that was given does not step."""

    context = "another optimizer"
    why = (
        "no step of {optimizer} was counted, though the weights have changed: it is not what makes "
        "the steps, or a wrapper of it runs no step hooks"
    )
    instead = "Bind the optimizer that steps, or call live.before_step() and live.tick()"


def uncounted(
    attachment: AttachmentLike, step: int, epochs: int, with_epochs: bool = True
) -> Iterator[str]:
    """Yield texts about triggers whose clock has not advanced since this step and these epochs.

    Not those of epochs in the middle of the first one, without `with_epochs`.
    """
    clock = attachment.clock
    triggers = [operation.intervention.when for operation in attachment.operations]
    parts = [part for trigger in triggers for part in trigger.parts]
    counting = [part for part in parts if isinstance(part, Epochs)]
    has_length = clock.epoch_length is not None
    timed = {type(part).__name__ for part in parts if part.step_based}
    timed |= {type(part).__name__ for part in counting if has_length or part.length is not None}
    if timed and clock.step == step:
        since = f" since this block began, at step {step}" if step else ""
        yield UncountedSteps.sentences(triggers=", ".join(sorted(timed)), since=since)
    has_moved = has_length or clock.counted_epochs > epochs
    if with_epochs and any(part.length is None for part in counting) and not has_moved:
        yield UncountedEpochs.sentences()
