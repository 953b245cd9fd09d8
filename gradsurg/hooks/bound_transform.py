"""One transform at one site, with its state there."""

import torch
from torch import Tensor

from gradsurg.effects.ledger import Entry
from gradsurg.hooks.controller import HookController
from gradsurg.hooks.rules import known
from gradsurg.transforms.base import Stateless, Transform, TransformContext, TransformState

UNBORN: TransformState = {}  # the state of a site that has met no gradient yet
UNCOUNTED = -1  # the step of a site that has met no gradient yet


class BoundTransform:
    """One transform at one site, with its state there."""

    __slots__ = (
        "apply",
        "context",
        "keeps_shape",
        "key",
        "known",
        "label",
        "slot",
        "state",
        "states",
        "transform",
        "update",
    )

    def __init__(
        self, label: str, transform: Transform, operation: HookController, entry: Entry
    ) -> None:
        self.label = label
        self.key = f"{label}/{entry.site}"
        self.slot = operation.effects.slot(label, entry)
        self.states = operation.states
        self.state = operation.states.get(self.key, UNBORN)
        self.context = TransformContext(
            self.key, UNCOUNTED, seed=operation.seed, flow=operation.clock
        )
        self.take(transform)

    def take(self, transform: Transform) -> None:
        """What is to act here from now on."""
        self.transform = transform
        self.apply = transform.apply if isinstance(transform, Stateless) else None
        self.update = transform.update
        # By its properties, and its first result here was looked at in full.
        self.keeps_shape = "elementwise" in transform.properties
        self.known = known(transform)

    def keep(self, state: TransformState, fires: Tensor | None = None) -> None:
        """Take over the next state; under create_graph it must not hold on to the graph.

        Where the device decides, the old state stays unless the trigger fires.
        """
        if fires is not None and state:
            before = self.state
            if state.keys() != before.keys():
                raise TypeError(
                    f"{self.label}: {self.transform!r} has a state of {', '.join(state)} and began "
                    f"with {', '.join(before) or 'none'}: init() must make all of it, for the "
                    "trigger may keep what was before"
                )
            state = {name: torch.where(fires, new, before[name]) for name, new in state.items()}
        if any(tensor.requires_grad for tensor in state.values()):
            state = {name: tensor.detach() for name, tensor in state.items()}
        self.state = state
        if state:
            self.states[self.key] = state
