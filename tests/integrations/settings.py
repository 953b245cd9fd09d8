"""Four training stacks in their settings: a surgery against a clamp by PyTorch's own hooks."""

import io
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import gradsurg as gs

LIMIT, STEPS = 0.02, 8
SITES = {
    "`Parameters`": gs.Parameters("net.*"),
    "`Parameters`, `step`": gs.Parameters("net.*", stage="step"),
    "`Outputs`": gs.Outputs("net.0"),
}


@dataclass(frozen=True)
class Setting:
    """How a stack trains: batches an update, its own clipping, precision, checkpointing."""

    accumulate: int = 1
    max_norm: float = 0.0
    precision: str = "32"
    checkpointing: bool = False


SETTINGS = {
    "as it is": Setting(),
    "accumulation of 4": Setting(accumulate=4),
    "its clipping": Setting(max_norm=0.05),
    "bfloat16": Setting(precision="bf16"),
    "float16, loss scale": Setting(precision="16"),
    "activation checkpointing": Setting(checkpointing=True),
}


class Net(nn.Module):
    """A small regression whose `net` may be checkpointed."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.net = small_net()
        self.checkpointing = checkpointing

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return loss_of(self.net, self.checkpointing, x, labels)


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(net: nn.Module, checkpointing: bool, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    out = checkpoint(net, x, use_reentrant=False) if checkpointing else net(x)
    return {"loss": (out.squeeze(-1).float() - labels).square().mean(), "logits": out}


def rows() -> list[dict[str, Tensor]]:
    x = torch.randn(128, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": 3 * row.sum()} for row in x]


class PlainHooks:
    """The same clamp without gradsurg: the hooks that one would write by hand."""

    def __init__(self, site: str) -> None:
        self.site = site
        self.handles: list[Any] = []

    def start(self, net: nn.Module) -> None:
        if self.site == "`Parameters`":
            self.handles = [param.register_hook(clamped) for param in net.parameters()]
        if self.site == "`Outputs`":
            layer = net.get_submodule("net.0")
            self.handles = [layer.register_forward_hook(self._hook_output)]

    def before_step(self, net: nn.Module) -> None:
        if self.site == "`Parameters`, `step`":
            for param in net.parameters():
                assert param.grad is not None
                param.grad.clamp_(-LIMIT, LIMIT)

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _hook_output(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(clamped)


def clamped(grad: Tensor) -> Tensor:
    return grad.clamp(-LIMIT, LIMIT)


def surgery_at(site: str) -> gs.Surgery:
    return gs.Surgery(gs.Intervention(gs.Clamp(-LIMIT, LIMIT), SITES[site]))


def plain_loop(setting: Setting, site: str, ours: bool) -> nn.Module:
    """A loop with autocast, a scaler and `clip_grad_norm_`, from PyTorch's documentation."""
    net = Net(setting.checkpointing)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=setting.precision == "16")
    dtype = torch.float16 if setting.precision == "16" else torch.bfloat16
    hooks = PlainHooks(site)
    live = surgery_at(site).start(net, optimizer, scaler=scaler) if ours else None
    if live is None:
        hooks.start(net)
    for index, batch in enumerate(DataLoader(rows(), batch_size=4)):  # type: ignore[arg-type]
        with torch.autocast("cpu", dtype, enabled=setting.precision != "32"):
            loss = net(**batch)["loss"]
        scaler.scale(loss / setting.accumulate).backward()
        if (index + 1) % setting.accumulate == 0:
            scaler.unscale_(optimizer)
            if live is not None:
                live.before_step()
            else:
                hooks.before_step(net)
            if setting.max_norm:
                nn.utils.clip_grad_norm_(net.parameters(), setting.max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if (index + 1) // setting.accumulate == STEPS:
                break
    if live is not None:
        live.close()
    hooks.stop()
    return net


def scale_losses(accelerator: Any) -> None:
    """Switch on float16 and a loss scale, which Accelerate offers on a GPU only."""
    accelerator.scaler = torch.amp.GradScaler("cpu")
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"


def hugging_face(setting: Setting, site: str, ours: bool) -> nn.Module:
    """`transformers.Trainer`."""
    import transformers
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    hooks = PlainHooks(site)

    class ByHand(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hooks.start(kwargs["model"])

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hooks.before_step(kwargs["model"])

    callback = gs.integrations.transformers.SurgeryCallback(surgery_at(site)) if ours else ByHand()
    net = Net(setting.checkpointing)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=setting.accumulate,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=setting.max_norm,
            bf16=setting.precision == "bf16",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            optim="sgd",
        )
        trainer = transformers.Trainer(net, arguments, train_dataset=rows())  # type: ignore[arg-type]
        trainer.add_callback(callback)
        if setting.precision == "16":
            scale_losses(trainer.accelerator)
        with redirect_stdout(io.StringIO()):
            trainer.train()
    hooks.stop()
    return net


def lightning(setting: Setting, site: str, ours: bool) -> nn.Module:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return loss_of(self.net, setting.checkpointing, batch["x"], batch["labels"])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    hooks = PlainHooks(site)

    class ByHand(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            hooks.start(pl_module)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            hooks.before_step(pl_module)

    plugins: list[Any] = []
    if setting.precision == "16":
        scaler = torch.amp.GradScaler("cpu")
        plugins = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)]
    precision: Any = "bf16-mixed" if setting.precision == "bf16" else None
    module = Module()
    trainer = pl.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=setting.accumulate,
        gradient_clip_val=setting.max_norm or None,
        precision=precision,
        plugins=plugins,
        callbacks=[
            gs.integrations.lightning.SurgeryCallback(surgery_at(site)) if ours else ByHand()
        ],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows(), batch_size=4))  # type: ignore[arg-type]
    hooks.stop()
    return module


def accelerate(setting: Setting, site: str, ours: bool) -> nn.Module:
    """A loop with an `Accelerator`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # the precision is kept for the whole process
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=setting.accumulate,
        mixed_precision="bf16" if setting.precision == "bf16" else "no",
    )
    if setting.precision == "16":
        scale_losses(accelerator)
    net = Net(setting.checkpointing)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(rows(), batch_size=4)  # type: ignore[arg-type]
    model, wrapped, loader = accelerator.prepare(net, optimizer, loader)
    hooks = PlainHooks(site)
    live = surgery_at(site).start(model, wrapped, scaler=accelerator.scaler) if ours else None
    if live is None:
        hooks.start(net)
    steps = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.unscale_gradients()
                if live is not None:
                    live.before_step()
                else:
                    hooks.before_step(net)
                if setting.max_norm:
                    accelerator.clip_grad_norm_(model.parameters(), setting.max_norm)
                steps += 1
            wrapped.step()
            wrapped.zero_grad()
        if steps == STEPS:
            break
    if live is not None:
        live.close()
    hooks.stop()
    return net


STACKS: dict[str, Callable[[Setting, str, bool], nn.Module]] = {
    "plain loop": plain_loop,
    "`Trainer`": hugging_face,
    "Lightning": lightning,
    "Accelerate": accelerate,
}


def difference(stack: str, setting: str, site: str) -> float | str:
    """Return the largest difference of weights after the steps; `refused` if gradsurg refuses.

    Raises AssertionError if the hooks by hand change nothing, as the comparison is then empty.
    """
    train = STACKS[stack]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_hand = train(SETTINGS[setting], site, False)
        without = train(SETTINGS[setting], "none", False)
        try:
            ours = train(SETTINGS[setting], site, True)
        except ValueError:
            return "refused"
    assert largest(by_hand, without) > 0, (stack, setting, site)
    return largest(ours, by_hand)


def largest(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
