"""Every optimizer that has a config trains; those that cannot are refused."""

from itertools import islice
from pathlib import Path
from typing import Any

import hydra.utils
import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

from gradsurg.experiment.loop import train
from gradsurg.experiment.optimization import make_optimizer
from tests.nets import small, weights
from tests.runs import data

FOLDER = Path(__file__).parents[2] / "conf" / "optimizer"
CONFIGS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_it_trains_like_a_plain_loop(name: str) -> None:
    plain, model = small(), small()
    by_hand = hydra.utils.instantiate(CONFIGS[name])(plain.parameters())
    losses = []
    for inputs, targets in islice(data().start(0), 8):
        by_hand.zero_grad()
        loss = functional.cross_entropy(plain(inputs), targets)
        loss.backward()
        by_hand.step()
        losses.append(loss.item())
    before = weights(model)
    optimizer = make_optimizer(CONFIGS[name], model)
    steps = list(train(model, optimizer, functional.cross_entropy, data(), 8))
    assert [step.loss.item() for step in steps] == losses
    assert all(map(torch.equal, weights(plain), weights(model)))
    assert not any(map(torch.equal, weights(model), before))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("LBFGS", {}, "LBFGS needs a closure that computes the loss again"),
        ("SparseAdam", {}, "SparseAdam takes sparse gradients alone"),
        ("Adm", {}, "did you mean 'Adam'. There is no 'Adm' in torch.optim"),
        ("SGD", {"lr": -1}, r"^SGD\(lr=-1\) is refused: Invalid learning rate: -1$"),
        ("SGD", {"momentum": "x"}, "is refused: momentum: must be a number, found 'x'"),
        ("SGD", {"momentun": 1}, "momentun: did you mean 'momentum'"),
        ("Muon", {"lr": 0.01}, r"Muon\(lr=0.01\) is refused: Muon only supports 2D"),
    ],
)
def test_an_unusable_optimizer_is_refused_with_the_reason(
    name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, ImportError), match=message) as caught:
        make_optimizer({"_target_": f"torch.optim.{name}", **fields}, small())
    assert "\n" not in str(caught.value)


def test_muon_trains_matrices() -> None:
    assert make_optimizer({"_target_": "torch.optim.Muon", "lr": 0.01}, nn.Linear(2, 2, bias=False))
