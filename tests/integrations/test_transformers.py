"""The callback in `transformers.Trainer`: exact, resumed, logged, and gone at the end."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from tests.integrations.settings import scale_losses
from tests.nets import num_hooks

transformers: Any = None  # imported by the first test
pytestmark = [
    pytest.mark.skipif(not find_spec("transformers"), reason="needs the extra trainers"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::gradsurg.effects.ledger.SurgeryWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _import() -> None:
    globals()["transformers"] = import_module("transformers")


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


def trainer_of(net: nn.Module, surgery: Any, folder: Path, kind: Any = None, **options: Any) -> Any:
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


@pytest.mark.slow
def test_a_resumed_training_ends_bit_identical_with_the_state_of_the_surgery(
    tmp_path: Path,
) -> None:
    whole, second = Net(), Net()
    trainer_of(whole, at_step(gs.GrokfastEMA()), tmp_path / "a").train()
    trainer_of(Net(), at_step(gs.GrokfastEMA()), tmp_path / "b", max_steps=4).train()
    folder = tmp_path / "b" / "checkpoint-4"
    assert (folder / "gradsurg.pt").is_file()
    keys = import_module("safetensors.torch").load_file(folder / "model.safetensors").keys()
    assert keys == Net().state_dict().keys()
    trainer = trainer_of(second, at_step(gs.GrokfastEMA()), tmp_path / "b")
    trainer.train(resume_from_checkpoint=str(folder))
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    trainer = trainer_of(Net(), at_step(gs.GrokfastEMA()), tmp_path / "c")
    with pytest.raises(FileNotFoundError, match="resume_from="):
        trainer.train(resume_from_checkpoint=str(folder))


@pytest.mark.full
def test_two_callbacks_of_one_trainer_act_in_turn(tmp_path: Path) -> None:
    once, twice = Net(), Net()
    trainer_of(once, at_step(gs.Scale(0.25)), tmp_path / "a").train()
    trainer = trainer_of(twice, at_step(gs.Scale(0.5)), tmp_path / "b")
    trainer.add_callback(gs.integrations.transformers.SurgeryCallback(at_step(gs.Scale(0.5))))
    trainer.train()
    assert all(map(torch.equal, once.parameters(), twice.parameters()))
    assert num_hooks(twice) == 0


@pytest.mark.slow
def test_a_config_is_a_surgery_none_changes_nothing_and_the_effects_stay(tmp_path: Path) -> None:
    config = {
        "transform": {"grokfast_ema": {"_target_": "gradsurg.GrokfastEMA"}},
        "site": {"_target_": "gradsurg.Parameters", "stage": "step"},
    }
    weights, callbacks = [], []
    for surgery in (config, at_step(gs.GrokfastEMA()), None, False):
        net, folder = Net(), tmp_path / str(len(weights))
        trainer = trainer_of(net, None if surgery is False else surgery, folder)
        if surgery is False:
            trainer.pop_callback(gs.integrations.transformers.SurgeryCallback)
        trainer.train()
        weights.append(nn.utils.parameters_to_vector(net.parameters()))
        callbacks.append(trainer.callback_handler.callbacks[0])
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[1], weights[2])
    made, by_hand, empty, _ = callbacks
    assert made.live is None
    assert made.effects.table() == by_hand.effects.table()
    assert "net.0.weight" in made.effects.table()
    assert empty.effects.rows() == []
    resumed = trainer_of(Net(), None, tmp_path / "2")
    assert not (tmp_path / "2" / "checkpoint-4" / "gradsurg.pt").exists()
    resumed.train(resume_from_checkpoint=str(tmp_path / "2" / "checkpoint-4"))


@pytest.mark.slow
def test_no_hook_is_left_when_training_ends(tmp_path: Path) -> None:
    net = Net()
    trainer_of(net, gs.Surgery(gs.Intervention(gs.Scale(0.5))), tmp_path, max_steps=1).train()
    assert num_hooks(net) == 0


@pytest.mark.full
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


@pytest.mark.full
def test_many_sites_are_logged_as_a_summary_beside_those_asked_for(tmp_path: Path) -> None:
    net = Net()
    net.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)), nn.Linear(4, 1))
    trainer = trainer_of(net, gs.Surgery(gs.Intervention(gs.Scale(2.0))), tmp_path)
    other = gs.Surgery(gs.Intervention(gs.Scale(0.5), names=("half",)))
    trainer.add_callback(gs.integrations.transformers.SurgeryCallback(other, log="net.0.*"))
    trainer.train()
    logged = [path for path in trainer.state.log_history[0] if path.startswith("effect/")]
    assert len([path for path in logged if path.startswith("effect/scale/")]) <= 30
    assert "effect/scale/mean/cosine" in logged
    sites = {path.split("/")[2] for path in logged if "/net." in path and "/block/" not in path}
    assert sites == {"net.0.weight", "net.0.bias"}


@pytest.mark.full
def test_an_exception_leaves_no_hook_and_training_may_begin_again(tmp_path: Path) -> None:
    class Failing(transformers.Trainer):
        fails = True

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.fails and self.state.global_step == 2:
                raise OSError("disk")
            return super().training_step(*args, **kwargs)

    net = Net()
    trainer = trainer_of(net, gs.Surgery(gs.Intervention(gs.Scale(2.0))), tmp_path, Failing)
    with pytest.raises(OSError, match="disk"):
        trainer.train()
    assert num_hooks(net) == 0
    trainer.fails = False
    trainer.train()
    assert num_hooks(net) == 0


def losses_of(net: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    out = net(**batch)["logits"].float()
    return {"a": out.square().mean(), "b": (out - batch["labels"]).abs().mean()}


def pcgrad() -> gs.Surgery:
    return gs.Surgery(gs.Intervention(gs.PCGrad(), gs.SharedParameters()))


@pytest.mark.full
@pytest.mark.parametrize("scaled", [False, True], ids=["float32", "float16"])
def test_pcgrad_is_that_of_a_plain_loop_also_in_the_last_update_of_an_epoch(
    tmp_path: Path, scaled: bool
) -> None:
    class Several(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *_: Any) -> Tensor:
            both = losses_of(model, self._prepare_inputs(inputs))
            (callback,) = [
                each
                for each in self.callback_handler.callbacks
                if isinstance(each, gs.integrations.transformers.SurgeryCallback)
            ]
            callback.backward(both)
            return sum(both.values()).detach()

    ours, plain = Net(), Net()
    # Eight batches an epoch: 3 + 3 + 2.
    options = {"max_steps": 3, "gradient_accumulation_steps": 3, "save_strategy": "no"}
    trainer = trainer_of(ours, pcgrad(), tmp_path, Several, **options)
    if scaled:
        scale_losses(trainer.accelerator)
    trainer.train()
    trainer = trainer_of(Net(), gs.Surgery(), tmp_path, **options)
    transformers.set_seed(42)
    batches = list(trainer.get_train_dataloader())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pcgrad().attach(plain, optimizer) as live:
        for index, batch in enumerate(batches):
            with torch.autocast("cpu", torch.float16, enabled=scaled):
                losses = losses_of(plain, batch)
            live.backward(losses, scale=1 / (3 if index < 6 else 2))
            if index % 3 == 2 or index == 7:
                optimizer.step()
                optimizer.zero_grad()
    tolerance = {"rtol": 0.01, "atol": 2e-3} if scaled else {"rtol": 1e-5, "atol": 1e-6}
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


class Counting(nn.Module):
    """A model whose losses are divided by `num_items_in_batch`, as those of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net().net

    def forward(
        self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        known = labels != -100
        count = known.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        errors = (self.net(x).squeeze(-1) - labels)[known]
        square, absolute = errors.square().sum() / count, errors.abs().sum() / count
        return {"loss": square + absolute, "square": square, "absolute": absolute}


def counting_trainer(folder: Path, counted: bool = True, **options: Any) -> Any:
    """A Trainer of `Counting` that gives two losses to the callback, with these options.

    `counted` is whether the model gets `num_items_in_batch`.
    """

    class Several(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items: Any = None) -> Tensor:
            out = model(
                **self._prepare_inputs(inputs), num_items_in_batch=num_items if counted else None
            )
            losses = {"square": out["square"], "absolute": out["absolute"]}
            self.callback_handler.callbacks[0].backward(losses, **options)
            return out["loss"].detach()

    return labelled_in_part(trainer_of(Counting(), gs.Surgery(), folder, Several, **FOUR_BY_TWO))


def labelled_in_part(trainer: Any) -> Any:
    """Leave out a third of the labels, so that batches of two have zero to two of them."""
    for row in trainer.train_dataset[::3]:
        row["labels"] = torch.tensor(-100.0)
    return trainer


FOUR_BY_TWO = {
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.02,
}


def assert_trains_as_the_plain_trainer(trainer: Any, counted: bool = True) -> None:
    trainer.train()
    plain = labelled_in_part(transformers.Trainer(Counting(), trainer.args, train_dataset=rows()))
    plain.model_accepts_loss_kwargs = counted
    plain.train()
    for one, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"normalized": True},
        pytest.param({"scale": 1.0}, marks=pytest.mark.full),
        pytest.param({}, marks=pytest.mark.full),
    ],
    ids=["normalized", "scale", "trainer"],
)
def test_losses_divided_by_the_items_of_the_update_are_not_divided_again(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = counting_trainer(tmp_path, **options)
    if not options:
        trainer.loss_is_scaled_for_ga = True
    assert_trains_as_the_plain_trainer(trainer)


@pytest.mark.full
def test_means_over_a_batch_are_divided_by_the_number_of_batches(tmp_path: Path) -> None:
    trainer = counting_trainer(tmp_path, counted=False, normalized=False)
    assert_trains_as_the_plain_trainer(trainer, counted=False)


@pytest.mark.slow
def test_losses_that_may_be_divided_already_are_divided_with_a_warning(tmp_path: Path) -> None:
    trainer = counting_trainer(tmp_path, counted=False)
    with pytest.warns(gs.SurgeryWarning, match="normalized=True for such losses") as warned:
        assert_trains_as_the_plain_trainer(trainer, counted=False)
    assert len([each for each in warned if each.category is gs.SurgeryWarning]) == 1


@pytest.mark.full
def test_normalized_and_scale_exclude_each_other(tmp_path: Path) -> None:
    trainer = counting_trainer(tmp_path, normalized=True, scale=0.5)
    with pytest.raises(ValueError, match="not both. Found normalized=True, scale=0.5"):
        trainer.train()
