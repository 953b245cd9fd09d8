"""When one intervention acts: its trigger, decided once a step or at each gradient."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, distributed
from torch.autograd.graph import Node

from gradsurg.core.intervention import Intervention
from gradsurg.core.session import Session
from gradsurg.sites.base import AVERAGED
from gradsurg.sites.wrapped_models import of_first_process
from gradsurg.torch_internals import autograd, random_state
from gradsurg.transforms.base import Stateless
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Decision, TensorTrigger, TriggerContext
from gradsurg.triggers.for_task import ForTask
from gradsurg.triggers.steps import Steps

STEADY = (Always(), Steps())
"""Triggers that fire in every step."""


class Firing:
    """Whether one intervention acts and is measured, for all its sites.

    `answer` is True or False if that is known for the whole step; None if the trigger has to see
    each gradient: then `decide` is asked. `sampling` says that effects are measured. `fast_path` is
    the `configuration`, another object after each change, while a `SiteHook` may take its fast
    path; else None. `is_idle` says that nothing acts or counts in this step, `skips_transform` that
    the trigger is evaluated and the transform is not called, as in steps of `shadow` that are not
    measured.
    `is_on` is False while paused and after the surgery was detached; `named_tasks` are the parts of
    the trigger that name a task of `live.backward`.
    """

    __slots__ = (
        *("configuration", "_decided_for", "is_on", "named_tasks", "_needs_context", "_passed"),
        *("_shares_answer", "_shared_flags", "_shared_observations", "_watches", "answer"),
        *("is_idle", "label", "reads_gradient", "sampling", "session", "skipped_nodes"),
        *("skips_transform", "stage", "fast_path", "trigger", "_is_stateless"),
    )

    def __init__(self, session: Session, label: str, intervention: Intervention) -> None:
        self.session = session
        self.label = label
        self.stage = intervention.stage
        self.skipped_nodes: Collection[Node] = ()
        self.is_on = True
        self.set(intervention)

    def set(self, intervention: Intervention) -> None:
        """Set the transform and the trigger; the next gradient at each site is checked in full."""
        session, self.trigger = self.session, intervention.when
        parts = self.trigger.parts
        self.named_tasks = [part for part in parts if isinstance(part, ForTask)]
        sources = [part.source for part in parts if isinstance(part, TensorTrigger)]
        # A user's trigger is watched until it has answered without a draw from a global generator.
        is_users = any(type(part).__module__.partition(".")[0] != "gradsurg" for part in parts)
        self._watches = is_users
        self.reads_gradient = "grad" in sources
        # Each process has another batch and its own switches, and all have to change the average in
        # the same way.
        shares = self.stage in AVERAGED and session.processes > 1 and not session.shadow
        self._shared_observations = intervention.forward_triggers if shares else ()
        self._shared_flags = intervention.flags if shares else ()
        self._shares_answer = shares and is_users
        self._passed: set[str] = set()  # the sites that the present switches have decided about
        needs = intervention.needs
        self._needs_context = (
            not needs.isdisjoint({"value", "entering", "layer", "gradient"}) or "value" in sources
        )
        self._is_stateless = all(isinstance(link, Stateless) for link in intervention.links)
        self.configuration = object()
        self._decided_for: bool | None = None  # `sampling` for which the decisions hold
        self.begin_step()

    def begin_step(self) -> None:
        """Decide for all sites whether the trigger fires and whether effects are measured."""
        session = self.session
        sampling = session.effects.sampling
        if self._passed:
            self._passed.clear()
        if self._decided_for is sampling:
            return
        is_steady = self.trigger in STEADY
        answer: Decision = is_steady or self._evaluate(
            TriggerContext(session.clock, session.seed, self.label)
        )
        if self._shares_answer and distributed.is_initialized():
            answer = cast(Decision, of_first_process(answer))
        self.answer = answer if isinstance(answer, bool) else None
        self.sampling = sampling
        # In shadow, a step that is not measured needs no transform without state; if the trigger is
        # `Always` there is nothing to ask either, and the whole intervention idles.
        self.skips_transform = session.shadow and not sampling and self._is_stateless
        self.is_idle = not self.is_on or (self.skips_transform and isinstance(self.trigger, Always))
        is_open = (
            self.answer is True
            and not self.is_idle
            and not (self.skips_transform or self._needs_context or self.skipped_nodes)
        )
        self.fast_path = self.configuration if is_open else None
        self._decided_for = sampling if is_steady else None

    def reevaluate(self) -> None:
        """Decide again within a step: something that the trigger reads has changed."""
        self._decided_for = None
        self.begin_step()

    def switch(self, on: bool) -> None:
        """Neither act on nor count gradients while off; once detached it stays off."""
        if self.session.target is not None:
            self.is_on = on
            self.reevaluate()

    def disable(self) -> None:
        """Pass all gradients unchanged: hooks on existing graphs stay registered."""
        self.is_on, self.is_idle, self.fast_path = False, True, None

    def skip_nodes(self, nodes: Collection[Node]) -> None:
        """Neither act on nor count gradients that arrive at these autograd nodes."""
        self.skipped_nodes = nodes
        self.reevaluate()

    def decide(self, site: str, grad: Tensor, value: Tensor | None) -> bool | Tensor:
        """Evaluate the trigger at one gradient."""
        session = self.session
        if (self._shared_observations or self._shared_flags) and distributed.is_initialized():
            self._share(site)
        key = f"{self.label}/{site}/when"
        context = TriggerContext(session.clock, session.seed, self.label, site, grad, value)
        context.state = dict(session.states.get(key, {}))
        fires = self._evaluate(context)
        if fires is None:
            raise TypeError(f"{self.trigger!r}: fires() returned None though it had the gradient")
        if self._shares_answer and distributed.is_initialized():
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

    def _share(self, site: str) -> None:
        """Take over what process 0 has seen in the forward pass, and once a pass its switches."""
        clock = self.session.clock
        for part in self._shared_observations:
            if part in clock.observations and part not in clock.shared:
                clock.observations[part] = of_first_process(clock.observations[part])
                clock.shared.add(part)
        if self._shared_flags and (site in self._passed or not self._passed):
            switches = {
                part.flag: clock.flags.get(part.flag, part.on) for part in self._shared_flags
            }
            clock.flags.update(cast("dict[str, bool]", of_first_process(switches)))
            self._passed.clear()
        self._passed.add(site)

    def _watched(self, context: TriggerContext) -> AbstractContextManager[None]:
        """Raise RuntimeError if a user's trigger draws from a global generator."""
        if not self._watches:
            return nullcontext()
        return random_state.untouched(
            f"{self.label}: {self.trigger!r}",
            context.grad.device if context.grad is not None else torch.device("cpu"),
            "Draw from a torch.Generator seeded by context.seed, context.site and the step.",
        )

    def _evaluate(self, context: TriggerContext) -> Decision:
        """The answer of the trigger. Raises TypeError if it has another type than `Decision`."""
        try:
            with self._watched(context):
                fires = self.trigger.fires(context)
            self._watches = self._watches and fires is None
        except Exception as error:  # a user's trigger may raise anything; it is raised again
            where = f"at site '{context.site}'" if context.site else "before a gradient was there"
            step = self.session.clock.step
            error.add_note(f"while {self.trigger!r} was evaluated {where}, step {step}")
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
