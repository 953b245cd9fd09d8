"""The callback in Lightning: exact, before its clipping, resumed, and gone after an exception."""

import csv
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradsurg as gs
from tests.nets import num_hooks

pl: Any = None  # imported by the first test
pytestmark = [
    pytest.mark.skipif(not find_spec("lightning"), reason="needs the extra trainers"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::gradsurg.effects.ledger.SurgeryWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _import() -> None:
    globals()["pl"] = import_module("lightning.pytorch")


def module_of(several: bool = False, fails_at: int = -1) -> Any:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            self.automatic_optimization = not several
            self.several, self.fails_at = several, fails_at

        def losses(self, batch: list[Tensor]) -> dict[str, Tensor]:
            x, y = batch
            out = self.net(x)
            return {"a": (out[:, 0] - y).square().mean(), "b": (out[:, 1] + y).abs().mean()}

        def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
            if index == self.fails_at:
                raise OSError("disk")
            losses = self.losses(batch)
            if not self.several:
                return losses["a"] + losses["b"]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.surgery.backward(losses)
            optimizer.step()
            return None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


def data(size: int = 32) -> DataLoader:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1)), batch_size=4)


def at_step(*transforms: Any) -> gs.Surgery:
    return gs.Surgery(*(gs.Intervention(t, gs.Parameters(stage="step")) for t in transforms))


def fit(module: Any, surgery: gs.Surgery, folder: Path, max_steps: int = 8, **options: Any) -> Any:
    path, loader = options.pop("ckpt_path", None), data(options.pop("size", 32))
    log = options.pop("log", "auto")
    trainer = pl.Trainer(
        max_steps=max_steps,
        callbacks=[
            pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1),
            gs.integrations.lightning.SurgeryCallback(surgery, log=log),
        ],
        logger=pl.loggers.CSVLogger(folder),
        log_every_n_steps=2,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader, ckpt_path=path)
    return trainer


@pytest.mark.full
def test_pcgrad_in_manual_optimization_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    def surgery() -> gs.Surgery:
        return gs.Surgery(gs.Intervention(gs.PCGrad(), gs.SharedParameters()))

    module, plain = module_of(several=True), module_of()
    fit(module, surgery(), tmp_path)
    optimizer = plain.configure_optimizers()
    with surgery().attach(plain, optimizer) as live:
        for batch in data():
            optimizer.zero_grad()
            live.backward(plain.losses(batch))
            optimizer.step()
    assert all(map(torch.equal, module.parameters(), plain.parameters()))


@pytest.mark.slow
def test_a_resumed_training_ends_bit_identical_with_the_state_of_the_surgery(
    tmp_path: Path,
) -> None:
    whole, first, second = module_of(), module_of(), module_of()
    # Lightning resumes inside an epoch with its first batches again: four of them are an epoch.
    fit(whole, at_step(gs.GrokfastEMA()), tmp_path / "a", size=16)
    fit(first, at_step(gs.GrokfastEMA()), tmp_path / "b", 4, size=16)
    path = next((tmp_path / "b").glob("*.ckpt"))
    saved = torch.load(path, weights_only=False)
    assert not any("gradsurg" in key for key in saved["state_dict"])
    surgery = at_step(gs.GrokfastEMA())
    fit(second, surgery, tmp_path / "b", ckpt_path=path, size=16)
    assert surgery.state_dict()["step"] == 8
    assert all(map(torch.equal, whole.parameters(), second.parameters()))


@pytest.mark.full
def test_an_exception_leaves_no_hook(tmp_path: Path) -> None:
    module = module_of(fails_at=3)
    surgery = gs.Surgery(gs.Intervention(gs.Scale(2.0)))
    with pytest.raises(OSError, match="disk"):
        fit(module, surgery, tmp_path)
    assert num_hooks(module) == 0
    with surgery.attach(module, module.configure_optimizers()) as live:
        live.abort()


@pytest.mark.full
def test_lightnings_own_logger_gets_the_effects_of_all_batches(tmp_path: Path) -> None:
    surgery = gs.Surgery(gs.Intervention(gs.Scale(2.0)))
    trainer = fit(module_of(), surgery, tmp_path, 4, accumulate_grad_batches=2, log="net.0.weight")
    trainer.logger.save()
    with open(Path(trainer.logger.log_dir) / "metrics.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    # Two rows of two steps with two batches each.
    assert [float(line["effect/scale/net.0.weight/calls"]) for line in lines] == [4, 4]
    assert not any("net.0.bias" in name for name in lines[0])


CONFIG = {
    "_target_": "gradsurg.integrations.lightning.SurgeryCallback",
    "_recursive_": False,
    "surgery": {
        "transform": {"grokfast_ema": {"_target_": "gradsurg.GrokfastEMA"}},
        "site": {"_target_": "gradsurg.Parameters", "stage": "step"},
    },
}


def fit_with(callback: Any, folder: Path) -> Any:
    module = module_of()
    callbacks = [] if callback is None else [callback]
    pl.Trainer(
        max_steps=8,
        callbacks=callbacks,
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, data())
    return module


@pytest.mark.slow
def test_a_config_is_a_surgery_none_changes_nothing_and_the_effects_stay(tmp_path: Path) -> None:
    made = instantiate(OmegaConf.create(CONFIG))
    by_hand = gs.integrations.lightning.SurgeryCallback(at_step(gs.GrokfastEMA()))
    empty = instantiate(OmegaConf.create({**CONFIG, "surgery": None}))
    assert made.effects is None
    modules = [fit_with(each, tmp_path) for each in (made, by_hand, empty, None)]
    weights = [nn.utils.parameters_to_vector(module.parameters()) for module in modules]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[1], weights[2])
    assert made.live is None
    assert made.effects.table() == by_hand.effects.table()
    assert "net.0.weight" in made.effects.table()
    assert empty.effects.rows() == []
    assert empty.state_dict() == {}
