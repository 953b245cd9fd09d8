"""The state shared by all hooks of an attached surgery, and the decisions of one intervention."""

import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, distributed, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node

from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import Ledger, SurgeryWarning
from gradsurg.hooks.intervention import Intervention
from gradsurg.sites.base import AVERAGED, Stage
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.sites.wrapped_models import of_first_process
from gradsurg.torch_internals import autograd, random_state
from gradsurg.transforms.base import Examples, Stateless, TransformContext, TransformState
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Clock, Decision, TensorTrigger, TriggerContext
from gradsurg.triggers.for_task import ForTask
from gradsurg.triggers.steps import Steps

FORWARD = ("forward", "captured")
"""Stages at which tensors are seen outside a backward pass, and may be modified before it ends."""

EVERY_STEP = Steps()

WRITABLE = ("accumulated", "sent", "reduced", "backward_end", "step", *FORWARD)
"""Stages whose results others may write to: they end up in `.grad` or with the user."""


@dataclass(slots=True, eq=False)
class Session:
    """The state that all hooks of one attached surgery share; made by `Surgery.attach`.

    `target` is the model; None for a hook without a model, and after `close`. `rank` is the number
    of this process among the `processes` of the default process group.
    """

    effects: Effects
    clock: Clock = field(default_factory=Clock)
    states: dict[str, TransformState] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    seed: int = 0
    rank: int = 0
    processes: int = 1
    conflict_every: int = 1
    shadow: bool = False
    target: nn.Module | None = None
    steps: OptimizerSteps = field(default_factory=OptimizerSteps)
    scaler: GradScaler | None = None
    factor: float = 1.0  # of the losses of `live.backward`
    warned: set[str] = field(default_factory=set)

    @property
    def model(self) -> nn.Module:
        """The model. Raises RuntimeError if the surgery is detached."""
        self.check_attached()
        assert self.target is not None
        return self.target

    def check_attached(self) -> None:
        """Raise RuntimeError if the surgery is detached."""
        if self.target is None:
            raise RuntimeError("the block has ended, and with it the surgery: attach it again")

    @property
    def measures_conflicts(self) -> bool:
        """Whether the conflict of several tasks is measured in this step."""
        return self.effects.sampling and self.clock.step % self.conflict_every == 0

    @property
    def is_scaled(self) -> bool:
        """Whether an enabled GradScaler scales the losses."""
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def loss_scale(self) -> float:
        """What the losses were multiplied by: the factor of the GradScaler and of `backward`."""
        is_scaled = self.scaler is not None and self.is_scaled
        return self.factor * (self.scaler.get_scale() if self.scaler and is_scaled else 1.0)

    def warn_once(self, text: str, key: str = "") -> None:
        """Warn the caller outside gradsurg; texts with the same `key` are emitted once."""
        if (key or text) not in self.warned:
            self.warned.add(key or text)
            warn_user(text)

    def close(self) -> None:
        """Release the model, the optimizers and the counts on the device."""
        self.target = self.scaler = None
        self.steps.close()
        self.clock.observations.clear()
        self.clock.error = self.clock.labels = None
        self.ledger.settle()


