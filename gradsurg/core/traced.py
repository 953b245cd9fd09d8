"""Interventions as functions that torch.compile traces into its graphs."""

from collections.abc import Sequence
from itertools import count

from torch import Tensor

from gradsurg.core.intervention import Intervention
from gradsurg.core.operation import Operation
from gradsurg.sites.places import Leaf, Place
from gradsurg.torch_internals import compiling
from gradsurg.transforms.base import TransformContext
from gradsurg.triggers.always import Always

_numbers = count()


class TracedHook:
    """The interventions at one module as a function of the gradient without side effects.

    The module hooks that Dynamo traces contain `if hook.mark(hook.key): register hook.call`.

    Dynamo calls `mark` once, while it traces, and takes its result as a constant: `mark` notes in
    the ledger that the site is in compiled code, which counts nothing later. Dynamo guards on the
    text `key` that it has read, and compiles anew once the key differs. A change of the
    interventions makes new hooks with new numbers, and the end of the surgery empties the key.
    """

    def __init__(self, operations: Sequence[Operation], place: Place) -> None:
        self.key = f"{place.site} {next(_numbers)}"
        links = [
            (link.apply, TransformContext(place.site, seed=each.attachment.seed, label=link.label))
            for each in operations
            for link in each.links
        ]

        def call(grad: Tensor) -> Tensor:
            for apply, context in links:
                assert apply is not None  # see `why_it_breaks`: no link keeps a state
                grad = apply(grad, context)
            return grad

        def mark(key: str) -> bool:
            for each in operations if key else ():
                entry = each.hook_at(place).entry
                entry.is_traced = True
                each.placed[entry.site] = None
            compiling.trace_as_one(call)
            return bool(key)

        self.call = call
        self.mark = compiling.called_when_traced(mark)

    def close(self) -> None:
        """Let code that was compiled with this hook be compiled anew without it."""
        self.key = ""


def why_it_breaks(intervention: Intervention) -> str:
    """Return why hooks of an intervention break a compiled graph; empty if they need not.

    In a compiled graph nothing can be decided, counted or kept: a transform must be a function of
    the gradient alone, which acts in each call of a module.
    """
    for kind in [leaf.kind_at(intervention.stage) for leaf in intervention.at.leaves]:
        if not kind.is_traced:
            return f"hooks at {kind.name} read or write more than the graph has"
    for link in intervention.facts:
        if not link.is_trusted:
            return f"the results of {link.transform!r} are checked"
        if link.apply is None:
            return f"{link.transform!r} keeps a state"
        if "deterministic" not in link.transform.properties:
            return f"{link.transform!r} draws random numbers"
    # "whole" is about sharded parameters, and these sites are at modules.
    if intervention.needs or intervention.asks - {"whole"}:
        return f"{intervention.operator!r} reads more than the gradient"
    if not isinstance(intervention.when, Always):
        return f"{intervention.when!r} decides in each step"
    if not isinstance(intervention.at, Leaf) or not intervention.at.picks_all:
        return f"{intervention.at!r} tells calls apart"
    return ""
