"""Every optimizer that has a config trains and resumes; those that cannot are refused."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

import gradsurg as gs
from gradsurg.experiment.loop import train
from gradsurg.experiment.optimizers import MakeOptimizer, optimizer_maker
from gradsurg.experiment.run import Run
from tests.nets import small, weights
from tests.runs import Wrapped, a_run, assert_resumes, data

FOLDER = Path(__file__).parents[2] / "conf" / "optimizer"
CONFIGS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*.yaml"))
}


def maker(config: dict[str, Any]) -> MakeOptimizer:
    return optimizer_maker(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_with_fields_only_an_optimizer_checks_its_fields_and_holds_no_parameters(name: str) -> None:
    bare = optimizer_maker(CONFIGS[name], fields_only=True)(small())
    whole = maker(CONFIGS[name])(small())
    assert type(bare) is type(whole)
    assert bare.defaults == whole.defaults
    assert [group["params"] for group in bare.param_groups] == [[]]
    with pytest.raises(ValueError, match=r"\(lr=-1.* is refused: "):
        optimizer_maker(CONFIGS[name] | {"lr": -1}, fields_only=True)(small())


@pytest.mark.parametrize("name", CONFIGS)
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
    optimizer = maker(CONFIGS[name])(model)
    assert type(optimizer) is type(by_hand)
    before = weights(model)
    steps = list(train(model, optimizer, functional.cross_entropy, data(), 8))
    assert [step.loss.item() for step in steps] == losses
    assert all(map(torch.equal, weights(plain), weights(model)))
    assert not any(map(torch.equal, weights(model), before))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    def optimized(at: int) -> Run:
        run = a_run(gs.Clip(0.05), task=Wrapped(at, "raise"))
        return replace(run, make_optimizer=maker(CONFIGS[name]))

    assert_resumes(optimized, tmp_path, 15)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LBFGS", "LBFGS needs a closure that computes the loss again"),
        ("SparseAdam", "SparseAdam takes sparse gradients alone"),
        ("Adm", "there is no 'Adm' in torch.optim"),
    ],
)
def test_an_unusable_optimizer_or_schedule_is_refused_with_the_reason(
    name: str, message: str
) -> None:
    with pytest.raises((ValueError, LookupError), match=message) as caught:
        maker({"name": name})(small())
    assert "There are: " in str(caught.value)
    assert "LBFGS" not in str(caught.value).partition("There are: ")[2]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_refuses_parameters_that_are_no_matrices() -> None:
    with pytest.raises(ValueError, match=r"Muon\(lr=0.01\) is refused: Muon only supports 2D"):
        maker({"name": "Muon", "lr": 0.01})(small())
    assert maker({"name": "Muon", "lr": 0.01})(nn.Linear(2, 2, bias=False))
