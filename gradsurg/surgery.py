"""Attach interventions to a live model, and take them off again."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from gradsurg.effects import Effects
from gradsurg.intervention import Intervention, labels_of
from gradsurg.ledger import SurgeryWarning
from gradsurg.live import Live, Patient
from gradsurg.transforms.base import State
from gradsurg.triggers.base import Clock


class Surgery:
    """An ordered list of interventions that can be attached to a model, with their state.

    `seed` decides the random numbers of transforms and triggers that draw some; the global
    generators are never touched.
    """

    def __init__(self, *interventions: Intervention, seed: int = 0) -> None:
        for item in interventions:
            if not isinstance(item, Intervention):
                raise TypeError(f"Surgery takes Interventions, found {item!r}")
        self._interventions = interventions
        self.seed = seed
        self._clock = Clock()
        self._states: dict[str, State] = {}
        self._live: Live | None = None

    def __repr__(self) -> str:
        return f"Surgery({', '.join(map(repr, self.interventions))}, seed={self.seed})"

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """What it does, in order; `live.add`, `remove` and `set` change it."""
        return self._live.interventions if self._live is not None else self._interventions

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The label of every link of every intervention, as logs have them."""
        if self._live is not None:
            return self._live.labels
        labels: list[tuple[str, ...]] = []
        for item in self._interventions:
            labels.append(labels_of(item, {name for names in labels for name in names}))
        return tuple(labels)

    @contextmanager
    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        effects_every: int = 1,
        shadow: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        steps_per_epoch: int | None = None,
    ) -> "Iterator[Live]":
        """Hook `model` for the length of a block; all hooks are gone after it, whatever happens.

        `optimizer` moves the step clock that triggers read, and is needed by stage `step`. Effects
        are measured every `effects_every` steps, 0 for never. `shadow` measures without applying.
        Tell the `scaler` if losses are scaled: a transform for which the scale matters is then
        refused at stages that see scaled gradients. Raises LookupError if a selector matches
        nothing, with what there is to match.
        """
        if self._live is not None:
            raise RuntimeError("this surgery is attached already; make a second one")
        self._clock.epoch_length = steps_per_epoch
        live = Live(
            Patient(model, optimizer, scaler),
            Effects(effects_every),
            shadow,
            self._clock,
            self._states,
            self.seed,
        )
        with ExitStack() as stack:
            stack.callback(self._detach, live)
            for intervention in self._interventions:
                live._hook(live._admit(intervention))
            self._live = live
            if optimizer is not None:
                stack.callback(optimizer.register_step_post_hook(lambda *_: live.tick()).remove)
            yield live
            live.effects.flush()
            for complaint in live._complaints():
                warnings.warn(complaint, SurgeryWarning, stacklevel=3)

    def plan(self, model: nn.Module) -> str:
        """What would be hooked, where and at what stage; nothing is touched."""
        lines = []
        for intervention, labels in zip(self.interventions, self.labels, strict=True):
            sites = intervention.at.find(model)
            lines.append(f"{' -> '.join(labels)} at {intervention.at!r}")
            lines.append(f"  stage {intervention.stage}, when {intervention.when!r}")
            lines.extend(f"  {site}" for site in sites)
        return "\n".join(lines) or "no intervention"

    def state_dict(self) -> dict[str, object]:
        """Step, epoch, switches and the state of transforms and triggers, for a checkpoint.

        Plain tensors, numbers and strings.
        """
        return {
            "step": self._clock.step,
            "epoch": self._clock.counted_epochs,
            "flags": dict(self._clock.flags),
            "transforms": self._names(),
            "states": {key: dict(state) for key, state in self._states.items()},
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take up the state of an equal surgery, attached or not.

        Raises ValueError if it is of another one.
        """
        if state.get("transforms") != self._names():
            raise ValueError(
                f"this state is of {state.get('transforms')}, the surgery is {self._names()}"
            )
        step, states = state.get("step"), state.get("states")
        epoch, flags = state.get("epoch", 0), state.get("flags", {})
        if (
            not isinstance(step, int)
            or not isinstance(states, dict)
            or not isinstance(epoch, int)
            or not isinstance(flags, dict)
        ):
            raise ValueError("step must be a number and states a dict: is this a surgery's state?")
        self._clock.step, self._clock.counted_epochs = step, epoch
        self._clock.flags.update(flags)
        self._states.clear()
        self._states.update({key: dict(own) for key, own in states.items()})
        if self._live is not None:
            self._live._refresh()

    def _names(self) -> list[str]:
        return [f"{item.transform!r} at {item.at!r}" for item in self.interventions]

    def _detach(self, live: Live) -> None:
        if self._live is live:
            self._interventions = live.interventions
        self._live = None
        live._close()
