"""A callback for Lightning: `L.Trainer(callbacks=[SurgeryCallback(surgery)])`."""

# pyright: reportMissingImports=false

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import Optimizer

from gradsurg.core.live import Live
from gradsurg.effects.effects import Effects
from gradsurg.effects.summary import AUTO
from gradsurg.integrations._given import Given, surgery_of
from gradsurg.multitask.losses import Losses, scaled


class SurgeryCallback(pl.Callback):
    """Attach a surgery to the module while it trains.

    `surgery` may also be a config like for `gradsurg.from_config`; Hydra's `instantiate` leaves it
    unchanged with `_recursive_: false` beside it. With None training is unchanged. After training
    `effects` has the numbers, like `live.effects` in the block of an `attach`.

    Stage `step` acts on accumulated and unscaled gradients, before Lightning clips them. The state
    of the surgery is saved in each checkpoint and restored from it. Effects and conflicts are
    logged by the module, every `log_every_n_steps` of the trainer; `log` is passed to
    `live.effects.numbers`. With manual optimization `self.surgery.backward(losses)` in
    `training_step` replaces `self.manual_backward(loss)`, and applies the loss scale of
    `precision="16-mixed"`. With several optimizers the first one counts steps.
    """

    def __init__(self, surgery: Given = None, *, effects_every: int = 1, log: str = AUTO) -> None:
        self.surgery = surgery_of(surgery)
        self.effects_every = effects_every
        self._log = log
        self.live: Live | None = None
        self.effects: Effects | None = None
        self._last_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step
        plugin = trainer.precision_plugin
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
        self.live = self.surgery.start(
            pl_module, trainer.optimizers, effects_every=self.effects_every, scaler=scaler
        )
        self.effects = self.live.effects
        module: Any = pl_module  # it may have any attribute
        module.surgery = _Backward(self.live)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self.live is not None:
            self.live.before_step(optimizer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        before, self._last_step = self._last_step, trainer.global_step
        # Of the batches that are accumulated for a step Lightning logs the last one alone.
        is_part = pl_module.automatic_optimization and trainer.global_step == before
        if self.live is None or is_part or not trainer._logger_connector.should_update_logs:
            return
        pl_module.log_dict(
            self.live.effects.numbers(log=self._log) | self.live.conflicts.numbers(log=self._log)
        )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.live is not None:
            self.live.next_epoch()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(pl_module, failed=False)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._end(pl_module, failed=True)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.surgery.state_dict()) if self.surgery.interventions else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.surgery.load_state_dict(state_dict)

    def _end(self, pl_module: pl.LightningModule, failed: bool) -> None:
        live, self.live = self.live, None
        if live is None:
            return
        del pl_module.surgery
        if failed:
            live.abort()
        else:
            live.close()


class _Backward:
    """`backward` and the numbers of an attached surgery, as the attribute of a module."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def backward(self, losses: Losses, **options: Any) -> None:
        """`Live.backward`, with the loss scale of the precision plugin."""
        self.live.backward(scaled(losses, self.live.attachment.scaler), **options)