class HookController:
    """The decisions shared by all hooks of one intervention, updated once a step.

    `labels` name the transform, or each link of a `Chain`.
    """

    __slots__ = (
        "configuration",
        "decided_for",
        "examples_of",
        "fast",
        "fast_allowed",
        "firing",
        "has_group_link",
        "has_several_tasks",
        "is_writable",
        "label",
        "labels",
        "links",
        "max_calls",
        "named_tasks",
        "needs_context",
        "needs_entering",
        "needs_gradient",
        "needs_value",
        "observing",
        "on",
        "passed",
        "sampling",
        "session",
        "shared_flags",
        "shares_decision",
        "skipped_nodes",
        "skips_step",
        "skips_transform",
        "stage",
        "stateless",
        "steady_autocast",
        "transform",
        "trigger",
        "trigger_reads_gradient",
        "watches_trigger",
    )

    def __init__(self, session: Session, labels: Sequence[str], intervention: Intervention) -> None:
        self.session = session
        self.labels = tuple(labels)
        self.label = " -> ".join(labels)
        self.stage: Stage = intervention.stage
        self.is_writable = self.stage in WRITABLE
        self.max_calls = 1  # the most gradients at one site in this step
        # Makes the gradients of single examples, for a transform that needs them.
        self.examples_of: Callable[[Sequence[str], Sequence[Tensor]], Examples] | None = None
        self.has_several_tasks = False  # whether `live.backward` sends one gradient a task
        self.on = True
        self.skipped_nodes: Collection[Node] = ()
        self.set(intervention)

    def set(self, intervention: Intervention) -> None:
        """Set the transform and the trigger, also after states were loaded.

        The next gradient at each site is checked in full.
        """
        self.transform = intervention.operator
        self.links = list(zip(self.labels, intervention.links, strict=True))
        self.trigger = intervention.when
        parts = self.trigger.parts
        self.named_tasks = [part for part in parts if isinstance(part, ForTask)]
        sources = {part.source for part in parts if isinstance(part, TensorTrigger)}
        # A user's trigger, until it has answered without a draw from a global generator.
        is_users = any(type(part).__module__.partition(".")[0] != "gradsurg" for part in parts)
        self.watches_trigger = is_users
        self.trigger_reads_gradient = "grad" in sources
        # Each process has another batch and its own switches, and all have to change the average in
        # the same way.
        session = self.session
        shares = self.stage in AVERAGED and session.processes > 1 and not session.shadow
        reading = [part for part in parts if isinstance(part, TensorTrigger) and part.reads_forward]
        self.observing = reading if shares else []
        self.shared_flags = intervention.flags if shares else ()
        self.shares_decision = shares and is_users
        self.passed: set[str] = set()  # the sites that the present switches have decided about
        self.needs_entering = "entering" in intervention.needs
        self.needs_gradient = "gradient" in intervention.needs
        self.needs_value = "value" in intervention.needs or "value" in sources
        self.needs_context = self.needs_value or self.needs_entering or self.needs_gradient
        self.stateless = all(isinstance(link, Stateless) for link in intervention.links)
        self.has_group_link = intervention.scope == "group"
        # A whole step is under autocast or not, so one check a step is enough; not where steps are
        # not counted, or in a forward pass, which enters and leaves autocast.
        has_clock = bool(self.session.steps.optimizers)
        self.steady_autocast = has_clock and self.stage not in FORWARD
        self.configuration = object()
        # The value of `sampling` for which the decisions of `begin_step` hold in later steps too.
        self.decided_for: bool | None = None
        self.begin_step()

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.session.clock.step

    @property
    def stateful(self) -> str:
        """The repr of the first transform or trigger with a state per site; empty if none has."""
        for _, link in self.links:
            if link.init(torch.zeros(1)):
                return repr(link)
        # The state of a trigger is made when it is first evaluated.
        keys = [key for key in self.session.states if key.endswith("/when")]
        has_state = any(key.partition("/")[0] == self.label for key in keys)
        return repr(self.trigger) if has_state else ""

    def begin_step(self) -> None:
        """Decide for all sites whether the trigger fires and whether effects are sampled.

        `firing` is None if the trigger has to see the site or its gradient.
        """
        session = self.session
        sampling = session.effects.sampling
        self.fast: object = None  # the configuration, once the fast path is known to be open
        self.passed.clear()
        if self.decided_for is sampling:
            return
        always = isinstance(self.trigger, Always)
        steady = always or self.trigger == EVERY_STEP
        fires = steady or self._evaluate(TriggerContext(session.clock, session.seed, self.label))
        if self.shares_decision and distributed.is_initialized():
            fires = of_first_process(fires)
        self.firing = fires if isinstance(fires, bool) else None
        self.sampling = sampling
        # In shadow, a transform without state has no effect in a step that is not measured,
        self.skips_transform = session.shadow and not sampling and self.stateless
        # nor has a trigger that always fires.
        self.skips_step = self.skips_transform and always
        self.fast_allowed = (
            self.on
            and fires is True
            and not (self.skips_transform or self.needs_context)
            and not self.skipped_nodes
        )
        if steady:
            self.decided_for = sampling

    def reevaluate(self) -> None:
        """Decide again within a step: something a trigger reads has changed."""
        self.decided_for = None
        self.begin_step()

    def pause(self) -> None:
        """Neither act on nor count gradients until `resume`."""
        self.on = False
        self.reevaluate()

    def resume(self) -> None:
        """End a pause."""
        self.on = True
        self.reevaluate()

    def skip_nodes(self, nodes: Collection[Node]) -> None:
        """Neither act on nor count gradients that arrive at these autograd nodes."""
        self.skipped_nodes = nodes
        self.reevaluate()

    def disable(self) -> None:
        """Pass all gradients unchanged: hooks on existing graphs stay registered."""
        self.on = self.fast_allowed = False
        self.fast = None

    def count_repeat(self, context: TransformContext) -> None:
        """Number a further gradient of the same step at one site."""
        context.call += 1
        if context.call >= self.max_calls:
            self.max_calls = context.call + 1

    def opens_fast_path(self, checked: object) -> bool:
        """Whether a site may use the fast path; kept for the step if autocast cannot change in it.

        `checked` is the configuration under which the site last passed all checks.
        """
        if checked is not self.configuration or not self.fast_allowed or autograd.any_autocast():
            return False
        if self.steady_autocast:
            self.fast = self.configuration
        return True

    def fires(self, site: str, grad: Tensor, value: Tensor | None) -> bool | Tensor:
        """Evaluate the trigger at one gradient."""
        session = self.session
        if (self.observing or self.shared_flags) and distributed.is_initialized():
            self._share_observations()
            self._share_flags(site)
        key = f"{self.label}/{site}/when"
        context = TriggerContext(session.clock, session.seed, self.label, site, grad, value)
        context.state = dict(session.states.get(key, {}))
        fires = self._evaluate(context)
        if fires is None:
            raise TypeError(f"{self.trigger!r}: fires() returned None though it had the gradient")
        if self.shares_decision and distributed.is_initialized():
            fires = cast(bool | Tensor, of_first_process(fires))
        if context.state:
            if any(autograd.is_batched(tensor) for tensor in context.state.values()):
                raise many_at_once(self.trigger, site)
            session.states[key] = {
                name: autograd.unwrapped(tensor) for name, tensor in context.state.items()
            }
        if isinstance(fires, Tensor) and fires.device != grad.device:
            return fires.to(grad.device, non_blocking=True)
        return fires

    def _share_observations(self) -> None:
        """Replace what the triggers have seen in the forward pass by what process 0 has seen."""
        clock = self.session.clock
        for part in self.observing:
            if part in clock.observations and part not in clock.shared:
                clock.observations[part] = of_first_process(clock.observations[part])
                clock.shared.add(part)

    def _share_flags(self, site: str) -> None:
        """Take over the switches of process 0, once for all sites of a backward pass or step."""
        if self.shared_flags and (site in self.passed or not self.passed):
            flags = self.session.clock.flags
            switches = {part.flag: flags.get(part.flag, part.on) for part in self.shared_flags}
            flags.update(cast("dict[str, bool]", of_first_process(switches)))
            self.passed.clear()
        self.passed.add(site)

    def _watched(self, context: TriggerContext) -> AbstractContextManager[None]:
        """Raise RuntimeError if the trigger draws from a global generator."""
        return random_state.untouched(
            f"{self.label}: {self.trigger!r}",
            context.grad.device if context.grad is not None else torch.device("cpu"),
            "Draw from a torch.Generator seeded by context.seed, context.site and the step.",
        )

    def _evaluate(self, context: TriggerContext) -> Decision:
        """The answer of the trigger. Raises TypeError if it has another type than `Decision`."""
        try:
            with self._watched(context) if self.watches_trigger else nullcontext():
                fires = self.trigger.fires(context)
            self.watches_trigger = self.watches_trigger and fires is None
        except Exception as error:  # a user's trigger may raise anything; it is raised again
            where = f"at site '{context.site}'" if context.site else "before a gradient was there"
            error.add_note(f"while {self.trigger!r} was evaluated {where}, step {self.step}")
            raise
        if isinstance(fires, Tensor):
            text = f"{fires.dtype} of shape {list(fires.shape)}"
            fits = fires.dtype is torch.bool and not fires.ndim
        else:
            text, fits = repr(fires), fires is None or isinstance(fires, bool)
        if not fits:
            raise TypeError(
                f"{self.trigger!r}: fires() must return True, False, None or a bool tensor of no "
                f"dimension, found {text}"
            )
        return fires


def many_at_once(stateful: object, site: str) -> RuntimeError:
    """The error for a state inside vmap, which `is_grads_batched` uses too."""
    return RuntimeError(
        f"{stateful!r} keeps one state for each site, and inside vmap or with is_grads_batched "
        f"the site '{site}' has many gradients at once; differentiate for each of them"
    )


def warn_user(text: str) -> None:
    """Warn the first caller outside gradsurg."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("gradsurg."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, SurgeryWarning, stacklevel=level)
