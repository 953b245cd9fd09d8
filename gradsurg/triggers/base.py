"""What a trigger is: a condition as data, decided on the host where it can be."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator
from torch import Tensor

Decision = bool | Tensor | None
"""True or False; where the device decides, a bool tensor of no dimension; None: not known yet."""


@dataclass(slots=True)
class Clock:
    """What all interventions of an attachment share: steps and epochs done, flags, what was seen,
    whose gradient is flowing.

    `observations` holds what sourced triggers have looked at in the forward at hand, `error` the gradient
    of what the model has returned in the backward at hand, where a transform asks for it.
    `backwards` numbers those of several losses where no optimizer tells which step they are of.
    """

    step: int = 0
    epoch_length: int | None = None
    counted_epochs: int = 0
    flags: dict[str, bool] = field(default_factory=dict)
    task: str = ""
    error: Tensor | None = None
    backwards: int = 0
    observations: "dict[Trigger, object]" = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """Epochs done: from the steps where an epoch's length is known, else as they were told."""
        if self.epoch_length is not None:
            return self.step // self.epoch_length
        return self.counted_epochs


@dataclass(slots=True)
class TriggerContext:
    """What a trigger may ask. When a step begins there is no site and no gradient yet.

    `label` is the intervention's, `site` the id of the place, `grad` what passes there, `value` the
    tensor whose gradient that is, `state` the trigger's own tensors at this site.
    """

    clock: Clock
    seed: int = 0
    label: str = ""
    site: str | None = None
    grad: Tensor | None = None
    value: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Optimizer steps done, from 0."""
        return self.clock.step

    @property
    def epoch(self) -> int:
        """Epochs done, from 0."""
        return self.clock.epoch

    def chance(self, *key: object) -> float:
        """A number in [0, 1) from the surgery's seed, the step and `key` alone.

        Not from the intervention: an arm and its control draw the same.
        """
        text = "/".join(map(str, (self.seed, self.step, *key)))
        digest = blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64


class Trigger(ABC):
    """A condition: a frozen value made by `@validated`, its fields its whole configuration.

    Triggers combine: `a & b`, `a | b`, `~a`. `step_based` says that it reads the step clock, which
    somebody has to move; `on_device` that it says a tensor, so that in a combination it is asked
    after those that the host decides.
    """

    step_based: ClassVar[bool] = False
    on_device: ClassVar[bool] = False

    @abstractmethod
    def fires(self, context: TriggerContext) -> Decision:
        """Whether the transform acts.

        It is asked once when a step begins, and if it then says None again at every gradient, where
        None is refused. What
        the host can decide is a bool, and the transform is not called at False; what depends on the
        values of a tensor is a tensor, and nothing waits for it.
        """

    @property
    def parts(self) -> "Iterator[Trigger]":
        """The conditions that it is made of: itself, unless it is a combination."""
        yield self

    def __and__(self, other: "Trigger") -> "Trigger":
        from gradsurg.triggers.all_of import AllOf

        return AllOf((self, _trigger(other)))

    def __or__(self, other: "Trigger") -> "Trigger":
        from gradsurg.triggers.any_of import AnyOf

        return AnyOf((self, _trigger(other)))

    def __invert__(self) -> "Trigger":
        from gradsurg.triggers.unless import Unless

        return Unless(self)


class TensorTrigger(Trigger):
    """A condition on a tensor: its `source` says which.

    `grad` is what passes at the site, `value` the tensor whose gradient that is; `batch` is the
    model's first input, `input:<module>` and `output:<module>` are the first tensors that a module
    takes and gives. What a trigger wants of the last three is remembered from the forward to the
    backward: of several calls, the last one's, and nothing of an earlier forward of the model. A
    backward through an earlier forward is decided by the last one too, and told when the block
    ends.
    """

    source: str

    homogeneous: ClassVar[bool] = False  # whether it says the same of a tensor times a number > 0

    @abstractmethod
    def observe(self, tensor: Tensor) -> object:
        """What is remembered of a tensor: a shape, or a measurement that stays on the device.

        It is called without gradients.
        """

    @abstractmethod
    def decide(self, observation: object, context: TriggerContext) -> bool | Tensor:
        """Whether what was seen fires it."""

    def fires(self, context: TriggerContext) -> Decision:
        if context.site is None:
            return None
        match self.source:
            case "grad":
                tensor = context.grad
            case "value":
                tensor = context.value
            case _:
                if self not in context.clock.observations:
                    raise RuntimeError(
                        f"{self!r}: nothing was seen of its source '{self.source}' in the forward "
                        f"before the gradient at '{context.site}': it is called, with a tensor, "
                        "inside the model's forward, and is seen from the forward on that follows "
                        "attaching"
                    )
                return self.decide(context.clock.observations[self], context)
        if tensor is None:
            raise ValueError(
                f"{self!r}: source 'value' is the tensor whose gradient passes, and the site "
                f"'{context.site}' has none"
            )
        with torch.no_grad():
            observation = self.observe(tensor)
        return self.decide(observation, context)


def _check_source(source: str) -> str:
    kind, colon, name = source.partition(":")
    if source in ("grad", "value", "batch") or (kind in ("input", "output") and colon and name):
        return source
    raise ValueError("must be grad, value, batch, input:<module> or output:<module>")


Source = Annotated[str, AfterValidator(_check_source)]


def combined(triggers: Sequence[Trigger], context: TriggerContext, decides: bool) -> Decision:
    """What several triggers say together, where one that says `decides` decides for all.

    Behind that one none is asked. Of what tensors say, all must be True where False decides, and
    one must where True does.
    """
    neutral = not decides
    result: Decision = neutral
    for trigger in triggers:
        fires = trigger.fires(context)
        if fires is decides:
            return decides
        if fires is None or result is None:
            result = None
        elif result is neutral:
            result = fires
        elif fires is not neutral:
            result = result | fires if decides else result & fires
    return result


def host_first(triggers: Sequence[Trigger]) -> list[Trigger]:
    """In the order in which they are asked: what the host decides can spare the device its work."""
    return sorted(triggers, key=lambda trigger: any(part.on_device for part in trigger.parts))


def module_of(site: str) -> str:
    """The module that a site is in: ids are `module#call...`, or a parameter's name."""
    module, mark, _ = site.partition("#")
    return module if mark else site.rpartition(".")[0]


def _trigger(other: object) -> Trigger:
    if not isinstance(other, Trigger):
        raise TypeError(f"a trigger combines with triggers, found {other!r}")
    return other
