"""Tasks: data that is the same every time, a loss by hand, and metrics by hand."""

from math import log
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from gradsurg import catalogue
from gradsurg.fields import FieldError
from gradsurg.tasks.digits import Digits

CONF = Path(__file__).parent.parent / "conf"


def content_of(path) -> dict:
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    return content


def test_every_task_has_a_yaml_with_its_defaults():
    stems = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
    assert stems == catalogue.names("tasks") != []
    for stem in stems:
        content = content_of(CONF / "task" / f"{stem}.yaml")
        assert content.pop("name") == stem
        made = catalogue.find("tasks", stem)
        assert made(**content) == made()


@pytest.mark.parametrize("path", sorted((CONF / "optimizer").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_optimizer_yaml_makes_an_optimizer(path):
    content = content_of(path)
    name = content.pop("name")
    assert name.lower() == path.stem
    made = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2))], **content)
    group = made.param_groups[0]
    for key, value in content.items():
        assert group[key] == (tuple(value) if isinstance(value, list) else value), key


def test_digits_are_all_there_once():
    data = Digits().load()
    assert data.train_inputs.shape == (1347, 1, 8, 8)
    assert data.test_inputs.shape == (450, 1, 8, 8)
    assert data.train_inputs.dtype == torch.float32
    assert data.train_targets.dtype == torch.int64
    assert data.input_shape == data.test_inputs.shape[1:]
    assert data.num_outputs == 10
    images = torch.cat([data.train_inputs, data.test_inputs]).flatten(1)
    assert len(images.unique(dim=0)) == 1797


def test_digits_are_standardised_by_the_training_pixels():
    data = Digits().load()
    assert abs(data.train_inputs.mean()) < 1e-5
    assert abs(data.train_inputs.std(correction=0) - 1) < 1e-5
    assert data.test_inputs.mean() != 0
    # a digit's corner is blank and its strokes are brighter
    assert data.train_inputs[:, 0, 0, 0].mean() < data.train_inputs[:, 0, 4, 4].mean()


def test_digits_split_is_stratified():
    data = Digits(test_fraction=0.5).load()
    train, test = (labels.bincount() for labels in (data.train_targets, data.test_targets))
    assert (train - test).abs().max() <= 1


def test_digits_are_the_same_at_every_load_and_differ_by_split_seed():
    first, again, other = Digits().load(), Digits().load(), Digits(split_seed=1).load()
    assert torch.equal(first.train_inputs, again.train_inputs)
    assert torch.equal(first.test_targets, again.test_targets)
    assert not torch.equal(first.train_inputs, other.train_inputs)


def test_loading_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    Digits(label_noise=0.3).load()
    assert torch.equal(before, torch.random.get_rng_state())


def test_label_noise_changes_that_fraction_of_training_labels_and_no_test_label():
    clean, noisy = Digits().load(), Digits(label_noise=0.2).load()
    changed = clean.train_targets != noisy.train_targets
    assert changed.sum() == round(0.2 * 1347)
    assert torch.equal(clean.test_targets, noisy.test_targets)
    assert noisy.train_targets.min() == 0
    assert noisy.train_targets.max() == 9


def test_changing_what_was_loaded_does_not_change_the_next_load():
    first = Digits().load()
    first.train_inputs.zero_()
    first.train_targets.zero_()
    assert Digits().load().train_inputs.abs().sum() > 0
    assert Digits().load().train_targets.sum() > 0


def test_digits_loss_and_metrics_are_those_worked_out_by_hand():
    outputs = torch.tensor([[0.0, 0.0], [log(3.0), 0.0]], requires_grad=True)
    targets = torch.tensor([0, 1])
    expected = (log(2) + log(4)) / 2
    loss = Digits().loss(outputs, targets)
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    expected_grad = torch.tensor([[-0.25, 0.25], [0.375, -0.375]])
    torch.testing.assert_close(outputs.grad, expected_grad)
    metrics = Digits().metrics(outputs, targets)
    assert metrics == {"loss": pytest.approx(expected), "accuracy": 0.5}
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize(
    "options", [{"test_fraction": 0.0}, {"label_noise": 1.0}, {"split_seed": -1}, {"noise": 0.1}]
)
def test_digits_refuses_a_bad_value_by_name(options):
    with pytest.raises(FieldError, match=f"Digits.{next(iter(options))}: "):
        Digits(**options)
