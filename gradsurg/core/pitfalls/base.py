"""The base of all pitfalls, their cells, and what they see of an attached surgery."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import nn

from gradsurg.effects.ledger import Ledger
from gradsurg.triggers.base import Clock

Outcome = Literal["refused", "warned", "reported", "n/a"]

PARAMETERS = "Parameters Buckets Weights Updates"
RUNNING = "Parameters.accumulated Parameters.backward_end Buckets"
MODULES = "Outputs Inputs Activations EveryModule ModuleGradients"
FULL_HOOKS = "ModuleGradients EveryModule.full_backward_pre EveryModule.full_backward"
SHARDED = "Parameters.backward Parameters.backward_end Buckets Captured"
GRADIENTS = "Outputs Inputs Nodes Uses Captured"

SiteHook = Any
Operation = Any
"""Classes of `gradsurg.core`, which pitfalls cannot import: `sites` imports pitfalls, and the core
imports `sites`."""


class Cell(NamedTuple):
    """The outcome for kinds of site in a context (a use of PyTorch) where they do not simply act.

    `kinds` are names, each alone or as `kind.mode`, or "*" for all. `text` completes
    "<kind>: <text>" with the reason, then the suggestion; names in braces are filled in.
    """

    context: str
    kinds: str
    error: type[Exception] = RuntimeError
    outcome: Outcome = "refused"
    text: str = ""

    def refused(self, text: str) -> "Cell":
        """The cell, where gradsurg raises `error`, or PyTorch an error of its own."""
        return self._replace(outcome="refused", text=text)

    def warned(self, text: str) -> "Cell":
        """The cell, where the hook acts and gradsurg warns."""
        return self._replace(outcome="warned", text=text)

    def reported(self, text: str) -> "Cell":
        """The cell, where the ledger shows a site without a gradient."""
        return self._replace(outcome="reported", text=text)

    def impossible(self, text: str) -> "Cell":
        """The cell, where PyTorch raises an error, also without hooks."""
        return self._replace(outcome="n/a", text=text)


class AttachmentLike(Protocol):
    """The part of an `Attachment` that pitfalls use; its `steps` are `OptimizerSteps`.

    `first_step` is the step at which it was attached. `is_compiled`: the compiled form of the model
    was attached. `scaler` is the GradScaler that was given to `attach`. `params_of` returns the
    parameters of a model with their names and owners; they are read once for all surgeries that
    attach or close together. `at_first_steps` are called when the first steps have ended.
    `enter_unmet` enters into the ledger the names at which no site was reached. `tell` reports a
    moment to the pitfalls. `warn_unknown_scaler` lets the aggregators warn of a scaler that was
    found. `warn_once` warns at once, and once for each `key`.
    """

    clock: Clock
    first_step: int
    ledger: Ledger
    shadow: bool
    processes: int
    is_compiled: bool
    scaler: torch.amp.GradScaler | None
    steps: Any  # Any: of a floor above
    model: nn.Module
    operations: Sequence[Operation]
    states: Mapping[str, Mapping[str, torch.Tensor]]
    params_of: Callable[[nn.Module], Sequence[Any]]  # Any: `Named`, of a floor above
    at_first_steps: list[Callable[[], None]]

    def enter_unmet(self) -> None: ...

    def warn_unknown_scaler(self) -> None: ...

    def tell(self, moment: str, *found: object) -> None: ...

    def warn_once(self, text: str, key: str = "") -> None: ...


Texts = Iterable[str] | None


class Pitfall:
    """A way in which PyTorch's hooks mislead, with its `cells` of the table of contexts.

    A pitfall may listen at moments of a surgery: it overrides the methods of these moments, and
    only those are called. One object is made for each attachment that has a kind of site in
    `cells`, except in `shadow` without effects. Texts that a method returns are emitted as warnings
    at once, each once. `stack` takes the functions that remove hooks; it is closed with the
    surgery, even if that is dropped. `done` are the moments at which it need not listen any more.
    """

    cells: ClassVar[tuple[Cell, ...]] = ()

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.done: set[str] = set()

    @classmethod
    def text(cls, context: str, **found: object) -> str:
        """The text of the cell of a context, with the names in braces filled in."""
        return next(cell.text for cell in cls.cells if cell.context == context).format(**found)

    def attached(self, attachment: AttachmentLike) -> Texts:
        """All is hooked; again after each change of the interventions."""

    def first_gradient(self, attachment: AttachmentLike, hook: SiteHook) -> Texts:
        """A gradient has come at a site for the first time."""

    def further_gradient(self, attachment: AttachmentLike, hook: SiteHook, call: int) -> Texts:
        """A further gradient of the same step has come at a site; `call` counts from 0."""

    def step_ended(self, attachment: AttachmentLike) -> Texts:
        """A step of the optimizer has ended, and is counted."""

    def first_steps_ended(self, attachment: AttachmentLike) -> Texts:
        """Two steps have ended, counted or seen by the parameters: hooks should have acted."""

    def closed(self, attachment: AttachmentLike) -> Texts:
        """The surgery ends; its hooks are still there."""
