"""Validation examples: set aside from the training data, with the test data unchanged."""

import pytest
import torch
from torch import Tensor

from gradsurg.experiment.errors import ConfigError
from gradsurg.tasks.base import Data, Task
from gradsurg.tasks.char_lm import CharLM
from gradsurg.tasks.diabetes import Diabetes
from gradsurg.tasks.digits import Digits, load_digits
from gradsurg.tasks.modular import Modular
from gradsurg.tasks.overlay import Overlay
from gradsurg.tasks.temporal_order import TemporalOrder
from tests.builds import built

SMALL = {"num_train": 60, "num_test": 20}


def rows(inputs: Tensor, targets: Tensor) -> set[tuple[float, ...]]:
    flat = torch.cat([inputs.flatten(1).double(), targets.flatten().view(len(inputs), -1)], 1)
    return {tuple(row) for row in flat.tolist()}


@pytest.mark.parametrize(
    "task", [Digits(), Diabetes(), TemporalOrder(**SMALL), Modular(modulus=13), CharLM()], ids=repr
)
def test_a_share_of_the_training_examples_is_set_aside(task: Task) -> None:
    whole, data = task.load(), task.load_with_validation(0.25)
    train, aside = rows(*data.part("train")), rows(*data.part("validation"))
    assert train | aside == rows(*whole.part("train"))
    repeated = len(whole.train_inputs) - len(train | aside)
    assert len(train & aside) <= repeated
    assert len(data.part("validation")[0]) == pytest.approx(len(whole.train_inputs) / 4, abs=1)
    assert len(data.train_inputs) + len(data.part("validation")[0]) == len(whole.train_inputs)
    for one, other in zip(whole.part("test"), data.part("test"), strict=True):
        assert torch.equal(one, other)
    assert data.watched == "validation"
    assert whole.watched == "test"


def test_the_examples_are_the_same_every_time_and_of_all_classes_alike() -> None:
    first, again = (Digits().load_with_validation(0.2) for _ in range(2))
    assert torch.equal(first.part("validation")[0], again.part("validation")[0])
    shares = [
        part.bincount() / len(part) for part in (first.train_targets, first.part("validation")[1])
    ]
    assert torch.allclose(*shares, atol=0.005)


def test_a_digit_of_an_overlay_is_in_one_part_only() -> None:
    task = Overlay(num_train=3000, num_test=50, shift=8)
    whole, data = task.load(), task.load_with_validation(0.2)
    digits = [
        rows(part[0][:, 0, :8, :8], part[1][:, :1])
        for part in map(data.part, ("train", "validation", "test"))
    ]
    assert all(digits)
    assert not digits[0] & digits[1]
    assert not digits[1] & digits[2]
    assert (len(data.train_inputs), len(data.part("validation")[0])) == (3000, 600)
    assert torch.equal(whole.test_inputs, data.test_inputs)
    assert len(digits[1]) <= 0.2 * len(load_digits()[1])


class Curve(Digits):
    """Digits with a number that needs every test."""

    @property
    def trajectory_metric_names(self) -> tuple[str, ...]:
        return ("forgetting",)


class Given(Digits):
    """Digits with validation data of its own."""

    def load(self) -> Data:
        return super().load().set_aside(0.5)


def test_validation_data_of_the_task_itself_are_used_where_they_are_asked_for() -> None:
    data, plain = Given().load_with_validation(0.1), Given().load_with_validation(0)
    assert len(data.part("validation")[0]) == 674
    assert plain.validation_inputs is None
    with pytest.raises(ValueError, match="the data has no validation part"):
        plain.part("validation")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("task=quadratics_toy model=point", "moves a point and has no examples to set aside"),
        ("task.test_fraction=0.9 validation=0.001", "0.001 of 179 training examples are 1"),
        ("task=tests.tasks.test_validation.Curve", "needs tests during training, for forgetting"),
        (
            "task=overlay model=multi_head task.num_train=8 validation=0.1",
            "1 images for validation",
        ),
        ("validation=1", "must be <= 0.9, found 1"),
        ("batch_size=1200", "batch_size: must be <= 1077 examples, found 1200"),
    ],
)
def test_what_cannot_be_set_aside_is_refused(words: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built("validation=0.2", *words.split()) if "validation=" not in words else built(
            *words.split()
        )
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_validation_is_set_aside_only_where_something_is_decided_on_it() -> None:
    def share(*words: str) -> float:
        return built("steps=20", "eval_every=50", *words).pairs[0].runs[0].schedule.validation

    assert share() == 0
    assert share("until='test/accuracy >= 0.9'") == 0
    assert share("until='accuracy >= 0.9'") == 0.2
    assert share("until='accuracy >= 0.9'", "validation=0.4") == 0.4
    for words in ("validation=0", "validation=0.1"):
        other = "test/" if words == "validation=0.1" else ""
        with pytest.raises(ConfigError):
            built("eval_every=50", f"until='{other}accuracy >= 0.9'", words)


def test_a_run_without_validation_keeps_its_identity() -> None:
    plain, zero, some = (
        built("steps=20", *words).pairs[0].runs[0]
        for words in ([], ["validation=0"], ["validation=0.2"])
    )
    assert plain.name == zero.name != some.name
    assert "validation" not in plain.identity
    assert some.identity["validation"] == 0.2
