"""What is to be said of a surgery when its block ends."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from gradsurg.effects.ledger import Ledger
from gradsurg.sites.base import Place
from gradsurg.sites.selection import names_of, owned_params
from gradsurg.surgery.attached import Attached
from gradsurg.triggers.base import Clock
from gradsurg.triggers.epochs import Epochs


def complaints(
    attached: Sequence[Attached],
    ledger: Ledger,
    model: nn.Module,
    clock: Clock,
    began: tuple[int, int],
    removed: Sequence[str],
    why: str = "",
) -> list[str]:
    """One sentence for each thing that did not act, or not as its user may think.

    `began` is the step and the epoch of the attaching, `removed` what was to be said of
    interventions that are there no more, `why` a reason for hooks that have not run.
    """
    said = ledger.complaints(began[0], why)
    met = {entry.intervention for entry in ledger}
    said += [
        f"{own.label}: attached, but none of its sites was met: was the model called?{why}"
        for own in attached
        if own.label not in met
    ]
    said += removed
    said += [note for own in attached for note in own.finish()]
    if any(entry.calls for entry in ledger):
        said += _idle_clocks(attached, clock, began)
    said += _newcomers(attached, model)
    return said


def _idle_clocks(
    attached: Sequence[Attached], clock: Clock, began: tuple[int, int]
) -> Iterator[str]:
    """Triggers that read a clock which nobody has moved."""
    parts = [part for own in attached for part in own.intervention.when.parts]
    epochs = [part for part in parts if isinstance(part, Epochs)]
    told = clock.epoch_length is not None
    timed = {type(part).__name__ for part in parts if part.step_based}
    timed |= {type(part).__name__ for part in epochs if told or part.length is not None}
    if timed and clock.step == began[0]:
        still = f" since this block began, at step {began[0]}" if began[0] else ""
        yield (
            f"{', '.join(sorted(timed))}: no optimizer step was counted{still}; "
            "attach(model, optimizer) or call live.tick() after each step"
        )
    told = told or clock.counted_epochs > began[1]
    if any(part.length is None for part in epochs) and not told:
        yield (
            "Epochs: no epoch was counted; give Epochs a length, attach with steps_per_epoch, "
            "or call live.next_epoch()"
        )


def _newcomers(attached: Sequence[Attached], model: nn.Module) -> Iterator[str]:
    """What came into the model while the block was open, is selected and is not hooked."""
    modules = {
        module: [Place((), name, module) for name in names]
        for module, names in names_of(model).items()
    }
    trained = {
        param: [Place((), name, param, owner=owner, whole=True) for name, owner in named]
        for param, named in owned_params(model).items()
        if param.requires_grad
    }
    part = " or taken for a part of the module around it"  # as Nodes take what it makes
    for kind, places, also in (("modules", modules, part), ("parameters", trained, "")):
        names = dict.fromkeys(name for own in attached for name in _missed(own, places))
        if names:
            yield (
                f"{kind} were replaced or added while the block was open, and what came is not "
                f"hooked{also}: {', '.join(names)}; attach after replacing, or remove the "
                "intervention and add it again"
            )


def _missed(own: Attached, things: Mapping[Any, list[Place]]) -> Iterator[str]:
    """The names of those that an intervention would have hooked. Any: a module or a parameter."""
    for thing, places in things.items():
        # A compiled module stands in front of the one that is hooked.
        if own.knew(thing) or own.knew(getattr(thing, "_orig_mod", None)):
            continue
        for kind in own.intervention.at.kinds:
            later = kind.place_if_added(thing)
            first, *others = (replace(place, mechanism=kind.mechanism) for place in places)
            # A parameter is decided on with all its names, a module by each of them.
            tried = [replace(first, aliases=tuple(others))] if first.whole else [first, *others]
            wanted = any(own.selects(place) is not False for place in tried)
            if wanted and (later is None or own.selects(later) is False):
                yield first.name
