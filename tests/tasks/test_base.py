"""Tasks: properties of each, options passed to models, and losses and metrics by hand."""

import shlex
import sys
from dataclasses import fields
from itertools import product
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from sklearn import datasets
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from gradsurg.experiment import compose
from gradsurg.experiment.build import build
from gradsurg.experiment.compose import search_path, split_config_dirs
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.loop import outputs_of
from gradsurg.experiment.runs import Experiment
from gradsurg.models.mlp import MLP
from gradsurg.models.multi_head import MultiHead
from gradsurg.models.point import Point
from gradsurg.models.rnn import RNN
from gradsurg.plugins.extras import MissingExtra
from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.registry import HYDRAS
from gradsurg.tasks import mnist
from gradsurg.tasks.base import Data
from gradsurg.tasks.data.arrays import split
from gradsurg.tasks.diabetes import Diabetes, load_diabetes
from gradsurg.tasks.digits import Digits, load_digits
from tests import papers

MORE_TARGETS = {"split_digits": 1, "noisy_quadratics": 2}  # columns, beside the outputs' own
OTHERS = {
    "permuted_stream": {"num_tasks": 5, "num_train": 2000, "per_class": 5, "memory_batch": 64}
}
NAMES = [name for name in papers.names("task") if name not in papers.FROM_FILES]


def content_of(path) -> dict:
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    return content


