"""What did not act: told in the first steps, and when the surgery ends."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gradsurg.core.first_steps import FirstSteps
from gradsurg.sites.wrapped_models import late_hooks_reason
from gradsurg.triggers.base import Clock, Trigger
from gradsurg.triggers.epochs import Epochs

if TYPE_CHECKING:
    from gradsurg.core.attachment import Attachment
    from gradsurg.core.operation import Operation


def watch_first_steps(attachment: "Attachment") -> None:
    """Notice in the first steps what does not act; called when all is hooked."""
    # A surgery that changes weights in each forward hides whether a step has changed them.
    hides = any(
        each.stage == "forward" and each.at.changed_tensors == "weights"
        for each in attachment.operations
    )
    params = () if hides else attachment.model.parameters()
    attachment.first_steps = FirstSteps(
        params, attachment.steps, lambda counted: tell(attachment, counted)
    )


def tell(attachment: "Attachment", counted: int) -> None:
    """Warn in the first steps of an intervention that has not acted, and of a still clock.

    `counted` is the number of steps so far.
    """
    if attachment.shadow and not attachment.effects.every:
        return
    clock = attachment.steps.clock
    if clock is not None and not counted:
        attachment.warn_once(
            f"no step of {type(clock).__name__} was counted, though the weights have changed: it "
            "is not what makes the steps, or a wrapper of it runs no step hooks. Bind the "
            "optimizer that steps, or call live.before_step() and live.tick()",
            key="no step",
        )
    expect_all(attachment)
    for each in attachment.operations:
        entries = attachment.ledger.of(each.label)
        if each.answer is False or any(entry.all_calls for entry in entries):
            continue
        if each.stage != "captured":
            silent = attachment.ledger.silent(each.label) or "any site"
            attachment.warn_once(
                f"{each.label}: attached, and in the first steps no gradient has passed at: "
                f"{silent}{_reason(attachment, each)}",
                key=f"{each.label} silent",
            )
    if attachment.has_multi_task:
        of_tasks = (each for each in attachment.operations if each.named_tasks)
        idle = [each.label for each in of_tasks if each.answer is False]
        attachment.multi_task.warn_unused([*attachment.aggregators, *idle])
    if not counted:
        for text in _clock_warnings(attachment, with_epochs=False):
            attachment.warn_once(text)


def end_warnings(attachment: "Attachment") -> Iterator[str]:
    """Yield the warnings to emit on detach, but for those that were told in the first steps."""
    if attachment.shadow and not attachment.effects.every:
        return  # nothing acts and nothing is measured
    expect_all(attachment)
    ledger = attachment.ledger
    labels = {each.label: each for each in attachment.operations}
    for label in [*ledger.sites]:
        each = labels.get(label)
        reason = "" if each is None else _reason(attachment, each)
        yield from ledger.warnings(label, attachment.start[0], reason)
    for each in attachment.operations:
        if not ledger.of(each.label):
            yield (
                f"{each.label}: attached, but none of its sites was met: was the model called?"
                f"{_reason(attachment, each)}"
            )
    yield from attachment.removed
    if attachment.has_multi_task:
        yield from attachment.multi_task.closing_warnings()
    for each in attachment.operations:
        yield from ending(each)
    if any(entry.calls for entry in ledger):
        told = attachment.warned
        yield from (text for text in _clock_warnings(attachment) if text not in told)


def ending(operation: "Operation") -> list[str]:
    """Return the notes of an intervention that ends."""
    ledger = operation.attachment.ledger
    for check in [*operation.end_checks]:
        if text := check():
            operation.note(text)
    if operation.awaits_backward:
        operation.note(
            f"{operation.at.count} sites were expected, and no backward has run that would show "
            "all of them"
        )
    entries = ledger.of(operation.label)
    if operation.placed and all(entry.all_calls or entry.skipped for entry in entries):
        # Else the ledger warns of its silent sites.
        silent = [*operation.at.unmatched(operation.memory)]
        if silent:
            listed = ", ".join(map(repr, silent))
            operation.note(f"nothing was selected by {listed}, a part of it")
    return operation.notes


def expect_all(attachment: "Attachment") -> None:
    """Enter into the ledger the near names of all interventions at which no place was met."""
    for operation in attachment.operations:
        attachment.expect_unmet(operation)


def _reason(attachment: "Attachment", operation: "Operation") -> str:
    """Why hooks may not have run; empty if nothing explains it."""
    if operation.stage == "step" and not attachment.steps.optimizers:
        return ". It acts at stage 'step', and live.bind(optimizer) was not called"
    if not operation.was_compiled:
        return ""
    has_acted = any(entry.all_calls for entry in attachment.ledger)
    return late_hooks_reason(attachment.model, attachment.is_compiled, has_acted)


def _clock_warnings(attachment: "Attachment", with_epochs: bool = True) -> Iterator[str]:
    triggers = [each.trigger for each in attachment.operations]
    return clock_warnings(triggers, attachment.clock, attachment.start, with_epochs)


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
