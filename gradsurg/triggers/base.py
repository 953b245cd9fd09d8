"""Base classes of triggers: the condition under which a transform acts, with `&`, `|` and `~`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from gradsurg.plugins.fields import validated

Decision = bool | Tensor | None
"""True, False, a bool tensor without dimensions (decided on the device) or None (not known yet)."""

WHEN = "/when"
"""The end of the key `label/site/when` of a trigger's state."""


@dataclass(slots=True)
class Clock:
    """Progress of one attachment: steps and epochs done, flags, and the state of the current pass.

    `task` is the task whose gradient is flowing. `error` is the gradient of the model's output in
    the current backward pass, recorded if a transform needs it. `batch` has the tensors that
    `live.set_batch` was given in this step. `observations` has the result of
    `TensorTrigger.observe` for each trigger in the current forward pass, and `shared` the triggers
    for which it was replaced by the result in process 0. `backwards` counts the calls of
    `live.backward` where no optimizer counts steps.
    """

    step: int = 0
    epoch_length: int | None = None
    counted_epochs: int = 0
    flags: dict[str, bool] = field(default_factory=dict)
    task: str = ""
    error: Tensor | None = None
    batch: Mapping[str, Tensor] = field(default_factory=dict)
    backwards: int = 0
    observations: "dict[Trigger, object]" = field(default_factory=dict)
    shared: "set[Trigger]" = field(default_factory=set)

    @property
    def epoch(self) -> int:
        """Epochs done: step // epoch_length, or the calls of `live.next_epoch()` without one."""
        if self.epoch_length is not None:
            return self.step // self.epoch_length
        return self.counted_epochs


