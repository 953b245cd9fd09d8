"""A state belongs to one shape of the gradient: a smaller last batch is refused, by name."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradsurg as gs
from gradsurg.transforms.base import Transform
from tests.nets import attached

ENTRYWISE = (
    *(gs.Momentum(), gs.GrokfastEMA(), gs.GrokfastMA(window=2), gs.ScaleByRMS()),
    *(gs.MovingMedian(), gs.SpikeClip(), gs.SignAgreement(), gs.Delay(1)),
    *(gs.ErrorFeedback(gs.Sign()), gs.DGC()),
)


def train(transform: Transform, *batches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    surgery = gs.Surgery(gs.Intervention(transform, gs.Outputs("1")))
    with surgery.attach(model):
        for size in batches:
            model(torch.randn(size, 3)).sum().backward()


@pytest.mark.parametrize("transform", ENTRYWISE, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("batches", [(4, 4, 3), (1, 4)], ids=str)
def test_a_batch_of_another_size_is_refused_with_the_site_and_both_shapes(
    transform: Transform, batches: tuple[int, ...]
) -> None:
    """(1, 4) would be broadcast without a word."""
    train(transform, *batches[:-1])
    message = rf"drop_last.* '1#0' .* is \[{batches[-1]}, 2\] and.*found \[.*{batches[0]}, 2\]"
    with pytest.raises(ValueError, match=message):
        train(transform, *batches)


def test_a_state_that_has_no_entry_of_its_own_for_each_of_the_gradients_takes_any_batch() -> None:
    train(gs.GrowthClip(), 4, 4, 3, 1, 4)


def test_a_state_that_is_loaded_is_checked_too() -> None:
    surgery = gs.Surgery(gs.Intervention(gs.Momentum(), gs.Outputs("1")))
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with surgery.attach(model):
        model(torch.randn(1, 3)).sum().backward()
    fresh = gs.Surgery(gs.Intervention(gs.Momentum(), gs.Outputs("1")))
    fresh.load_state_dict(surgery.state_dict())
    with fresh.attach(model), pytest.raises(ValueError, match=r"of \[4, 2\], found \[1, 2\]"):
        model(torch.randn(4, 3)).sum().backward()


KEEP_NAN = (gs.Momentum(), gs.GrokfastEMA(), gs.ScaleByRMS(), gs.ErrorFeedback(gs.Scale(0.5)))


@pytest.mark.parametrize("transform", KEEP_NAN, ids=repr)
def test_a_nan_that_stays_in_a_state_is_told_once_at_the_end(transform: Transform) -> None:
    for before in ((), (gs.Sanitize(),)):
        weight = nn.Parameter(torch.zeros(2))
        model = nn.ParameterDict({"weight": weight})
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with attached(
                model, gs.Chain(*before, transform), gs.Parameters(stage="step"), optimizer
            ):
                for entry in (1.0, torch.nan, 1.0):
                    weight.grad = torch.tensor([entry, 1.0])
                    optimizer.step()
        told = [str(one.message) for one in caught if "Sanitize before" in str(one.message)]
        name = type(transform).__name__
        says = f"put Sanitize before {name}, to remove NaN from its gradients: the state of {name}"
        says += " at weight holds a NaN, seen at step 3"
        assert [text.partition(": ")[2] for text in told] == ([] if before else [says])


class Reads(TorchDispatchMode):
    """Counts the reads of single numbers, each of which waits for the device."""

    number = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_states_are_not_read_one_by_one() -> None:
    model = nn.Linear(3, 2)
    surgery = gs.Surgery(gs.Intervention(gs.Momentum()))
    live = surgery.start(model)
    model(torch.full((1, 3), torch.nan)).sum().backward()
    with pytest.warns(gs.SurgeryWarning, match="the state of Momentum at weight"), Reads() as reads:
        live.close()
    assert reads.number == 0
