"""A callback for `transformers.Trainer`: `trainer.add_callback(SurgeryCallback(surgery))`."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any  # the Trainer, and what it hands to callbacks
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from gradsurg.core.live import Live
from gradsurg.effects.effects import Effects
from gradsurg.effects.summary import AUTO
from gradsurg.integrations._given import Given, surgery_of
from gradsurg.multitask.losses import Losses, scaled

library: Any = import_module("transformers.trainer_callback")

STATE_FILE = "gradsurg.pt"
"""The file of the surgery's state in the folder of a checkpoint."""


class SurgeryCallback(library.TrainerCallback):
    """Attach a surgery to the model while `Trainer.train` runs.

    `surgery` may also be a config like for `gradsurg.from_config`; Hydra's `instantiate` leaves it
    unchanged with `_recursive_: false` beside it. With None training is unchanged. After training
    `effects` has the numbers, like `live.effects` in the block of an `attach`.

    Stage `step` acts on accumulated and unscaled gradients, after the Trainer has clipped them to
    `max_grad_norm` (1.0 by default): for another order set `max_grad_norm=0` and end the surgery
    with `ClipGlobalNorm`. The state is saved as `gradsurg.pt` beside each checkpoint and loaded
    when training resumes from one in `output_dir`; for another folder pass it as `resume_from`.
    Effects and conflicts are among the numbers that the Trainer logs; `log` is passed to
    `live.effects.numbers`. An exception in an epoch removes the hooks.
    """

    def __init__(
        self,
        surgery: Given = None,
        *,
        effects_every: int = 1,
        resume_from: str | Path | None = None,
        log: str = AUTO,
    ) -> None:
        self.surgery = surgery_of(surgery)
        self.effects_every = effects_every
        self._log = log
        self.resume_from = resume_from
        self.live: Live | None = None
        self.effects: Effects | None = None
        self._trainer: ref[Any] | None = None

    def backward(
        self,
        losses: Losses,
        *,
        normalized: bool | None = None,
        scale: float | None = None,
        **options: Any,
    ) -> None:
        """Replace `accelerator.backward(loss)` in your `training_step`, for several losses.

        Each is divided by the number of batches that are accumulated for the update, and multiplied
        by the loss scale of `fp16`, as the Trainer does. With `normalized=True` they are not
        divided: this is for sums over the batch that you divided by `num_items_in_batch`, as models
        of Hugging Face do if they get it. By default the Trainer's `loss_is_scaled_for_ga` decides;
        if it is None they are divided, with a warning if the Trainer would not divide its own loss.
        With several processes multiply normalized losses by their number, like
        `Trainer.compute_loss`. `scale` multiplies the losses in place of the division; `options`
        are passed to `live.backward`.

        Raises RuntimeError outside of `Trainer.train`, ValueError for both `normalized` and
        `scale`.
        """
        trainer = self._trainer() if self._trainer is not None else None
        if self.live is None or trainer is None:
            raise RuntimeError("SurgeryCallback.backward: Trainer.train does not run")
        if scale is None:
            scale = self._scale(trainer, self.live, normalized)
        elif normalized is not None:
            raise ValueError(
                "SurgeryCallback.backward: needs normalized or scale, not both. Found "
                f"normalized={normalized}, scale={scale}"
            )
        losses = scaled(losses, self.live.attachment.scaler)
        self.live.backward(losses, scale=scale, **options)

    def close(self) -> None:
        """Remove all hooks; an exception in an epoch does so."""
        live = self._release()
        if live is not None:
            live.abort()

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        **_: object,
    ) -> None:
        assert model is not None
        self.close()
        trainer = _running_trainer()
        # Its numbers are in the logs before the Trainer's loggers read them.
        handler = trainer.callback_handler
        handler.callbacks = [self, *(each for each in handler.callbacks if each is not self)]
        if state.global_step and self.surgery.interventions:
            self._load(Path(args.output_dir or "."), state.global_step)
        self.live = self.surgery.start(
            model, optimizer, effects_every=self.effects_every, scaler=trainer.accelerator.scaler
        )
        self.effects = self.live.effects
        self._trainer = ref(trainer)
        trainer._run_epoch = self._closing_on_error(trainer._run_epoch)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if self.live is not None:
            self.live.next_epoch()

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        if self.live is not None and logs is not None and "loss" in logs:
            numbers = self.live.effects.numbers(log=self._log) | self.live.conflicts.numbers(
                log=self._log
            )
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def on_save(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if state.is_world_process_zero and self.surgery.interventions:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            torch.save(self.surgery.state_dict(), folder / STATE_FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        live = self._release()
        if live is not None:
            live.close()

    def _scale(self, trainer: Any, live: Live, normalized: bool | None) -> float:
        """Return the factor of losses that are, or are not, normalized over the update."""
        # Fewer than `gradient_accumulation_steps` in the last update of an epoch.
        count = trainer.current_gradient_accumulation_steps
        if normalized is None:
            normalized = getattr(trainer, "loss_is_scaled_for_ga", None)  # 5.4 does not have it
        if normalized is None and count > 1 and _expects_normalized(trainer):
            live.attachment.warn_once(
                f"SurgeryCallback.backward: divides the losses by the {count} accumulated batches, "
                "and the Trainer expects losses divided by num_items_in_batch, which are not "
                "divided again: give normalized=True for such losses, normalized=False for means "
                "over a batch",
                key="SurgeryCallback.normalized",
            )
        return 1.0 if normalized else 1 / count

    def _release(self) -> Live | None:
        """Let go of the Trainer, and return the attached surgery."""
        trainer = self._trainer() if self._trainer is not None else None
        if trainer is not None:
            vars(trainer).pop("_run_epoch", None)  # the method of its class is there again
        live, self.live, self._trainer = self.live, None, None
        return live

    def _closing_on_error(self, run_epoch: Callable[..., None]) -> Callable[..., None]:
        """Extend the method of a Trainer: it calls no callback after an exception."""
        held = ref(self)

        def run(*args: Any, **kwargs: Any) -> None:
            try:
                run_epoch(*args, **kwargs)
            except BaseException:
                callback = held()
                if callback is not None:
                    callback.close()
                raise

        return run

    def _load(self, output: Path, step: int) -> None:
        folder = Path(self.resume_from or output / f"checkpoint-{step}")
        path = folder / STATE_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"training resumes at step {step}, and the state of the surgery is not in {path}; "
                "give the folder of the checkpoint: SurgeryCallback(surgery, resume_from=...)"
            )
        self.surgery.load_state_dict(torch.load(path, weights_only=True))


def _running_trainer() -> Any:
    """Return the Trainer that calls a callback: it does not hand itself over, its stack has it."""
    frame = sys._getframe()
    while frame is not None:
        owner: Any = frame.f_locals.get("self")
        if isinstance(getattr(owner, "callback_handler", None), library.CallbackHandler):
            return owner
        frame = frame.f_back
    raise RuntimeError("SurgeryCallback: on_train_begin was not called by a transformers.Trainer")


def _expects_normalized(trainer: Any) -> bool:
    """Whether the Trainer leaves the division by `num_items_in_batch` to the model or the loss."""
    return trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