@dataclass(slots=True)
class TriggerContext:
    """Inputs of `Trigger.fires`.

    `label` is the intervention's label and `state` the tensors that the trigger keeps for this
    site. `site` (the site's id), `grad` (the gradient there) and `value` (the tensor whose gradient
    it is) are None at the beginning of a step. `value` is also None at sites without such a tensor,
    such as autograd nodes.
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
        """Return a pseudo-random number in [0, 1) that depends on the seed, the step and `key`.

        It does not depend on the intervention, so a treated arm and its control draw the same.
        """
        text = "/".join(map(str, (self.seed, self.step, *key)))
        digest = blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64


class Trigger(ABC):
    """Condition under which a transform acts.

    The attached surgery calls `fires` at the beginning of each optimizer step, once for all sites
    of the intervention. It calls it again when the epoch changes, or when the backward pass of the
    task that a `ForTask` names begins or ends. If the answer was None, it calls `fires` at each
    gradient of the step, before the transform. `Always` is not called.

    Subclasses are decorated with `@validated`, and their fields are their whole configuration.
    Combine triggers with `a & b`, `a | b` and `~a`.
    """

    step_based: ClassVar[bool] = False
    """Reads the optimizer step, so that it needs an optimizer or explicit steps to advance."""

    on_device: ClassVar[bool] = False
    """Decides by a tensor. A combination evaluates it after the triggers decided on the host."""

    @abstractmethod
    def fires(self, context: TriggerContext) -> Decision:
        """Return whether the transform acts.

        `context.site` is None at the beginning of a step; return None there to be called for each
        gradient of the step, where None is an error. Return a bool for a condition known on the
        host: at False the transform is not called. Return a bool tensor for a condition on the
        values of a tensor: it selects between the results on the device, without a synchronization.
        """

    @cached_property
    def parts(self) -> "tuple[Trigger, ...]":
        """The elementary triggers of a combination; any other trigger by itself."""
        return (self,)

    def __and__(self, other: "Trigger") -> "Trigger":
        return AllOf((self, _check_trigger(other)))

    def __or__(self, other: "Trigger") -> "Trigger":
        return AnyOf((self, _check_trigger(other)))

    def __invert__(self) -> "Trigger":
        return Unless(self)


class _Combination(Trigger):
    """Several triggers, those decided on the host first: they can save the work on the device."""

    of: tuple[Trigger, ...]

    @cached_property
    def parts(self) -> tuple[Trigger, ...]:
        return tuple(part for trigger in self.of for part in trigger.parts)

    @cached_property
    def _ordered(self) -> list[Trigger]:
        return sorted(self.of, key=lambda trigger: any(part.on_device for part in trigger.parts))

    def _combine(self, context: TriggerContext, absorbing: bool) -> Decision:
        """Return the conjunction (`absorbing` False) or the disjunction (True) of all decisions.

        Triggers after the first one that returns `absorbing` are not evaluated. None if one
        decision is None and no other is `absorbing`.
        """
        neutral = not absorbing
        result: Decision = neutral
        for trigger in self._ordered:
            decision = trigger.fires(context)
            if decision is absorbing:
                return absorbing
            if decision is None or result is None:
                result = None
            elif result is neutral:
                result = decision
            elif decision is not neutral:
                result = result | decision if absorbing else result & decision
        return result


@validated
class AllOf(_Combination):
    """Fire when all of the triggers `of` fire: `a & b`.

    Triggers decided on the host are evaluated first, and those after the first one that returns
    False are not evaluated: the state of a `Threshold(release=)` among them does not change.
    """

    of: Annotated[tuple[Trigger, ...], Field(min_length=1)]

    def fires(self, context: TriggerContext) -> Decision:
        return self._combine(context, absorbing=False)


@validated
class AnyOf(_Combination):
    """Fire when at least one of the triggers `of` fires: `a | b`.

    Triggers decided on the host are evaluated first, and those after the first one that returns
    True are not evaluated: the state of a `Threshold(release=)` among them does not change.
    """

    of: Annotated[tuple[Trigger, ...], Field(min_length=1)]

    def fires(self, context: TriggerContext) -> Decision:
        return self._combine(context, absorbing=True)


@validated
class Unless(Trigger):
    """Fire when the trigger `of` does not fire: `~a`."""

    of: Trigger

    @cached_property
    def parts(self) -> tuple[Trigger, ...]:
        return self.of.parts

    def fires(self, context: TriggerContext) -> Decision:
        decision = self.of.fires(context)
        if decision is None:
            return None
        return ~decision if isinstance(decision, Tensor) else not decision


class TensorTrigger(Trigger):
    """Condition on a tensor, named by the field `source`.

    | source | tensor |
    |---|---|
    | `grad` | the gradient at the site |
    | `value` | the tensor whose gradient it is |
    | `batch` | the first tensor among the model's inputs |
    | `input:<module>`, `output:<module>` | the first tensor among a module's inputs or outputs |

    The batch, inputs and outputs are observed in the forward pass and the observation is kept for
    the backward pass. If a module is called several times the last call counts; of several forward
    passes before a backward pass the last counts, with a warning on detach.
    """

    source: str

    homogeneous: ClassVar[bool] = False
    """The decision is the same for x and c * x, c > 0."""

    @property
    def reads_forward(self) -> bool:
        """Whether it observes the batch or a module's tensors in the forward pass."""
        return self.source not in ("grad", "value")

    @abstractmethod
    def observe(self, tensor: Tensor) -> object:
        """Return the shape or a measurement of a tensor, to be kept; runs under `no_grad`.

        Leave measurements on the device.
        """

    @abstractmethod
    def decide(self, observation: object, context: TriggerContext) -> bool | Tensor:
        """Return whether the transform acts, given an observation."""

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
                        f"{self!r}: its source '{self.source}' was not observed in the forward "
                        f"pass before the gradient at '{context.site}'. It must be called with a "
                        "tensor inside the model's forward, after attaching."
                    )
                return self.decide(context.clock.observations[self], context)
        if tensor is None:
            raise ValueError(
                f"{self!r}: source 'value' needs the tensor whose gradient passes, and the site "
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


def module_of(site: str) -> str:
    """Return the name of the module that a site belongs to.

    Site ids are `module#call...` or a parameter's name.
    """
    module, mark, _ = site.partition("#")
    return module if mark else site.rpartition(".")[0]


def _check_trigger(other: object) -> Trigger:
    if not isinstance(other, Trigger):
        raise TypeError(f"a trigger combines with triggers, found {other!r}")
    return other
