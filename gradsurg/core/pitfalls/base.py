"""The base of all pitfalls, and what they see of an attached surgery."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from gradsurg.effects.ledger import Ledger
from gradsurg.torch_internals import autograd
from gradsurg.triggers.base import Clock

Outcome = Literal["refused", "warned", "reported", "n/a"]

PARAMETERS = "Parameters Buckets Weights Updates"
RUNNING = "Parameters.accumulated Parameters.backward_end Buckets"
MODULES = "Outputs Inputs Activations EveryModule ModuleGradients"
FULL_HOOKS = "ModuleGradients EveryModule.full_backward_pre EveryModule.full_backward"
SHARDED = "Parameters.backward Parameters.backward_end Weights Updates MatchedUpdates"
GRADIENTS = "Outputs Inputs Nodes Uses Captured"

ENOUGH = 2
"""The number of steps after which it is told what has not acted."""


SiteHook = Any
Operation = Any
"""Classes of `gradsurg.core`. Any: sites raise errors of pitfalls, so the core is above them."""


class AttachmentLike(Protocol):
    """An `Attachment`, as a pitfall sees it; its `steps` are `OptimizerSteps`.

    `is_compiled` says that the compiled form of the model was attached, `scaler` is the GradScaler
    that was given to `attach`, `warn_once` tells a text at once, and once for each `key`.
    `tell_scaler` tells the aggregators of a scaler that was found. `expect_unmet` enters into the
    ledger the names at which no site was met. `at_first_steps` are called once, when it is told
    what has not acted in the first steps.
    """

    clock: Clock
    ledger: Ledger
    shadow: bool
    processes: int
    is_compiled: bool
    scaler: torch.amp.GradScaler | None
    steps: Any  # Any: of a floor above

    @property
    def model(self) -> nn.Module: ...

    @property
    def operations(self) -> Sequence[Operation]: ...

    @property
    def states(self) -> Mapping[str, Mapping[str, torch.Tensor]]: ...

    @property
    def at_first_steps(self) -> list[Callable[[], None]]: ...

    def expect_unmet(self) -> None: ...

    def tell_scaler(self) -> None: ...

    def warn_once(self, text: str, key: str = "") -> None: ...


Texts = Iterable[str] | None


def params_of(model: nn.Module) -> list[torch.Tensor]:
    """The parameters of a model, each once, in their order."""
    # As `model.parameters()`, in a part of its time: it is read at each attach.
    tables, _ = autograd.tensor_tables(model)
    tensors = (tensor for table in tables for tensor in table.values() if tensor is not None)
    return list(dict.fromkeys(tensors))


class Pitfall:
    """A way in which PyTorch's hooks mislead: a row of the table of contexts for each of its kinds.

    `context` is where it happens. `kinds` are names of kinds of site, each alone or as `kind.mode`,
    or "*" for all. `outcome` is "refused" if gradsurg raises `error`, "warned" if the hook acts and
    gradsurg warns, "reported" if the ledger shows a site without a gradient, and "n/a" if PyTorch
    raises an error, also without hooks. `why` completes "<kind>: <why>", and `instead` is the way
    out; names in braces are filled in.

    A pitfall may listen at moments of a surgery: it overrides their methods, and others are not
    entered. Its object is made for one attachment of which a kind is one of `kinds`, and none in
    `shadow` without effects. Texts that a method returns are told at once, each once. `stack`
    takes the removals of hooks; it is closed with the surgery, also if that is dropped. `done` are
    the moments at which it need not listen any more.
    """

    context: ClassVar[str] = ""
    kinds: ClassVar[str] = ""
    outcome: ClassVar[Outcome] = "refused"
    error: ClassVar[type[Exception]] = RuntimeError
    why: ClassVar[str] = ""
    instead: ClassVar[str] = ""

    @classmethod
    def sentences(cls, **found: object) -> str:
        """The reason and the way out, with names in braces filled in if they are given.

        A way out in lower case follows a semicolon, and no full stop follows it.
        """
        text = f"{cls.why}. {cls.instead}." if cls.instead else f"{cls.why}."
        if cls.instead[:1].islower():
            text = f"{cls.why}; {cls.instead}"
        return text.format(**found) if found else text

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.done: set[str] = set()

    def attached(self, attachment: AttachmentLike) -> Texts:
        """All is hooked; again after each change of the interventions."""

    def first_gradient(self, attachment: AttachmentLike, hook: SiteHook) -> Texts:
        """A gradient has come at a site for the first time."""

    def further_gradient(self, attachment: AttachmentLike, hook: SiteHook, call: int) -> Texts:
        """A further gradient of the same step has come at a site; `call` counts from 0."""

    def forward_ended(self, attachment: AttachmentLike, output: object) -> Texts:
        """A forward pass of the model has ended."""

    def step_ended(self, attachment: AttachmentLike) -> Texts:
        """A step of the optimizer has ended, and is counted."""

    def state_loaded(self, attachment: AttachmentLike) -> Texts:
        """The state of a surgery was loaded."""

    def closed(self, attachment: AttachmentLike) -> Texts:
        """The surgery ends; its hooks are still there."""
