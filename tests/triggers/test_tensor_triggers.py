"""Threshold, AllSameSign and Shape: their measurements, decided on the device without syncs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.transforms.base import Transform, TransformContext, TransformProperty, TransformState
from gradsurg.triggers.base import Clock, TensorTrigger, TriggerContext
from tests.nets import attached, backward, gradients, sgd, small

NAN = float("nan")

never_fires = pytest.mark.filterwarnings("ignore:.* its trigger never fired")


class Sums(nn.Module):
    """A model whose weight gradient is its input."""

    def __init__(self, *start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start or (0.0, 0.0)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def _look(trigger: TensorTrigger, tensor: Tensor) -> float:
    observation = trigger.observe(tensor)
    assert isinstance(observation, Tensor)
    assert observation.ndim == 0
    return observation.item()


@pytest.mark.parametrize(
    ("fields", "values", "expected"),
    [
        ({"measure": "mean_abs"}, [3.0, -1.0, 2.0], 2.0),
        ({"measure": "norm"}, [3.0, -4.0], 5.0),
        ({"measure": "rms"}, [1.0, -7.0], 5.0),
        ({"measure": "max_abs"}, [3.0, -4.0], 4.0),
        ({"measure": "quantile", "q": 0.5}, [4.0, -1.0, 3.0, 2.0], 2.0),
        ({"measure": "quantile", "q": 0.51}, [4.0, -1.0, 3.0, 2.0], 3.0),
        ({"measure": "quantile", "q": 0.0}, [4.0, -1.0], 1.0),
        ({"measure": "quantile", "q": 1.0}, [4.0, -1.0], 4.0),
        # 0.07 * 100 is 7.000000000000001, and seven of a hundred are seven percent.
        ({"measure": "quantile", "q": 0.07}, [float(i) for i in range(1, 101)], 7.0),
        ({"measure": "nan"}, [NAN, 1.0, NAN, 0.0], 0.5),
        ({"measure": "mean_abs"}, [NAN, 1.0], NAN),
        ({"measure": "norm"}, [NAN, 1.0], NAN),
        ({"measure": "rms"}, [NAN, 1.0], NAN),
        ({"measure": "max_abs"}, [1.0, NAN], NAN),
        ({"measure": "quantile", "q": 1.0}, [NAN, 1.0], NAN),
        ({"measure": "quantile", "q": 0.5}, [NAN, 1.0], 1.0),
    ],
)
def test_measurements_computed_by_hand(
    fields: dict[str, Any], values: list[float], expected: float
) -> None:
    measured = _look(gs.Threshold(above=0.0, **fields), torch.tensor(values))
    assert measured == pytest.approx(expected, nan_ok=True)


MEASURES = ("mean_abs", "norm", "rms", "max_abs", "quantile", "nan")

each_measure = pytest.mark.parametrize("measure", MEASURES)


@each_measure
def test_the_measurement_of_an_empty_tensor_is_zero(measure) -> None:
    assert _look(gs.Threshold(0.0, measure), torch.zeros(0, 3)) == 0.0


@each_measure
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 3)])
def test_a_measurement_does_not_depend_on_the_shape(measure, shape) -> None:
    tensor = torch.full(shape, -2.0)
    norm = 2.0 * tensor.numel() ** 0.5
    expected = {"norm": norm, "nan": 0.0}.get(measure, 2.0)
    assert _look(gs.Threshold(0.0, measure), tensor) == pytest.approx(expected)
    assert _look(gs.Threshold(0.0, measure), tensor.expand(3, *shape)) >= 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("measure", "expected"), [("norm", 300.0 * 300), ("mean_abs", 300.0)])
def test_half_precision_is_measured_in_float32(dtype: torch.dtype, measure, expected) -> None:
    # The sums of 90000 entries and of their squares are over what a float16 can hold.
    tensor = torch.full((90000,), 300.0, dtype=dtype)
    assert _look(gs.Threshold(0.0, measure), tensor) == pytest.approx(expected, rel=1e-3)
    assert gs.Threshold(0.0, measure).observe(tensor.double()).dtype is torch.float64  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ([1.0, 2.0], True),
        ([-1.0, -2.0], True),
        ([1.0, -2.0], False),
        ([1.0, 0.0], False),
        ([0.0], False),
        ([1.0, NAN], False),
        ([], False),
        ([3.0], True),
    ],
)
def test_all_same_sign_of_tensors_with_zeros_and_nan(values: list[float], same: bool) -> None:
    observation = gs.AllSameSign().observe(torch.tensor(values))
    assert isinstance(observation, Tensor)
    assert (observation.dtype, observation.ndim, observation.item()) == (torch.bool, 0, same)


@pytest.mark.parametrize(
    ("trigger", "sizes"),
    [
        (gs.Shape(above=2), [3, 4]),
        (gs.Shape(below=2), [0, 1]),
        (gs.Shape(above=0, below=3), [1, 2]),
        (gs.Shape(above=0, below=3, dim=-2), [1, 2]),
        (gs.Shape(above=6, dim=1), [0, 1, 2, 3, 4]),
        (gs.Shape(above=7, dim=1), []),
    ],
)
def test_shape_fires_between_its_bounds(trigger: TensorTrigger, sizes: list[int]) -> None:
    fired = []
    for size in range(5):
        fires = trigger.decide(trigger.observe(torch.zeros(size, 7)), TriggerContext(Clock()))
        assert isinstance(fires, bool)  # the host knows it
        fired += [size] * fires
    assert fired == sizes


def test_a_missing_dimension_is_an_error() -> None:
    model = small()
    message = r"the source has shape \[8, 6\] and no dimension 2"
    with (
        pytest.raises(ValueError, match=message),
        attached(model, gs.Zero(), when=gs.Shape(above=1, dim=2)),
    ):
        backward(model)


@never_fires
@pytest.mark.parametrize("above", [0.9, 1.0])
def test_threshold_fires_above_its_bound_and_not_at_it(above: float) -> None:
    model = Sums()
    with attached(model, gs.Zero(), when=gs.Threshold(above)):
        model(torch.tensor([1.0, -1.0])).backward()
    assert model.w.grad is not None
    assert model.w.grad.tolist() == ([0.0, 0.0] if above < 1 else [1.0, -1.0])


@never_fires
@each_measure
def test_nan_fires_only_the_measure_nan(measure) -> None:
    model = Sums()
    when = gs.Threshold(0.4, measure)
    with attached(model, gs.Zero(), when=when):
        model(torch.tensor([NAN, 5.0])).backward()
    assert model.w.grad is not None
    # Of two entries the 0.99 quantile is the larger, and NaN is the largest.
    assert model.w.grad.tolist()[1] == (0.0 if measure == "nan" else 5.0)


def test_a_selected_gradient_is_the_transforms_result() -> None:
    # 3 > 2 -> clipped; 1 is left alone.
    model = nn.ModuleList([Sums(), Sums()])
    with attached(model, gs.Clip(0.5), when=gs.Threshold(2.0, "max_abs")):
        model[0](torch.tensor([3.0, -1.0])).backward()
        model[1](torch.tensor([1.0, -1.0])).backward()
    grads = [param.grad.tolist() for param in model.parameters() if param.grad is not None]
    assert grads == [[0.5, -0.5], [1.0, -1.0]]


EVERY = [
    *(gs.Threshold(0.1, measure) for measure in MEASURES),
    gs.Threshold(0.1, release=0.05),
    gs.Threshold(0.1, source="value"),
    gs.Threshold(0.1, source="batch"),
    gs.Threshold(0.1, source="output:act"),
    gs.AllSameSign(),
    gs.AllSameSign("input:last"),
    gs.Threshold(0.1) & ~gs.AllSameSign() | gs.Threshold(2.0, "norm"),
]

every_trigger = pytest.mark.parametrize("when", EVERY, ids=repr)


@pytest.mark.one_in(2)
@every_trigger
@pytest.mark.parametrize("at", [gs.Parameters(), gs.Outputs("first"), gs.Parameters(stage="step")])
def test_device_decisions_do_not_synchronize(when: gs.Trigger, at) -> None:
    """Meta tensors have no values, so that reading one raises."""
    model = small().to("meta")
    optimizer = sgd(model)
    with pytest.raises(RuntimeError):
        torch.zeros((), device="meta").item()
    with attached(model, gs.GrokfastEMA(), at, optimizer, when, effects_every=0) as live:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 6, device="meta")).sum().backward()
            optimizer.step()
        assert live.ledger.table()
    assert all(param.grad is not None for param in model.parameters())
    # An unknown event is not reported as an event that never happened.
    assert all((entry.calls, entry.all_fired) == (2, 2) for entry in live.ledger)


def _loss(model: nn.Module) -> Callable[..., Tensor]:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        out = torch.func.functional_call(model, params, (x,))
        return (out * torch.tensor([1.0, -2.0, 0.5])).sum()

    return loss


WITHOUT_MEMORY = [trigger for trigger in EVERY if "release=0" not in repr(trigger)]


@pytest.mark.parametrize("when", WITHOUT_MEMORY, ids=repr)
@never_fires
def test_inside_vmap_each_example_is_decided_separately(when: gs.Trigger) -> None:
    model = small()
    at = gs.Outputs("first")
    params = {name: param.detach() for name, param in model.named_parameters()}
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    with attached(model, gs.Scale(3.0), at, when=when, effects_every=0) as live:
        many = torch.func.vmap(torch.func.grad(_loss(model)), (None, 0))(params, batch)
        ones = [torch.func.grad(_loss(model))(params, example) for example in batch]
        assert live.ledger.table()
    for name, grads in many.items():
        torch.testing.assert_close(grads, torch.stack([by_name[name] for by_name in ones]))


# State: of the transform, and of the trigger itself.


def _sweep(when: gs.Trigger, sizes: list[float], transform: Transform) -> list[float]:
    """Return the results for gradients of these sizes, one after the other."""
    model, grads = Sums(0.0), []
    with attached(model, transform, when=when, effects_every=0):
        for size in sizes:
            model.zero_grad()
            model(torch.tensor([size])).backward()
            assert model.w.grad is not None
            grads.append(model.w.grad.item())
    return grads


def test_a_state_does_not_advance_where_the_device_decides_no() -> None:
    # At 4: m = 4, 4 + 2 * 4 = 12. At 1 nothing. At 8: m = 0.5 * 4 + 0.5 * 8 = 6, 8 + 12 = 20.
    grads = _sweep(gs.Threshold(2.0), [4.0, 1.0, 1.0, 8.0], gs.GrokfastEMA(decay=0.5, strength=2.0))
    assert grads == [12.0, 1.0, 1.0, 20.0]


def test_a_state_is_not_initialized_by_a_gradient_that_is_not_selected() -> None:
    grads = _sweep(gs.Threshold(2.0), [1.0, 1.0, 4.0], gs.GrokfastEMA(decay=0.5, strength=2.0))
    assert grads == [1.0, 1.0, 12.0]


def test_nan_in_a_gradient_that_is_not_selected_stays_out_of_the_state() -> None:
    grads = _sweep(gs.Threshold(2.0), [4.0, NAN, 8.0], gs.GrokfastEMA(decay=0.5, strength=2.0))
    assert grads == pytest.approx([12.0, NAN, 20.0], nan_ok=True)


def test_the_noise_of_a_step_does_not_depend_on_earlier_decisions() -> None:
    def grads(when: gs.Trigger) -> list[Tensor]:
        model = small()
        optimizer = sgd(model, lr=0.0)
        grads = []
        with attached(model, gs.AddNoise(1.0), gs.Parameters("last.bias"), optimizer, when):
            for step in range(3):
                optimizer.zero_grad()
                backward(model, step)
                grads.append(gradients(model)["last.bias"])
                optimizer.step()
        return grads

    # Both leave the first steps alone: the device by asking, the host by not asking.
    loud = gs.Threshold(0.0) & gs.Steps(start=1)
    assert all(map(torch.equal, grads(loud), grads(gs.Steps(start=1))))
    assert not torch.equal(grads(loud)[1], grads(gs.Steps(start=2))[1])


def test_a_trigger_with_a_release_fires_until_the_measurement_is_below_it() -> None:
    sizes = [1.0, 2.5, 1.5, 1.0, 0.5, 1.5, 3.0, NAN, 1.5]
    grads = _sweep(gs.Threshold(2.0, release=1.0), sizes, gs.Scale(10.0))
    fired = [after == 10 * before for after, before in zip(grads, sizes, strict=True)]
    # NaN neither fires nor lets it go on.
    assert fired == [False, True, True, True, False, False, True, False, False]


def test_a_release_at_the_bound_and_a_release_of_zero() -> None:
    sizes = [1.0, 3.0, 2.0, 1.0, 0.0]
    assert _sweep(gs.Threshold(2.0, release=2.0), sizes, gs.Scale(10.0)) == [
        1.0,
        30.0,
        20.0,
        1.0,
        0.0,
    ]
    # Nothing is below 0: it never ends.
    assert _sweep(gs.Threshold(2.0, release=0.0), [1.0, 3.0, 1.0], gs.Scale(10.0)) == [
        1.0,
        30.0,
        10.0,
    ]


def test_hysteresis_is_kept_for_each_site_and_in_the_state_dict() -> None:
    model = nn.ModuleDict({"a": Sums(0.0), "b": Sums(0.0)})
    when = gs.Threshold(2.0, release=1.0)
    surgery = gs.Surgery(gs.Intervention(gs.Scale(10.0), when=when))

    def passed(surgery: gs.Surgery, a: float, b: float) -> list[float]:
        model.zero_grad()
        with surgery.attach(model):
            (model["a"](torch.tensor([a])) + model["b"](torch.tensor([b]))).backward()
        return [param.grad.item() for param in model.parameters() if param.grad is not None]

    assert passed(surgery, 3.0, 1.5) == [30.0, 1.5]
    states: Any = surgery.state_dict()["states"]
    fired = {key: state[repr(when)].item() for key, state in states.items()}
    assert fired == {"scale/a.w/when": True, "scale/b.w/when": False}
    other = gs.Surgery(gs.Intervention(gs.Scale(10.0), when=when))
    other.load_state_dict(surgery.state_dict())
    assert passed(other, 1.5, 3.0) == [15.0, 30.0]


def test_two_triggers_of_one_combination_have_separate_states() -> None:
    # The second has gone off at 3 and goes on at 1.5, the first needs 4.
    when = gs.Threshold(4.0, release=3.5) | gs.Threshold(2.0, release=1.0)
    assert _sweep(when, [3.0, 1.5, 0.5], gs.Scale(10.0)) == [30.0, 15.0, 0.5]


def test_a_transform_must_not_add_keys_to_its_state() -> None:
    class Grows(Transform):
        def __repr__(self) -> str:
            return "Grows()"

        @property
        def properties(self) -> frozenset[TransformProperty]:
            return frozenset()

        def init(self, grad: Tensor) -> TransformState:
            return {}

        def update(
            self, grad: Tensor, state: TransformState, context: TransformContext
        ) -> tuple[Tensor, TransformState]:
            return grad * 2, {"last": grad}

    with pytest.raises(TypeError, match=r"init\(\) of Grows\(\).*found none, then last"):
        _sweep(gs.Threshold(0.0), [1.0], Grows())


def test_double_backward_through_a_device_decision() -> None:
    def penalty(when: gs.Trigger) -> Tensor:
        model = small()
        with attached(model, gs.Scale(3.0), gs.Outputs("first"), when=when, effects_every=0):
            x = torch.ones(2, 6, requires_grad=True)
            (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            grad.square().sum().backward()
        return gradients(model)["first.weight"]

    torch.testing.assert_close(penalty(gs.Threshold(0.0)), penalty(gs.Always()))
