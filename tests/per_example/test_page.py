"""The code of docs/per_example.md runs."""

import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import gradsurg as gs

PAGE = Path(__file__).parents[2] / "docs" / "per_example.md"


def test_the_code_of_the_page_runs(capsys) -> None:
    (clip,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
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
