"""Surgery: interventions that are attached to a model for the length of a block."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from html import escape
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from gradsurg.core.attachment import Attachment
from gradsurg.core.intervention import Intervention, labels_of
from gradsurg.core.live import Live
from gradsurg.core.pitfalls import refuse_at_once
from gradsurg.effects.effects import Effects
from gradsurg.plugins.fields import in_short
from gradsurg.sites.places import AVERAGED
from gradsurg.sites.selection import COMPILED, inner_model, one_scan
from gradsurg.sites.wrapped_models import of_first_process
from gradsurg.transforms.base import TransformState
from gradsurg.triggers.base import Clock
from gradsurg.triggers.probability import Probability


class Surgery:
    """An ordered list of interventions that can be attached to a model, with their state.

    `seed` seeds the random numbers of transforms and triggers; the global generators are never
    touched.
    """

    def __init__(self, *interventions: Intervention, seed: int = 0) -> None:
        for item in interventions:
            if isinstance(item, list | tuple):
                found = f"found a {type(item).__name__} of them"
                raise TypeError(f"write Surgery(*interventions): it takes Interventions, {found}")
            if not isinstance(item, Intervention):
                raise TypeError(f"Surgery: write gs.Intervention(transform, at), found {item!r}")
        # Aggregators combine the gradients that the transforms return, so they come last; the sort
        # is stable.
        self._interventions = tuple(
            sorted(interventions, key=lambda item: item.aggregator is not None)
        )
        self.seed = seed
        self._clock = Clock()  # a second block goes on counting
        self._states: dict[str, TransformState] = {}
        self._live: Live | None = None
        self.was_attached = False  # for `gs.compare`: `train` may have forgotten to attach it

    def __repr__(self) -> str:
        return f"Surgery({', '.join(map(repr, self.interventions))}, seed={self.seed})"

    def __eq__(self, other: object) -> bool:
        """Whether interventions and seed are equal; the states may differ."""
        return isinstance(other, Surgery) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[object, ...]:
        return self.interventions, self.seed

    def _repr_html_(self) -> str:
        """Return a table with a row for each transform, for notebooks."""
        rows = [("transform", "site", "when", "stage")]
        for item in self.interventions:
            links = [*map(in_short, item.links or (item.transform,))]
            stage = "" if item.aggregator is not None else item.stage
            rows += [(link, in_short(item.at), in_short(item.when), stage) for link in links]
        lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>seed {self.seed}"

    def to_config(self) -> dict[str, Any]:  # Any: what YAML can hold
        """Return a plain mapping, to be stored or shared: `gradsurg.from_config` makes an equal
        surgery of it.

        Functions and classes of your own are written by their dotted paths, and read back with
        `own_code=True`. Raises TypeError for a lambda, a nested function and `Selector.where`.
        """
        from gradsurg.core.surgery_config import config_of

        pairs = enumerate(self.interventions)
        items = [config_of(item, f"interventions.{index}") for index, item in pairs]
        return {"interventions": items, "seed": self.seed}

    @property
    def digest(self) -> str:
        """Eight hex digits, a hash of the interventions; empty if they have no config."""
        try:
            items = self.to_config()["interventions"]
        except TypeError:
            return ""
        return sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def is_attached(self) -> bool:
        """Whether the surgery is attached to a model now."""
        return self._live is not None

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """The interventions, in order; `live.add`, `remove` and `set` change them."""
        return self._live.interventions if self._live is not None else self._interventions

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The labels in logs, by intervention: of its transform, or of each link of its `Chain`."""
        if self._live is not None:
            return self._live.labels
        labels: list[tuple[str, ...]] = []
        for item in self._interventions:
            labels.append(labels_of(item, labels))
        return tuple(labels)

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        clock: Optimizer | None = None,
        effects_every: int = 1,
        conflict_every: int = 1,
        shadow: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        steps_per_epoch: int | None = None,
    ) -> Live:
        """Hook `model` for the length of a `with` block; remove all hooks after it, on errors too.

        Args:
            optimizer: Triggers read the number of its steps, and stage `step` requires it. Without
                one an aggregator draws new random numbers at each `live.backward`.
            clock: The optimizer, of several, whose steps are counted; by default the first.
            effects_every: Steps between measurements of effects; 0 measures none.
            conflict_every: The same for conflicts between tasks, which are measured only at steps
                at which effects are measured too.
            shadow: Effects are measured, and gradients stay unchanged. To save time, the ledger
                then counts only measured steps of a transform without a state whose trigger is
                `Always`.
            scaler: The scaler of the losses. A transform, a trigger or an aggregator that depends
                on the scale is refused at stages with scaled gradients. A scaler that was not
                passed is noticed, with a warning, at the first optimizer step.
            steps_per_epoch: The number of steps after which an epoch is counted, in place of
                `live.next_epoch()`.

        Used without `with`, the surgery stays attached until `live.close()`, like with `start`. If
        that is never called, a warning names the line of this call once the handle and the surgery
        are dropped, or when the program ends.

        Raises LookupError, listing the names, if a selector matches nothing; the first forward
        raises it if sites are known only then.

        >>> model = nn.Linear(2, 1)
        >>> surgery = gs.Surgery(gs.Intervention(gs.Clip(0.1), at=gs.Parameters("weight")))
        >>> with surgery.attach(model) as live:
        ...     model(torch.ones(2)).sum().backward()
        >>> print(live.effects.table())
        site    norm before  norm after  cosine  changed  calls
        -------------------------------------------------------
        weight        1.414      0.1414  1.0000   100.0%      1
        """
        transforms = [item for item in self._interventions if item.aggregator is None]
        if optimizer is None and any(item.stage == "step" for item in transforms):
            raise ValueError(
                "optimizer: stage 'step' needs it: attach(model, optimizer). If it is made later, "
                "use live = surgery.start(model) and live.bind(optimizer)"
            )
        live = self.start(
            model,
            optimizer,
            clock=clock,
            effects_every=effects_every,
            conflict_every=conflict_every,
            shadow=shadow,
            scaler=scaler,
            steps_per_epoch=steps_per_epoch,
        )
        # Taken now: the warning is emitted when the user's frame is gone.
        caller = sys._getframe(1)
        live.dropped_warning.append(
            f"surgery.attach in {caller.f_code.co_filename}, line {caller.f_lineno}, was used "
            "without `with` and never closed: write `with surgery.attach(...) as live:`, or "
            "`live = surgery.start(...)` and `live.close()`"
        )
        return live

    def start(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        clock: Optimizer | None = None,
        effects_every: int = 1,
        conflict_every: int = 1,
        shadow: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        steps_per_epoch: int | None = None,
    ) -> Live:
        """Hook `model` until `live.close()`, for the callbacks of a trainer.

        The parameters are the same as for `attach`. The optimizer may come later, by
        `live.bind(optimizer)`: until then interventions at stage `step` wait.

        Keep the handle or the surgery: once both are gone, the hooks are removed, without the
        warning of `attach`. So a notebook cell that is run again detaches the surgery that it made
        before, and `Surgery(...).start(model)` with the result dropped detaches at once. When the
        program ends, an open surgery is closed.
        """
        if self._live is not None:
            raise RuntimeError("this surgery is attached already; make a second one")
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch: must be >= 1, found {steps_per_epoch}")
        _check_count("effects_every", effects_every, 0)
        _check_count("conflict_every", conflict_every, 1)
        if not isinstance(model, nn.Module):
            raise TypeError(_model_error(model))
        is_distributed = distributed.is_available() and distributed.is_initialized()
        processes = distributed.get_world_size() if is_distributed else 1
        given, model, items = model, inner_model(model), self._interventions
        # An aggregator has no stage.
        refuse_at_once(given, ((item.at, "" if item.aggregator else item.stage) for item in items))
        self._clock.epoch_length = steps_per_epoch
        attachment = Attachment(
            model,
            Effects(effects_every),
            self._clock,
            self._states,
            # In shadow no result is used, so the processes may differ, and need not communicate.
            seed=self.seed if processes == 1 or shadow else self._seed_of_processes(),
            rank=distributed.get_rank() if processes > 1 else 0,
            processes=processes,
            conflict_every=conflict_every,
            shadow=shadow,
            is_compiled=hasattr(given, COMPILED),
            scaler=scaler,
        )
        live = Live(attachment, model, self)
        with ExitStack() as undo, one_scan(model):
            undo.callback(live.abort)  # unless `pop_all` below is reached
            if optimizer is not None:
                attachment.bind(optimizer, clock)
            attachment.add(*items)
            self._live = live  # after all that may raise: it must not seem attached then
            self.was_attached = True
            undo.pop_all()
        return live

    def _seed_of_processes(self) -> int:
        """The seed to use: the seed of process 0 where all must agree, otherwise our own.

        All must agree if there is an aggregator, or if a transform or a trigger draws at gradients
        that DDP has averaged: the parameters of the processes would differ otherwise. Then it is a
        collective call.
        """
        must_agree = any(
            item.aggregator is not None
            or (
                item.stage in AVERAGED
                and (
                    any("deterministic" not in link.properties for link in item.links)
                    or any(isinstance(part, Probability) for part in item.when.parts)
                )
            )
            for item in self._interventions
        )
        return cast(int, of_first_process(self.seed)) if must_agree else self.seed

    def plan(self, model: nn.Module, example_input: Any = None) -> str:
        """Return a plan of the hooks: sites, stages and size of the state; attach nothing.

        With an `example_input`, as for `gradsurg.sites.tree`, the plan is a tree of the modules as
        they run; without it, the sites known before a forward. Below are the cells of the table of
        contexts of `gradsurg.core.pitfalls` that apply to the model as it is now: compiled,
        wrapped, sharded or scripted.
        """
        from gradsurg.core.plan import plan_of

        return plan_of(self, model, example_input)

    def state_dict(self) -> dict[str, object]:
        """Return step, epoch, switches and the state of transforms, aggregators and triggers.

        All values are plain tensors, numbers and strings: save it with the states of the model and
        of the optimizer.
        """
        return {
            "step": self._clock.step,
            "epoch": self._clock.counted_epochs,
            "backwards": self._clock.backwards,
            "flags": dict(self._clock.flags),
            "transforms": self._signature(),
            "states": {key: dict(state) for key, state in self._states.items()},
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the state of a surgery with the same transforms and selectors, attached or not.

        Switches that the state lacks stay as they are. Raises ValueError if transforms or selectors
        differ.
        """
        saved, own = state.get("transforms") or [], self._signature()
        if saved != own:
            pairs = zip_longest(cast(list[str], saved), own, fillvalue="no intervention")
            first, here = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(f"state: it is of another surgery, with {first}; this one has {here}")
        step, states = state.get("step"), state.get("states")
        # Earlier versions saved none of these three.
        epoch, flags = state.get("epoch", 0), state.get("flags", {})
        backwards = state.get("backwards", 0)
        if (
            not isinstance(step, int)
            or not isinstance(states, dict)
            or not isinstance(epoch, int)
            or not isinstance(flags, dict)
            or not isinstance(backwards, int)
        ):
            raise ValueError("state: must be a surgery.state_dict(), with its step and states")
        self._clock.step, self._clock.counted_epochs = step, epoch
        self._clock.backwards = backwards
        self._clock.flags.update(flags)
        self._states.clear()  # in place, as the attachment has the same dict
        self._states.update({key: dict(tensors) for key, tensors in states.items()})
        if self._live is not None:
            self._live.attachment.load_states()

    def _signature(self) -> list[str]:
        # Triggers and the seed may differ.
        return [f"{item.transform!r} at {item.at!r}" for item in self.interventions]

    def take_back(self, live: Live) -> None:
        """Take over the interventions of a handle that closes, and count as detached."""
        if self._live is live:
            self._interventions = live.interventions
            self._live = None


def _check_count(name: str, number: object, least: int) -> None:
    if not isinstance(number, int) or number < least:
        raise ValueError(f"{name}: must be a whole number >= {least}, found {number!r}")


def _model_error(model: object) -> str:
    """The error for a class, an optimizer, or another object in the place of a model."""
    text, hint = repr(model), ""
    if isinstance(model, type):
        hint = f": did you mean {model.__name__}()?"
    if isinstance(model, Optimizer):
        text, hint = type(model).__name__, "; the model comes first: attach(model, optimizer)"
    return f"model: must be a torch.nn.Module, found {text}{hint}"
