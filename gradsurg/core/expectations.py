"""Check that interventions have found their places, and collect the warnings at the end."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from gradsurg.core.operation import Operation
from gradsurg.plugins.fields import SelectionError, in_short
from gradsurg.plugins.messages import shortened
from gradsurg.sites.call_graphs import after_backward, meets_more
from gradsurg.sites.selection import TRACED
from gradsurg.sites.selectors import near_in
from gradsurg.torch_internals import autograd, compiling, module_hooks
from gradsurg.torch_internals.hook_tables import call_tables, foreign_hooks, tensor_tables

if TYPE_CHECKING:
    from gradsurg.core.attachment import Attachment


def check_places(attachment: "Attachment") -> None:
    """Check the places that are known now, and have the first forward check the others."""
    attachment.forward_check.close()
    waiting: list[Operation] = []
    for operation in attachment.operations:
        if operation.stage == "step" and not attachment.steps.optimizers:
            continue  # it waits for `bind`
        wanted = operation.at.count
        # The places of parameters are known now, those of modules after a forward.
        if any(kind.known_at != "watch" for kind in operation.kinds):
            if wanted is not None or not operation.placed:
                waiting.append(operation)
        elif wanted is not None:
            _check_count(operation)
        elif not operation.met and (error := operation.at.nothing_met(operation.memory, False)):
            raise error
    if not waiting:
        return

    def ended(module: nn.Module, args: object, output: object) -> None:
        # Only a forward that makes a graph: no evaluation, and no recomputation of a checkpoint.
        # `is_open`: a user's transform may have closed the surgery in it.
        is_whole = torch.is_grad_enabled() and not autograd.in_backward() and attachment.is_open
        if is_whole and compiling.in_jit_trace():
            # Traced code runs no hooks of modules; a later forward of the model itself is checked.
            for each in waiting:
                each.note(TRACED)
        elif is_whole and waiting:
            checked = [*waiting]
            waiting.clear()
            handle.remove()
            _check_after_forward(attachment, checked, output)

    handle = attachment.model.register_forward_hook(attachment.door.shared.untraced(ended))
    attachment.forward_check.callback(handle.remove)


def _check_after_forward(
    attachment: "Attachment", operations: Iterable[Operation], output: object
) -> None:
    for operation in operations:
        selector, memory = operation.at, operation.memory
        in_backward = any(kind.known_at == "backward" for kind in operation.kinds)
        # A reentrant checkpoint calls modules without a graph: their nodes come in the backward.
        shared = attachment.door.shared
        may_meet_nodes = shared.has_graphless and meets_more(output, by_gradient=False)
        if selector.count is None:
            # Places were found, and the selector has picked none: its fields are wrong.
            unmet = memory.rejected and not memory.has_picked
            if unmet and (error := selector.nothing_met(memory, may_meet_nodes)):
                raise error
        elif meets_more(output, in_backward):
            operation.awaits_backward = True
            # A default binds the operation of this round; a plain closure would see the last one.
            after_backward(output, lambda late=operation: _check_count(late))
        else:
            _check_count(operation)


def _check_count(operation: Operation) -> None:
    """Raise SelectionError if another number of places was met than `expect` asks for."""
    if not operation.is_on:  # detached, or paused, so that it may not have met all places
        return
    operation.awaits_backward = False
    wanted, sites = operation.at.count, [*operation.placed]
    if wanted is not None and len(sites) != wanted:
        text = f"{wanted} sites were expected, found {len(sites)}: {shortened(sites) or 'none'}"
        raise SelectionError(operation.at, "count", text, operation.label)


def enter_unmet(attachment: "Attachment") -> None:
    """Enter into the ledger the sites that were expected and have not come."""
    for operation in attachment.operations if attachment.is_open else ():
        entries = attachment.ledger.of(operation.label)
        known = {site for entry in entries for site in (entry.site, *entry.aliases)}
        for site, why in operation.at.unmet(attachment.model, operation.memory, operation.met):
            if site not in known:
                entry = attachment.ledger.enter(operation.label, site, skipped=why)
                entry.is_other_name = bool(why)
        _note_foreign(attachment, operation)


def _note_foreign(attachment: "Attachment", operation: Operation) -> None:
    """Note hooks of others at the places of an intervention: the printed ledger names them."""
    entries = attachment.ledger.of(operation.label)
    for kind in operation.kinds:
        for names, thing, _ in near_in(kind.things(attachment.model), kind, operation.near):
            tables = call_tables(thing) if isinstance(thing, nn.Module) else tensor_tables(thing)
            if kind.reaches_new:  # by hooks for all modules of the process
                tables = (*tables, *module_hooks.global_hooks())
            if others := foreign_hooks(*tables):
                for entry in entries:
                    name = entry.site.partition("#")[0]  # of a module or a parameter
                    if name in names:
                        entry.foreign = others


def end_warnings(attachment: "Attachment") -> Iterator[str]:
    """Yield the warnings to emit when the surgery ends."""
    if attachment.shadow and not attachment.effects.every:
        return  # nothing acts and nothing is measured
    for listener in attachment.listeners["closed"]:
        yield from (text for text in listener(attachment) or () if text not in attachment.warned)
    yield from attachment.removed_notes
    if attachment.has_multi_task:
        yield from attachment.multi_task.closing_warnings()
    for operation in attachment.operations:
        yield from closing_notes(attachment, operation)


def closing_notes(attachment: "Attachment", operation: Operation) -> list[str]:
    """Return the notes of an intervention that ends."""
    for check in [*operation.end_checks]:
        if text := check():
            operation.note(text)
    if operation.awaits_backward:
        operation.note(
            f"{operation.at.count} sites were expected, and no backward has run that would "
            "show all of them"
        )
    entries = attachment.ledger.of(operation.label)
    # Only if all sites have acted: the ledger warns of one without a gradient, which says more.
    if operation.placed and all(entry.all_calls or entry.skipped for entry in entries):
        silent = shortened(map(in_short, operation.at.unmatched(operation.memory)))
        if silent:
            operation.note(f"nothing was selected by its part {silent}")
    return operation.notes