def tensors_of(data: Data) -> dict[str, Tensor]:
    named = {field.name: getattr(data, field.name) for field in fields(Data)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def model_for(data: Data) -> nn.Module:
    """One that takes what the data is."""
    kind = RNN if data.num_tokens else Point if data.start else MLP
    return kind(data.input_shape, data.num_outputs, **data.model_options(kind, {}))


def test_every_task_has_a_yaml_with_its_defaults():
    assert {"digits", "two_views", "wilson"} <= {*papers.names("task")}
    for stem in papers.names("task"):
        content = content_of(papers.config_path("task", stem))
        kind = papers.find("task", stem)
        said = content.pop("_target_", None) or content.pop("name")
        assert said in (stem, f"{kind.__module__}.{kind.__name__}")
        assert kind(**content) == kind(**OTHERS.get(stem, {}))


@pytest.mark.parametrize("name", NAMES)
def test_shapes_dtypes_and_ranges_of_the_data_match_its_fields(name):
    task = papers.find("task", name)()
    data = task.load()
    for part in ("train", "test"):
        inputs, targets = getattr(data, f"{part}_inputs"), getattr(data, f"{part}_targets")
        assert len(inputs) == len(targets) > 1
        assert inputs.shape[1:] == data.input_shape
        if data.num_tokens is None:
            assert inputs.dtype == torch.float32
            assert inputs.isfinite().all()
        else:
            assert inputs.dtype == torch.int64
            assert 0 <= inputs.min() <= inputs.max() < data.num_tokens
        if targets.is_floating_point():
            assert targets.shape[1:] == (data.num_outputs + MORE_TARGETS.get(name, 0),)
            assert not data.every_step
        else:
            assert targets.dtype == torch.int64
            assert 0 <= targets.min() <= targets.max() < data.num_outputs
            assert (targets.shape == inputs.shape) == data.every_step


@pytest.mark.parametrize("name", NAMES)
def test_a_model_learns_from_it_and_every_metric_is_a_finite_number(name):
    torch.manual_seed(0)
    task = papers.find("task", name)()
    data = task.load()
    model = model_for(data)
    inputs, targets = data.train_inputs[:4], data.train_targets[:4]
    loss = task.loss(model(inputs), targets)
    assert loss.shape == ()
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    metrics = task.metrics(model(inputs).detach(), targets)
    assert metrics["loss"] == pytest.approx(loss.item()) or name in papers.OWN_METRICS
    assert all(type(value) is float for value in metrics.values())
    assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_load_returns_equal_tensors_that_may_be_modified(name):
    task = papers.find("task", name)
    first = task().load()
    kept = {key: tensor.clone() for key, tensor in tensors_of(first).items()}
    for tensor in tensors_of(first).values():
        tensor.zero_()
    again = tensors_of(task().load())
    assert len(again) == 4
    for key, tensor in kept.items():
        assert torch.equal(tensor, again[key])
        assert tensor.any()


@pytest.mark.parametrize("name", NAMES)
def test_loading_leaves_the_global_generators_alone(name):
    torch.manual_seed(0)
    before, before_numpy = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    kind = papers.find("task", name)
    # one that no other test has made, so that its data are not there yet
    seeds = {"data_seed": 3} if "data_seed" in kind.__annotations__ else {}
    kind(**seeds).load()
    assert torch.equal(before, torch.random.get_rng_state())
    assert np.array_equal(before_numpy, np.random.get_state()[1])


def built(*words: str) -> Experiment:
    compose.register()
    with initialize_config_dir(str(compose.CONFIG_DIR), version_base="1.3"):
        config = hydra_compose("config", [*words, "logger=none", "seeds=1"])
    return build(compose.plain(config))


def command_of(path: Path) -> list[str]:
    """The words that the first line of a yaml says to use it with."""
    return shlex.split(path.read_text(encoding="utf-8").partition("\n")[0])[4:]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "path",
    [
        papers.config_path(group, stem)
        for group in ("model", "task")
        for stem in papers.names(group)
        if stem not in papers.FROM_FILES
    ],
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_the_command_of_a_yaml_can_be_run(path):
    folders, words = split_config_dirs(command_of(path))
    assert f"{path.parent.name}={path.stem}" in words
    experiment = built(search_path(*(papers.ROOT / folder for folder in folders)), *words)
    assert outputs_of(experiment.make_model(), experiment.example_input).isfinite().all()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            ["task=modular", "model=mlp"],
            "model: takes no num_tokens, and the inputs of this task are tokens",
        ),
        (
            ["task=diabetes", "model=gpt"],
            "model: needs tokens, and the inputs of this task are real numbers",
        ),
        (
            ["task=modular", "model=gru", "+model.num_tokens=3"],
            "model.num_tokens: is set by the task",
        ),
        (
            ["task=digits", "model=multi_head"],
            "model: needs a task of several losses with outputs of their own, and this one has "
            "none",
        ),
        (
            ["task=overlay", "model=multi_head", "+model.heads=[20]"],
            "model.heads: is set by the task",
        ),
        (
            [papers.searched("liu2021"), "task=cagrad_toy", "model=mlp"],
            "model: takes no start, and what this task moves is a point (model=point)",
        ),
        (
            ["task=digits", "model=point"],
            "model: needs a point to start from, and this task has none",
        ),
        (
            [papers.searched("liu2021"), "task=cagrad_toy", "model=point", "task.start=[1,2,3]"],
            "task.start: must have at most 2 items, found [1, 2, 3]",
        ),
        (
            ["task=mnist", "task.root=/no/such"],
            f"task.root: must be {mnist.LAYOUT.where}; there is no folder '/no/such'",
        ),
    ],
)
def test_a_task_and_model_that_do_not_fit_are_refused_by_key(words, fault):
    with pytest.raises(ConfigError) as caught:
        built(*words)
    assert caught.value.faults == [fault]


def data_with(**said) -> Data:
    some = torch.zeros(2, 4)
    return Data(some, some, some, some, input_shape=(4,), num_outputs=3, **said)


def test_a_model_gets_num_tokens_and_every_step_only_if_the_data_have_them():
    assert data_with().model_options(RNN, {"width": 8}) == {"width": 8}
    told = data_with(num_tokens=5, every_step=True).model_options(RNN, {"width": 8})
    assert told == {"width": 8, "num_tokens": 5, "every_step": True}


def test_only_a_model_with_a_parameter_heads_gets_them():
    assert data_with(heads=(1, 2)).model_options(MultiHead, {}) == {"heads": (1, 2)}
    assert data_with(heads=(1, 2)).model_options(MLP, {}) == {}


