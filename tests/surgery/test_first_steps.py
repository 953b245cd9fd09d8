"""The first steps warn of interventions that do not act, and of a clock that stands still."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.transforms.base import Transform
from tests.multitask.nets import Net, at_shared, losses_of
from tests.nets import attached, backward, batch, num_watching, sgd, small, train, trainee
from tests.sites.points import Made, recomputed


class Idle(nn.Module):
    """A model with a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def _told(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[list[str]]:
    """The warnings of each of some steps."""
    texts = []
    for _ in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, optimizer, 1)
        texts.append([str(warning.message) for warning in caught])
    return texts


@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize("at", [gs.Parameters("idle.*"), gs.Outputs("idle")], ids=repr)
@pytest.mark.filterwarnings("ignore:.*(no gradient ever|none of its sites)")
def test_sites_that_are_never_met_are_told_after_the_second_step(at, has_optimizer: bool) -> None:
    model = Idle()
    optimizer = sgd(model)
    given = (optimizer,) if has_optimizer else ()
    with attached(model, gs.Scale(1.0), at, *given):
        assert num_watching(model) > 0
        told = _told(model, optimizer)
        assert num_watching(model) == 0
    assert [len(texts) for texts in told] == [0, 1, 0, 0]
    assert told[1][0].startswith("scale: no gradient passed at idle")
    assert told[1][0].endswith(" in the first steps. Does the loss depend on it?")


@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize(
    ("item", "label"),
    [
        (at_shared(gs.PCGrad()), "pcgrad"),
        (gs.Intervention(gs.Zero(), when=gs.ForTask("a")), "zero"),
    ],
    ids=["aggregator", "task"],
)
@pytest.mark.filterwarnings("ignore:.*its trigger never fired")
def test_a_plain_backward_of_the_sum_is_told_once_in_the_first_steps(
    item: gs.Intervention, label: str, has_optimizer: bool
) -> None:
    model = Net()
    optimizer = sgd(model)
    told: list[list[str]] = []
    with gs.Surgery(item).attach(model, *([optimizer] if has_optimizer else [])):
        for step in range(4):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                sum(losses_of(model, step).values()).backward()
                optimizer.step()
            told.append([str(warning.message) for warning in caught])
    text = f"{label}: call live.backward(losses) in place of sum(losses).backward(): it was not"
    assert [len(texts) for texts in told] == [0, 1, 0, 0]
    assert text in told[1][0]


def test_a_plain_backward_is_not_told_beside_jacobians_or_a_trigger_that_fires_in_it() -> None:
    model = Net()
    optimizer = sgd(model)
    other = gs.Intervention(gs.Scale(0.5), when=gs.Unless(gs.ForTask("a")))
    for items in ([at_shared(gs.PCGrad()), other], [other]):
        with gs.Surgery(*items).attach(model, optimizer) as live:
            for step in range(3):
                losses = losses_of(model, step)
                if len(items) > 1:
                    live.jacobian(losses)
                sum(losses.values()).backward()
                optimizer.step()
            assert {entry.fired > 0 for entry in live.ledger} == {True}


def _accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, batches: int = 6) -> None:
    for _ in range(batches):
        backward(model)
    optimizer.step()
    optimizer.zero_grad()


def _accumulated(at: gs.Parameters | gs.Weights) -> None:
    model, optimizer = trainee()
    with attached(model, gs.Scale(0.9 if isinstance(at, gs.Weights) else 1.0), at, optimizer):
        _accumulate(model, optimizer)


def _gan(parts: str) -> None:
    """The part that is not counted makes five steps before each one that is."""
    model = nn.ModuleDict({"g": small(), "d": small(1)})
    optimizers = {name: sgd(model[name]) for name in "gd"}
    at = gs.Parameters("g.*" if parts == "g" else "*", stage="step")
    with attached(model, gs.Scale(1.0), at, [optimizers[name] for name in parts]):
        for name in "dddddgdddddg":
            train(model[name], optimizers[name], 1)


def _renormed() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1), nn.Linear(3, 1))
    with attached(model, gs.Scale(1.0), None, sgd(model)):
        for _ in range(6):
            model(torch.arange(5)).sum().backward()
        model.zero_grad()


def _lbfgs() -> None:
    model = small()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch()[0]).square().sum()
        loss.backward()
        return loss

    with attached(model, gs.Scale(1.0), None, optimizer):
        optimizer.step(closure)


def _perturbed() -> None:
    """Each batch also has a backward pass at other weights, like in SAM."""
    model, optimizer = trainee()
    with attached(model, gs.Scale(1.0), None, optimizer):
        for change in (0.01, -0.01) * 6:
            backward(model)
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(change)
        optimizer.step()


def _by_hand(when: gs.Trigger, work: Callable[..., None], move: Callable[[gs.Live], None]) -> None:
    model, optimizer = trainee()
    with attached(model, gs.Scale(1.0), when=when) as live:
        for _ in range(2):
            work(model, optimizer)
            move(live)


def _loaded() -> None:
    model, optimizer = trainee()
    surgery = gs.Surgery(gs.Intervention(gs.Scale(1.0)))
    at_first = surgery.state_dict()
    with surgery.attach(model, optimizer):
        train(model, optimizer, 2)
    with surgery.attach(model, optimizer):
        surgery.load_state_dict(at_first)
        train(model, optimizer, 4)


def _without_optimizer(model: nn.Module, transform: Transform) -> None:
    with attached(model, transform):
        for _ in range(3):
            model(torch.ones(2, 6, requires_grad=True)).sum().backward()


def _twice(self: Made, x: Tensor) -> Tensor:
    return recomputed(self.layer, recomputed(self.layer, x, True), True)


FINE = {
    "batches are accumulated": lambda: _accumulated(gs.Parameters(stage="accumulated")),
    "weights are noisy in each forward": lambda: _accumulated(gs.Weights(stage="forward")),
    "a part of several optimizers counts": lambda: _gan("gd"),
    "another optimizer steps first": lambda: _gan("g"),
    "a table is normalized in each forward": _renormed,
    "a closure is called several times in a step": _lbfgs,
    "weights are perturbed for a second gradient": _perturbed,
    "ticks by hand, of accumulated batches": lambda: _by_hand(
        gs.Steps(stop=9), _accumulate, gs.Live.tick
    ),
    "epochs by hand": lambda: _by_hand(
        gs.Epochs(stop=9), lambda *of: train(*of, steps=4), gs.Live.next_epoch
    ),
    "a state of before is loaded": _loaded,
    "each pass is one of two checkpoints, without an optimizer": lambda: _without_optimizer(
        Made(_twice, layer=nn.Linear(6, 6)), gs.Scale(1.0)
    ),
    "gradients are added up without an optimizer": lambda: _without_optimizer(
        small(), gs.Clip(1.0)
    ),
}


@pytest.mark.filterwarnings("error::gradsurg.SurgeryWarning")
@pytest.mark.parametrize("name", [*FINE])
def test_nothing_is_told_where_all_is_well(name: str) -> None:
    FINE[name]()
