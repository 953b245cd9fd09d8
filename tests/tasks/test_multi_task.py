"""Tasks of several losses: targets and metrics by hand, and a trunk with heads that learns them."""

from math import atan, log, pi, sqrt
from re import escape

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, make_friedman2, make_friedman3

from gradsurg.models.multi_head import MultiHead
from gradsurg.plugins.fields import FieldError
from gradsurg.tasks.base import MultiTask
from gradsurg.tasks.diabetes import Diabetes
from gradsurg.tasks.diabetes_multi import DiabetesMulti
from gradsurg.tasks.digit_attributes import DigitAttributes
from gradsurg.tasks.digits import Digits
from gradsurg.tasks.friedman_multi import FriedmanMulti, circuit
from tests import papers

SEVERAL = [
    name
    for name in papers.names("task")
    if issubclass(papers.find("task", name), MultiTask) and "mnist" not in name
]
SPLIT = [name for name in SEVERAL if not name.endswith(("_toy", "workers"))]


@pytest.mark.parametrize("name", SEVERAL)
def test_metrics_of_each_task_are_called_after_it_and_the_loss_is_their_sum(name):
    task = papers.find("task", name)()
    data = task.load()
    outputs = torch.randn(16, data.num_outputs, generator=torch.Generator().manual_seed(0))
    targets = data.train_targets[:16]
    losses, metrics = task.losses(outputs, targets), task.metrics(outputs, targets)
    assert tuple(losses) == task.names
    assert len({*task.names}) == len(task.names) > 1
    for label, loss in losses.items():
        assert metrics[f"loss_{label}"] == pytest.approx(loss.item())
    assert task.loss(outputs, targets).item() == pytest.approx(sum(losses.values()).item())
    assert metrics["loss"] == pytest.approx(sum(losses.values()).item())


@pytest.mark.parametrize("name", SPLIT)
def test_each_loss_reaches_the_trunk_and_its_own_head_alone(name):
    torch.manual_seed(0)
    task = papers.find("task", name)()
    data = task.load()
    assert data.heads is not None
    assert sum(data.heads) == data.num_outputs
    model = MultiHead(data.input_shape, data.num_outputs, **data.model_options(MultiHead, {}))
    losses = task.losses(model(data.train_inputs[:8]), data.train_targets[:8])
    named = dict(model.named_parameters())
    for place, loss in enumerate(losses.values()):
        grads = torch.autograd.grad(
            loss, list(named.values()), retain_graph=True, allow_unused=True
        )
        reached = {path for path, grad in zip(named, grads, strict=True) if grad is not None}
        own = {path for path in named if path.startswith(("trunk.", f"heads.{place}."))}
        assert reached == own


def test_attributes_match_each_digit():
    task = DigitAttributes(attributes=["parity", "large", "prime", "loops", "digit"])
    table = task.classes(torch.arange(10)).tolist()
    for digit, classes in enumerate(table):
        loops = 2 if digit == 8 else int(digit in (0, 6, 9))
        expected = [digit % 2, digit >= 5, digit in (2, 3, 5, 7), loops, digit]
        assert classes == [int(value) for value in expected]
    assert task.sizes == (2, 2, 2, 3, 10)


def test_attributes_are_of_the_same_digits_and_the_same_split_as_the_task_digits():
    data, digits = DigitAttributes(attributes=["digit", "parity"]).load(), Digits().load()
    assert torch.equal(data.train_inputs, digits.train_inputs)
    assert torch.equal(data.test_inputs, digits.test_inputs)
    assert torch.equal(data.train_targets[:, 0], digits.train_targets)
    assert torch.equal(data.test_targets[:, 1], digits.test_targets % 2)
    assert data.num_outputs == 12


def test_metrics_of_attributes_match_a_calculation_by_hand():
    task = DigitAttributes(attributes=["parity", "loops"])
    outputs = torch.zeros(2, 5)
    outputs[0, 1] = outputs[0, 2 + 2] = 50  # sure of odd, and of two loops
    metrics = task.metrics(outputs, torch.tensor([[1, 2], [1, 0]]))
    assert metrics == {
        # The second example is undecided, and argmax says 0 for it.
        "loss": pytest.approx(log(2) / 2 + log(3) / 2),
        "loss_parity": pytest.approx(log(2) / 2),
        "loss_loops": pytest.approx(log(3) / 2),
        "accuracy": 0.75,
        "accuracy_parity": 0.5,
        "accuracy_loops": 1.0,
    }


