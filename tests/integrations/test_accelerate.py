"""Accelerate: `register_for_checkpointing(surgery)`, its optimizer, accumulation and clipping."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsurg as gs

accelerate = pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::gradsurg.effects.ledger.SurgeryWarning"),
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def surgery() -> gs.Surgery:
    return gs.Surgery(gs.Intervention(gs.GrokfastEMA(), gs.Parameters(stage="step")))


def train(folder: Path, num_steps: int, resume: Path | None = None) -> tuple[list[Any], Path]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
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


def test_a_resumed_training_ends_bit_identical_and_counts_real_steps(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "a", 6)
    _, folder = train(tmp_path / "b", 3)
    resumed, _ = train(tmp_path / "c", 6, folder)
    assert all(map(torch.equal, whole, resumed))
