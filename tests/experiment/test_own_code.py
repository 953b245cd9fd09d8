"""A user's own model and data, named by a dotted path on the command line."""

from pathlib import Path

import pytest

from gradsurg.report import load_study
from tests.conftest import Here

SHORT = ("transform=clip", "steps=3", "batch_size=16", "seeds=1", "logger=none", "report=false")
SOURCE = """
import torch
from torch import nn

from gradsurg.transforms import Stateless, validated

class Nothing(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

class Outputs(nn.Sequential):
    def __init__(self, num_outputs, width=64):
        super().__init__(nn.Flatten(), nn.Linear(width, num_outputs))

class Both(nn.Sequential):
    def __init__(self, *, num_outputs, input_shape):
        super().__init__(nn.Flatten(), nn.Linear(torch.Size(input_shape).numel(), num_outputs))

def in_order(shape, classes):
    return Both(num_outputs=classes, input_shape=shape)

def defaults(width=64, depth=10):
    return Outputs(depth, width)

def other(width):
    return Outputs(10, width)

def examples(count=40):
    inputs = torch.randn(count, 5)
    return inputs, (inputs[:, 0] > 0).long()

def tokens(columns=8):
    whole = torch.arange(9) + torch.arange(64)[:, None]
    return whole[:, :-1] % 5, whole[:, 1 : columns + 1] % 5

@validated
class ByBatch(Stateless):
    def apply(self, grad, context):
        inputs, targets = context.batch["inputs"], context.batch["targets"]
        assert inputs.dtype == targets.dtype == torch.int64
        return grad * (inputs == targets).logical_not().all()
"""


@pytest.fixture
def own(here: Here, folder: Path) -> Here:
    (folder / "own_code.py").write_text(SOURCE, encoding="utf-8")
    return here


@pytest.mark.parametrize("name", ["Nothing", "Outputs", "Both", "in_order", "defaults"])
def test_a_model_is_given_what_its_signature_asks_for(own: Here, name: str) -> None:
    ended = own(f"model=own_code.{name}", *SHORT)
    assert (ended.code, ended.err) == (0, "")


def test_a_model_that_asks_for_something_else_gets_a_line_and_takes_a_field(own: Here) -> None:
    ended = own("model=own_code.other", *SHORT)
    assert ended.code == 2
    assert ended.err.startswith("model.width: needs a value: a model is given input_shape and num_")
    assert own("model=own_code.other", "+model.width=64", *SHORT).code == 0


def test_data_of_a_function_are_a_task_with_the_same_runs_each_time(own: Here) -> None:
    ended = own("task=own_code.examples", *SHORT)
    assert (ended.code, ended.err) == (0, "")
    again = own("task=own_code.examples", *SHORT)
    assert "2 of them had been finished before" in again.out
    more = own("task=own_code.examples", "+task.count=60", *SHORT)
    assert "finished before" not in more.out


def test_a_small_language_model_trains_on_arrays_of_tokens(own: Here, folder: Path) -> None:
    task = ("task=own_code.tokens", "model=gpt", "model.width=16", "optimizer=adamw")
    steps = ("steps=60", "optimizer.lr=0.01", "batch_size=16", "seeds=1", "logger=none")
    ended = own(*task, "transform=own_code.ByBatch", *steps, "report=false")
    assert (ended.code, ended.err) == (0, "")
    accuracies = load_study(next((folder / "runs").iterdir())).runs["test/accuracy"].to_list()
    assert len(accuracies) == 2
    assert min(accuracies) > 0.9  # the next token follows from the last
    for words, message in (
        (("model=gpt", "+task.columns=7"), "int64 of shape [64, 7] for inputs [64, 8]"),
        (("model=mlp",), "the inputs of this task are tokens"),
    ):
        ended = own(task[0], *words, *SHORT)
        assert (ended.code, ended.err.count("\n")) == (2, 1)
        assert message in ended.err
