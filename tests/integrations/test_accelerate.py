"""Accelerate: `register_for_checkpointing(surgery)`, its optimizer, accumulation and clipping."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from tests.integrations.settings import scale_losses

pytestmark = [
    pytest.mark.skipif(not find_spec("accelerate"), reason="needs the extra trainers"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::gradsurg.effects.ledger.SurgeryWarning"),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def surgery() -> gs.Surgery:
    return gs.Surgery(gs.Intervention(gs.GrokfastEMA(), gs.Parameters(stage="step")))


def accelerator_of(**options: Any) -> Any:
    accelerate = import_module("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # a test may have set the precision
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)


def train(folder: Path, num_steps: int, resume: Path | None = None) -> tuple[list[Any], Path]:
    accelerator = accelerator_of()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    operation = surgery()
    accelerator.register_for_checkpointing(operation)
    first = 0
    if resume is not None:
        accelerator.load_state(str(resume))
        state = operation.state_dict()["step"]
        assert isinstance(state, int)
        first = state
    with operation.attach(model, optimizer) as live:
        for step in range(2 * first, 2 * num_steps):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert live.step == num_steps
    accelerator.save_state(str(folder))
    return list(model.parameters()), folder


@pytest.mark.slow
def test_a_resumed_training_ends_bit_identical_and_counts_real_steps(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "a", 6)
    _, folder = train(tmp_path / "b", 3)
    resumed, _ = train(tmp_path / "c", 6, folder)
    assert all(map(torch.equal, whole, resumed))
    saved = import_module("safetensors.torch").load_file(folder / "model.safetensors")
    assert saved.keys() == net().state_dict().keys()


@pytest.mark.full
@pytest.mark.parametrize("scaled", [False, True], ids=["float32", "float16"])
def test_pcgrad_with_accumulation_is_that_of_a_plain_loop(scaled: bool) -> None:
    accelerator = accelerator_of()
    if scaled:
        scale_losses(accelerator)
    ours, plain = net(), net()
    optimizer, plain_optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, plain)
    )
    model, optimizer = accelerator.prepare(ours, optimizer)

    def losses(model: nn.Module, step: int) -> list[Tensor]:
        out = model(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).float()
        return [out.square().mean(), (out - 1).abs().mean()]

    def pcgrad() -> gs.Surgery:
        return gs.Surgery(gs.Intervention(gs.PCGrad(), gs.SharedParameters()))

    with (
        pcgrad().attach(model, optimizer, scaler=accelerator.scaler) as live,
        pcgrad().attach(plain, plain_optimizer) as other,
    ):
        for step in range(8):
            with accelerator.accumulate(model):
                tasks = losses(model, step)
                if scaled:
                    tasks = [accelerator.scaler.scale(loss) for loss in tasks]
                live.backward(tasks, scale=1 / accelerator.gradient_accumulation_steps)
                optimizer.step()
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=scaled):
                tasks = losses(plain, step)
            other.backward(tasks, scale=0.5)
            if step % 2:
                plain_optimizer.step()
                plain_optimizer.zero_grad()
        assert live.step == 4
    tolerance = {"rtol": 0.01, "atol": 2e-3} if scaled else {"rtol": 1e-5, "atol": 1e-6}
    for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, **tolerance)