def test_regression_refuses_outputs_that_torch_would_broadcast():
    message = r"outputs and targets must have one shape, found \[2, 3\] and \[2, 1\]"
    with pytest.raises(ValueError, match=message):
        Diabetes().loss(torch.zeros(2, 3), torch.zeros(2, 1))


def test_regression_loss_and_metrics_match_a_calculation_by_hand():
    outputs = torch.tensor([[1.0], [2.0], [6.0]], requires_grad=True)
    targets = torch.tensor([[1.0], [4.0], [7.0]])
    loss = Diabetes().loss(outputs, targets)
    loss.backward()
    torch.testing.assert_close(outputs.grad, torch.tensor([[0.0], [-4 / 3], [-2 / 3]]))
    # Errors 0, 2 and 1; the targets' variance is 6.
    expected = {"loss": pytest.approx(5 / 3), "r2": pytest.approx(1 - 5 / 18)}
    assert Diabetes().metrics(outputs, targets) == expected


@pytest.mark.parametrize(
    "path", sorted((papers.ROOT / "conf/optimizer").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_optimizer_yaml_makes_an_optimizer(path):
    content = content_of(path)
    made = instantiate(content)([torch.nn.Parameter(torch.zeros(2))])
    assert type(made).__name__.lower() == path.stem
    group = made.param_groups[0]
    fields = {key: value for key, value in content.items() if key not in HYDRAS}
    for key, value in fields.items():
        assert (list(group[key]) if isinstance(value, list) else group[key]) == value, key


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


def test_rows_are_split_also_if_a_class_is_too_rare_for_equal_shares():
    for labels in ([0] * 5 + [1] * 4 + [2], list(range(8)) * 2):
        train, test = split(np.array(labels), 0.2, seed=0, stratify=True)
        assert sorted([*train, *test]) == list(range(len(labels)))
        assert len(test) == -(-len(labels) // 5)


def test_digits_are_the_same_at_every_load_and_differ_by_split_seed():
    first, again, other = Digits().load(), Digits().load(), Digits(split_seed=1).load()
    assert torch.equal(first.train_inputs, again.train_inputs)
    assert torch.equal(first.test_targets, again.test_targets)
    assert not torch.equal(first.train_inputs, other.train_inputs)


def test_digits_and_diabetes_are_the_bits_that_scikit_learn_loads() -> None:
    tables = (
        (load_digits(), datasets.load_digits(return_X_y=True)),
        (load_diabetes(), datasets.load_diabetes(return_X_y=True, scaled=False)),
    )
    for ours, theirs in tables:
        for array, expected in zip(ours, theirs, strict=True):
            assert array.dtype == expected.dtype
            assert np.array_equal(array, expected)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.25, 1 / 3, 0.5, 0.9])
@pytest.mark.parametrize("stratify", [True, False])
def test_the_rows_of_a_split_are_those_of_scikit_learn(stratify: bool, fraction: float) -> None:
    # Some classes have equal remainders, which are drawn.
    labels = (np.arange(2000) % 10, np.repeat([3, 1, 7], [500, 300, 1000]), load_digits()[1])
    for seed, targets in product(range(20), labels):
        chosen = targets if stratify else None
        theirs = train_test_split(
            np.arange(len(targets)), test_size=fraction, random_state=seed, stratify=chosen
        )
        for ours, expected in zip(split(targets, fraction, seed, stratify), theirs, strict=True):
            assert np.array_equal(ours, expected)


def test_a_split_that_leaves_no_training_row_is_refused() -> None:
    with pytest.raises(ValueError, match="no training row is left: 0.9 of 9 rows are 9 test rows"):
        split(np.arange(9), 0.9, seed=0, stratify=True)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gradsurg\[run\]'"):
        load_digits()


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


def test_digits_loss_and_metrics_match_a_calculation_by_hand():
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
