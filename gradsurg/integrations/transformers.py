"""A callback for `transformers.Trainer`: `trainer.add_callback(SurgeryCallback(surgery))`."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any  # what the Trainer hands to callbacks

import torch
from torch import nn
from torch.optim import Optimizer

from gradsurg.multitask.losses import Losses
from gradsurg.surgery.live import Live
from gradsurg.surgery.surgery import Surgery

library: Any = import_module("transformers.trainer_callback")

STATE_FILE = "gradsurg.pt"
"""The file of the surgery's state in the folder of a checkpoint."""


class SurgeryCallback(library.TrainerCallback):
    """Attach a surgery to the model while `Trainer.train` runs.

    Stage `step` acts on accumulated and unscaled gradients, after the Trainer has clipped them to
    `max_grad_norm` (1.0 by default): for another order set `max_grad_norm=0` and end the surgery
    with `ClipGlobalNorm`. The state is saved as `gradsurg.pt` beside each checkpoint and loaded
    when training resumes from one in `output_dir`; for another folder pass it as `resume_from`.
    Effects and conflicts are among the numbers that the Trainer logs. After an exception `close()`
    removes the hooks; so does the next `train`, and the end of the callback's life.
    """

    def __init__(
        self, surgery: Surgery, *, effects_every: int = 1, resume_from: str | Path | None = None
    ) -> None:
        self.surgery = surgery
        self.effects_every = effects_every
        self.resume_from = resume_from
        self.live: Live | None = None
        self._scale = 1.0

    def backward(self, losses: Losses, **options: Any) -> None:
        """Replace `accelerator.backward(loss)` in your `training_step`, for several losses.

        Each is divided by `gradient_accumulation_steps`, as the Trainer does. Raises RuntimeError
        outside of `Trainer.train`.
        """
        if self.live is None:
            raise RuntimeError("SurgeryCallback.backward: Trainer.train does not run")
        self.live.backward(losses, scale=self._scale, **options)

    def close(self) -> None:
        """Remove all hooks, after an exception in `Trainer.train`."""
        if self.live is not None:
            self.live.abort()
            self.live = None

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
        _move_first(self)
        if state.global_step:
            self._load(Path(args.output_dir or "."), state.global_step)
        self._scale = 1 / args.gradient_accumulation_steps
        self.live = self.surgery.start(model, optimizer, effects_every=self.effects_every)

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
            numbers = self.live.effects.numbers() | self.live.conflicts.numbers()
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def on_save(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            torch.save(self.surgery.state_dict(), folder / STATE_FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        live, self.live = self.live, None
        if live is not None:
            live.close()

    def _load(self, output: Path, step: int) -> None:
        folder = Path(self.resume_from or output / f"checkpoint-{step}")
        path = folder / STATE_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"training resumes at step {step}, and the state of the surgery is not in {path}; "
                "give the folder of the checkpoint: SurgeryCallback(surgery, resume_from=...)"
            )
        self.surgery.load_state_dict(torch.load(path, weights_only=True))


def _move_first(callback: SurgeryCallback) -> None:
    """Let the callback add its numbers to the logs before the Trainer's loggers read them.

    The Trainer does not hand itself to callbacks, so the stack is searched.
    """
    frame = sys._getframe()
    while frame is not None:
        handler: Any = frame.f_locals.get("self")
        if isinstance(handler, library.CallbackHandler):
            others = [each for each in handler.callbacks if each is not callback]
            handler.callbacks = [callback, *others]
            return
        frame = frame.f_back
