"""The callback in `transformers.Trainer`: exact, resumed, logged, and gone at the end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from tests.nets import num_hooks

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::gradsurg.effects.ledger.SurgeryWarning"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


def rows() -> list[dict[str, Tensor]]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum()} for row in x]


def at_step(*transforms: Any) -> gs.Surgery:
    return gs.Surgery(*(gs.Intervention(t, gs.Parameters(stage="step")) for t in transforms))


def trainer_of(
    net: nn.Module, surgery: gs.Surgery, folder: Path, kind: Any = None, **options: Any
) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder),
        **(
            {
                "max_steps": 8,
                "per_device_train_batch_size": 4,
                "learning_rate": 0.1,
                "lr_scheduler_type": "constant",
                "logging_steps": 2,
                "save_steps": 4,
                "report_to": [],
                "use_cpu": True,
                "disable_tqdm": True,
                "max_grad_norm": 0.0,
                "optim": "sgd",
            }
            | options
        ),
    )
    trainer = (kind or transformers.Trainer)(net, arguments, train_dataset=rows())
    trainer.add_callback(gs.integrations.transformers.SurgeryCallback(surgery))
    return trainer


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_clip_at_stage_step_is_the_trainers_own_clip(tmp_path: Path, accumulate: int) -> None:
    plain, ours = Net(), Net()
    options = {"gradient_accumulation_steps": accumulate}
    trainer_of(plain, gs.Surgery(), tmp_path / "a", max_grad_norm=0.5, **options).train()
    surgery = gs.Surgery(gs.Intervention(gs.ClipGlobalNorm(0.5)))
    trainer_of(ours, surgery, tmp_path / "b", **options).train()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert surgery.state_dict()["step"] == 8
    assert num_hooks(ours) == 0


def test_a_resumed_training_ends_bit_identical_with_the_state_of_the_surgery(
    tmp_path: Path,
) -> None:
    whole, second = Net(), Net()
    trainer_of(whole, at_step(gs.GrokfastEMA()), tmp_path / "a").train()
    trainer_of(Net(), at_step(gs.GrokfastEMA()), tmp_path / "b", max_steps=4).train()
    folder = tmp_path / "b" / "checkpoint-4"
    assert (folder / "gradsurg.pt").is_file()
    trainer = trainer_of(second, at_step(gs.GrokfastEMA()), tmp_path / "b")
    trainer.train(resume_from_checkpoint=str(folder))
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    trainer = trainer_of(Net(), at_step(gs.GrokfastEMA()), tmp_path / "c")
    with pytest.raises(FileNotFoundError, match="resume_from="):
        trainer.train(resume_from_checkpoint=str(folder))


def test_effects_are_in_the_logs_and_reach_loggers_that_were_there_before(tmp_path: Path) -> None:
    seen: list[str] = []

    class Logger(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.extend(logs)

    trainer = trainer_of(Net(), at_step(gs.Scale(2.0)), tmp_path)
    trainer.callback_handler.callbacks.insert(0, Logger())
    trainer.train()
    name = "effect/scale/net.0.weight/norm_after"
    assert name in seen
    assert name in trainer.state.log_history[0]


def test_an_exception_is_followed_by_a_clean_start(tmp_path: Path) -> None:
    class Failing(transformers.Trainer):
        fails = True

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.fails and self.state.global_step == 2:
                raise OSError("disk")
            return super().training_step(*args, **kwargs)

    net = Net()
    trainer = trainer_of(net, at_step(gs.Scale(2.0)), tmp_path, Failing)
    with pytest.raises(OSError, match="disk"):
        trainer.train()
    trainer.fails = False
    trainer.train()
    assert num_hooks(net) == 0


def test_pcgrad_with_accumulation_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    def losses(net: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        out = net(**batch)["logits"]
        return {"a": out.square().mean(), "b": (out - batch["labels"]).abs().mean()}

    class Several(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *_: Any) -> Tensor:
            both = losses(model, self._prepare_inputs(inputs))
            (callback,) = [
                each
                for each in self.callback_handler.callbacks
                if isinstance(each, gs.integrations.transformers.SurgeryCallback)
            ]
            callback.backward(both)
            return sum(both.values()).detach()

    def surgery() -> gs.Surgery:
        return gs.Surgery(gs.Intervention(gs.PCGrad(), gs.SharedParameters()))

    ours, plain = Net(), Net()
    trainer_of(
        ours, surgery(), tmp_path, Several, max_steps=4, gradient_accumulation_steps=2
    ).train()
    trainer = trainer_of(Net(), gs.Surgery(), tmp_path, max_steps=4, gradient_accumulation_steps=2)
    batches = list(trainer.get_train_dataloader())
    transformers.set_seed(42)
    batches = list(trainer.get_train_dataloader())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with surgery().attach(plain, optimizer) as live:
        for index, batch in enumerate(batches[:8]):
            live.backward(losses(plain, batch), scale=0.5)
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_bf16_trains(tmp_path: Path) -> None:
    net = Net()
    before = next(net.parameters()).clone()
    trainer_of(
        net, at_step(gs.Clip(0.01)), tmp_path, bf16=True, gradient_checkpointing=False
    ).train()
    moved = (next(net.parameters()) - before).abs().max().item()
    assert 0 < moved <= 8 * 0.1 * 0.01 + 1e-6
