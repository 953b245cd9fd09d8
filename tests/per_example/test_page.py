"""The code of docs/per_example.md runs."""

import re
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import gradsurg as gs

PAGE = Path(__file__).parents[2] / "docs" / "per_example.md"


def test_the_code_of_the_page_runs(capsys) -> None:
    clip, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    model = nn.Sequential(nn.Linear(6, 10))
    names = {
        "gs": gs,
        "torch": torch,
        "model": model,
        "loss_fn": functional.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(torch.randn(8, 6), torch.arange(8))],
    }
    exec(clip, names)
    assert "norm_median" in capsys.readouterr().out


def test_routing_by_label_trains_the_units_of_each_label_alone() -> None:
    _, route = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    layers = OrderedDict(encoder=nn.Linear(6, 32), decoder=nn.Linear(32, 6))
    model = nn.Sequential(layers)
    names = {
        "gs": gs,
        "torch": torch,
        "model": model,
        "loss_fn": functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))],
    }
    exec(route, names)
    grad = layers["encoder"].weight.grad
    assert grad is not None
    assert bool((grad[:16] != 0).any())
    assert not bool((grad[16:] != 0).any())
