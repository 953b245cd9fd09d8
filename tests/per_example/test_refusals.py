"""Models and losses without gradients of single examples are refused by name."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradsurg as gs
from gradsurg.plugins.fields import FieldError


class Model(nn.Module):
    """A linear readout of what `call` makes of the first layer's output."""

    def __init__(self, call, **modules: nn.Module) -> None:
        super().__init__()
        self.first, self.output = nn.Linear(4, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6))
        self.call = call
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(self.call(self, self.first(inputs)) * self.scale)


def step(model: nn.Module, inputs: Tensor, count: int = 8, scale: float = 1.0, **fields) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    transform = gs.PerSample(gs.ClipGlobalNorm(1.0), **fields)
    with gs.Surgery(gs.Intervention(transform)).attach(model, optimizer):
        (scale * functional.cross_entropy(model(inputs), torch.arange(count) % 3)).backward()
        optimizer.step()


def test_the_supported_model_is_not_refused() -> None:
    step(Model(lambda model, x: x.tanh()), torch.randn(8, 4))


@pytest.mark.parametrize(
    ("call", "modules", "message"),
    [
        (lambda m, x: m.norm(x), {"norm": nn.BatchNorm1d(6)}, "BatchNorm1d 'norm'.*the batch"),
        (lambda m, x: m.norm(x), {"norm": nn.BatchNorm1d(6, affine=False)}, "BatchNorm1d 'norm'"),
        (lambda m, x: m.rnn(x[:, None])[0][:, 0], {"rnn": nn.GRU(6, 6, batch_first=True)}, "GRU"),
        (lambda m, x: x - x.mean(0), {}, "mixes the examples"),
        (lambda m, x: functional.linear(x, m.output.weight.T[:, :1].expand(6, 6)), {}, "output.we"),
        (lambda m, x: functional.dropout(x), {}, "scale: the whole model.*random"),
    ],
)
def test_a_model_without_gradients_of_single_examples_is_refused(call, modules, message) -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=message):
        step(Model(call, **modules), torch.randn(8, 4))


def test_a_model_that_mixes_its_examples_is_refused_though_the_rows_sum_to_the_gradient() -> None:
    class Centered(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs - inputs.mean(0)

    with pytest.raises(ValueError, match="first example of the batch has another gradient"):
        step(nn.Sequential(nn.Linear(4, 6), Centered(), nn.Linear(6, 3)), torch.randn(8, 4))


def test_batch_norm_in_evaluation_is_accepted() -> None:
    step(Model(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(6).eval()), torch.randn(8, 4))


def test_a_gradient_of_an_unrecorded_backward_is_refused() -> None:
    model = nn.Linear(4, 3)
    functional.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
    with pytest.raises(ValueError, match="do not sum to the gradient of weight, bias"):
        step(model, torch.randn(8, 4))


def test_a_step_without_a_recorded_backward_is_refused() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    surgery = gs.Surgery(gs.Intervention(gs.PerSample(gs.ClipGlobalNorm(1.0))))
    with surgery.attach(model, optimizer), pytest.raises(RuntimeError, match="no backward pass"):
        functional.linear(torch.randn(8, 4), model.weight, model.bias).sum().backward()
        optimizer.step()


def test_a_second_axis_of_examples_is_refused() -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNNCell(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:  # (time, batch, features)
            state = inputs.new_zeros(inputs.shape[1], 3)
            for part in inputs:
                state = self.rnn(part, state)
            return state

    with pytest.raises(ValueError, match="recorded batch|axis of 5 examples"):
        step(Sequences(), torch.randn(5, 8, 4))


@pytest.mark.parametrize(("declared", "other"), [("mean", "sum"), ("sum", "mean")])
def test_the_other_reduction_of_a_cross_entropy_is_noticed(declared: str, other: str) -> None:
    torch.manual_seed(0)
    model, factor = nn.Linear(4, 3), 8.0 if other == "sum" else 1.0
    with pytest.warns(gs.SurgeryWarning, match=f"Is it reduction='{other}'"):
        step(model, torch.randn(8, 4), scale=factor, reduction=declared)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"of": gs.Momentum()}, "PerSample.of: must have no state"),
        ({"of": gs.Mean()}, "PerSample.of: must read the gradients"),
        ({"of": gs.TrimmedMean}, r"PerSample.of: .*did you mean TrimmedMean\(\)"),
        ({"of": gs.Clip(0.1), "noise": 1.0}, "PerSample.noise: needs a transform that bounds"),
        ({"of": 3}, "PerSample.of: must be a transform or an aggregator"),
    ],
)
def test_wrong_fields_are_refused(fields, message: str) -> None:
    with pytest.raises(FieldError, match=message):
        gs.PerSample(**fields)


def test_only_the_first_link_of_a_chain_has_the_examples() -> None:
    with pytest.raises(ValueError, match="must be the first link"):
        gs.Chain(gs.Clip(0.1), gs.PerSample(gs.ClipGlobalNorm(1.0)))
