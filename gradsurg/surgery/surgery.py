"""Surgery: interventions that are attached to a model for the length of a block."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.hooks.controller import Session
from gradsurg.hooks.intervention import Intervention, labels_of
from gradsurg.sites import tree
from gradsurg.sites.selection import params_of
from gradsurg.sites.tree_table import TensorSpec, plural
from gradsurg.surgery.live import Live
from gradsurg.surgery.state_in_model import store_in_model
from gradsurg.transforms.base import Stateless, TransformState, init_all
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
        # Aggregators combine the gradients that the transforms return, so they come last.
        self._interventions = tuple(
            sorted(interventions, key=lambda item: item.aggregator is not None)
        )
        self.seed = seed
        self._clock = Clock()
        self._states: dict[str, TransformState] = {}
        self._live: Live | None = None
        self.was_attached = False

    def __repr__(self) -> str:
        return f"Surgery({', '.join(map(repr, self.interventions))}, seed={self.seed})"

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """The interventions, in order; `live.add`, `remove` and `set` change them."""
        return self._live.interventions if self._live is not None else self._interventions

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The labels of the links of each intervention, as in logs."""
        if self._live is not None:
            return self._live.labels
        labels: list[tuple[str, ...]] = []
        for item in self._interventions:
            labels.append(labels_of(item, labels))
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
        in_state_dict: bool = False,
    ) -> "Iterator[Live]":
        """Hook `model` for the length of a block; all hooks are removed after it, on errors too.

        `optimizer` moves the step clock that triggers read, and is required by stage `step`;
        without it an aggregator draws new random numbers at each `live.backward`, not at each step.
        Effects are measured every `effects_every` steps, never if 0. `shadow` measures without
        applying; if no transform has a state and all triggers always fire, gradients are counted
        only in measured steps, and most hooks are removed in the others.

        Pass the `scaler` if losses are scaled: a transform, a trigger or an aggregator that depends
        on the scale is then refused at stages with scaled gradients. A scaler that was not passed
        is noticed, with a warning, at the first optimizer step.

        With `in_state_dict` the state of the surgery is stored in `model.state_dict()` as a tensor
        of bytes, `_gradsurg`, and is restored by `model.load_state_dict()` if a surgery is attached
        the same way; load into other models with `strict=False`. One surgery of a model at a time
        can do so.

        Raises LookupError if a selector matches nothing, with the names there are; after the first
        forward if the sites are known only then.
        """
        if self._live is not None:
            raise RuntimeError("this surgery is attached already; make a second one")
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch: must be >= 1, found {steps_per_epoch}")
        given = model
        model = getattr(model, "_orig_mod", model)  # names are those inside a compiled model
        self._clock.epoch_length = steps_per_epoch
        session = Session(
            effects=Effects(effects_every),
            clock=self._clock,
            states=self._states,
            seed=self.seed,
            shadow=shadow,
            target=model,
            optimizer=optimizer,
            scaler=scaler,
        )
        live = Live(session, model, is_compiled=given is not model)
        with ExitStack() as stack:
            stack.callback(self._detach, live)
            for intervention in self._interventions:
                if intervention.aggregator is None:
                    live._admit(intervention, model).attach(model)
                else:
                    live._add_aggregator(intervention, model)
            self._live = live
            self.was_attached = True
            if in_state_dict:
                store_in_model(self, model, stack)
            if optimizer is not None:
                stack.callback(optimizer.register_step_post_hook(lambda *_: live.tick()).remove)
            yield live
            live.effects.flush()
            for text in live._end_warnings():
                warnings.warn(text, SurgeryWarning, stacklevel=3)

    def plan(self, model: nn.Module, example_input: Any = None) -> str:
        """Return a plan of the hooks: sites, stages and size of the state; attach nothing.

        With an `example_input`, as for `gradsurg.sites.tree`, the plan is a tree of the modules as
        they run; without it, the sites known before a forward. (Any: the inputs of a model.)
        """
        model = getattr(model, "_orig_mod", model)
        params = {name: TensorSpec.of(param) for name, param in params_of(model).items()}
        parts = []
        for item, labels in zip(self.interventions, self.labels, strict=True):
            if item.aggregator is not None:
                from gradsurg.multitask.aggregation import plan_of

                parts.append(plan_of(labels[0], item.aggregator, item.at, item.when, model))
                continue
            text = f"stage {item.stage}, when {item.when!r}"
            if example_input is None:
                sites = item.at.find(model)
                text += _state(item, {site: params.get(site) for site in sites}, params)
                below = [f"  {line}" for line in (text, *sites)]
            else:
                modules = tree(model, example_input, item.at)
                hits = {line.site: line.tensor for line in modules.site_lines if line.selected}
                text += f", {plural(len(hits), 'site')}{_state(item, hits, params)}"
                below = [str(modules), text]
            parts.append("\n".join([f"{' -> '.join(labels)} at {item.at!r}", *below]))
        if example_input is None:
            return "\n".join(parts) or "no intervention"
        return "\n\n".join(parts) or f"{tree(model, example_input)}\nno intervention"

    def state_dict(self) -> dict[str, object]:
        """Return step, epoch, switches and the state of transforms, aggregators and triggers.

        All values are plain tensors, numbers and strings.
        """
        return {
            "step": self._clock.step,
            "epoch": self._clock.counted_epochs,
            "backwards": self._clock.backwards,
            "flags": dict(self._clock.flags),
            "transforms": self._names(),
            "states": {key: dict(state) for key, state in self._states.items()},
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the state of an equal surgery, attached or not.

        Raises ValueError if the transforms or the selectors differ.
        """
        if state.get("transforms") != self._names():
            raise ValueError(
                f"this state is of {state.get('transforms')}, the surgery is {self._names()}"
            )
        step, states = state.get("step"), state.get("states")
        epoch, flags = state.get("epoch", 0), state.get("flags", {})
        backwards = state.get("backwards", 0)
        if (
            not isinstance(step, int)
            or not isinstance(states, dict)
            or not isinstance(epoch, int)
            or not isinstance(flags, dict)
            or not isinstance(backwards, int)
        ):
            raise ValueError("step must be a number and states a dict: is this a surgery's state?")
        self._clock.step, self._clock.counted_epochs = step, epoch
        self._clock.backwards = backwards
        self._clock.flags.update(flags)
        self._states.clear()
        self._states.update({key: dict(own) for key, own in states.items()})
        if self._live is not None:
            self._live._load_states()

    def _names(self) -> list[str]:
        return [f"{item.transform!r} at {item.at!r}" for item in self.interventions]

    def _detach(self, live: Live) -> None:
        if self._live is live:
            self._interventions = live.interventions
        self._live = None
        live._close()


def _state(
    item: Intervention,
    sites: Mapping[str, TensorSpec | None],
    params: Mapping[str, TensorSpec | None],
) -> str:
    """The size of an intervention's state at its sites, as far as their shapes are known."""
    if all(isinstance(link, Stateless) for link in item.links):
        return ""
    likes = [like for like in sites.values() if like is not None]
    made = [torch.empty(like.shape, dtype=like.dtype, device="meta") for like in likes]
    size = sum(kept.nbytes for kept in init_all(item.operator, made).values()) if made else 0
    said = f", {plural(size, 'byte')} of state" if size else ""
    if size and any(like is not None and site not in params for site, like in sites.items()):
        said += " with this input"
    unknown = len(sites) - len(likes)
    return said + (f", state of unknown size at {plural(unknown, 'site')}" if unknown else "")