def test_losses_and_metrics_of_a_regression_match_a_calculation_by_hand():
    task = DiabetesMulti(scales=(1.0, 10.0, 100.0))
    outputs = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [6.0, 3.0, 0.0]])
    targets = torch.tensor([[1.0, 0.0, 1.0], [4.0, 0.0, -1.0], [7.0, 3.0, 0.0]])
    # Errors 0, 2, 1; none; 1, 1, 0. Variances 6, 2 and 2/3.
    assert task.metrics(outputs, targets) == pytest.approx(
        abs=1e-5,
        expected={
            "loss": 5 / 3 + 200 / 3,
            "r2": (1 - 5 / 18 + 1 + 0) / 3,
            "loss_progress": 5 / 3,
            "loss_mass": 0,
            "loss_pressure": 200 / 3,
            "r2_progress": 1 - 5 / 18,
            "r2_mass": 1,
            "r2_pressure": 0,
        },
    )


@pytest.mark.parametrize("task", [DiabetesMulti(), DigitAttributes(attributes=["parity", "digit"])])
def test_outputs_in_parts_or_beside_one_another_have_the_same_losses(task):
    data = task.load()
    parts = [torch.randn(8, size) for size in data.heads or ()]
    apart = task.losses(tuple(parts), data.train_targets[:8])
    beside = task.losses(torch.cat(parts, dim=1), data.train_targets[:8])
    assert apart == beside


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (torch.zeros(2, 1), "outputs must have the shape [2, 3], found [2, 1]"),
        (torch.zeros(1, 3), "outputs must have the shape [2, 3], found [1, 3]"),
        (
            (torch.zeros(2, 1), torch.zeros(2, 2)),
            "outputs must be a tensor of the shape [2, 3], or for each task its part of it, "
            "[1, 1, 1] columns, found shapes [[2, 1], [2, 2]]",
        ),
    ],
)
def test_outputs_that_torch_would_broadcast_are_refused(outputs, message):
    with pytest.raises(ValueError, match=f"^{escape(message)}$"):
        DiabetesMulti().losses(outputs, torch.zeros(2, 3))


@pytest.mark.parametrize("kind", [DiabetesMulti, FriedmanMulti])
def test_a_constant_has_the_scales_as_its_losses(kind):
    task = kind(scales=(1.0, 10.0, 0.5))
    data = task.load()
    losses = task.losses(torch.zeros_like(data.train_targets), data.train_targets)
    assert [loss.item() for loss in losses.values()] == pytest.approx([1, 10, 0.5], rel=1e-5)


def test_diabetes_asks_for_body_mass_and_pressure_and_does_not_show_them():
    data, plain = DiabetesMulti().load(), Diabetes().load()
    assert torch.equal(data.train_targets[:, :1], plain.train_targets)
    assert torch.equal(data.test_targets[:, 1:], plain.test_inputs[:, 2:4])
    assert torch.equal(data.train_inputs, plain.train_inputs[:, [0, 1, 4, 5, 6, 7, 8, 9]])
    names = load_diabetes().feature_names
    assert names[2:4] == ["bmi", "bp"]


def test_the_circuit_matches_its_formula():
    impedance, phase = circuit(np.array([[0.5, 0.25, 0.1, 0.9, 0.3]]))
    r, w, inductance, capacitance = 50, 40 * pi + 0.25 * 520 * pi, 0.1, 10
    x = w * inductance - 1 / (w * capacitance)
    assert impedance == pytest.approx([sqrt(r**2 + x**2)])
    assert phase == pytest.approx([atan(x / r)])


def test_the_circuit_is_scikit_learns():
    high, low = np.array([100, 560 * pi, 1, 11]), np.array([0, 40 * pi, 0, 1])
    for place, make in enumerate((make_friedman2, make_friedman3)):
        inputs, targets = make(20, random_state=0)
        found = circuit((inputs - low) / (high - low))[place]
        np.testing.assert_allclose(found, targets, rtol=1e-9)


@pytest.mark.parametrize(
    ("kind", "options", "fault"),
    [
        (
            DigitAttributes,
            {"attributes": ["parity", "parity"]},
            ("attributes", "must have each once, found ['parity', 'parity']"),
        ),
        (
            DigitAttributes,
            {"attributes": []},
            ("attributes", "must have at least 1 item, found []"),
        ),
        (DiabetesMulti, {"scales": (1, 0, 1)}, ("scales.1", "must be > 0.0, found 0")),
        (FriedmanMulti, {"num_features": 4}, ("num_features", "must be >= 5, found 4")),
    ],
)
def test_bad_values_are_refused_by_name(kind, options, fault):
    with pytest.raises(FieldError) as caught:
        kind(**options)
    assert caught.value.faults == [fault]
