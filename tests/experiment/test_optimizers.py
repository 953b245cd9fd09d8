"""Every optimizer that has a config trains; those that cannot are refused."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

from gradsurg.experiment.loop import train
from gradsurg.experiment.optimizers import make_optimizer
from tests.nets import small, weights
from tests.runs import data

FOLDER = Path(__file__).parents[2] / "conf" / "optimizer"
CONFIGS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_it_trains_like_a_plain_loop(name: str) -> None:
    plain, model = small(), small()
    fields = {key: value for key, value in CONFIGS[name].items() if key != "name"}
    by_hand = getattr(torch.optim, CONFIGS[name]["name"])(plain.parameters(), **fields)
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
    ("config", "message"),
    [
        ({"name": "LBFGS"}, "LBFGS needs a closure that computes the loss again.*There are: Ad"),
        ({"name": "SparseAdam"}, "SparseAdam takes sparse gradients alone"),
        ({"name": "Adm"}, "there is no 'Adm' in torch.optim"),
        ({"name": "SGD", "lr": -1}, r"^SGD\(lr=-1\) is refused: Invalid learning rate: -1$"),
        ({"name": "SGD", "momentum": "x"}, "is refused: momentum: must be a number, found 'x'"),
        ({"name": "SGD", "momentun": 1}, "momentun: is not a field.*Did you mean 'momentum'"),
        ({"name": "Muon", "lr": 0.01}, r"Muon\(lr=0.01\) is refused: Muon only supports 2D"),
    ],
)
def test_an_unusable_optimizer_is_refused_with_the_reason(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, LookupError), match=message) as caught:
        make_optimizer(config, small())
    assert "LBFGS" not in str(caught.value).partition("There are: ")[2]
    assert "\n" not in str(caught.value)


def test_muon_trains_matrices() -> None:
    assert make_optimizer({"name": "Muon", "lr": 0.01}, nn.Linear(2, 2, bias=False))
