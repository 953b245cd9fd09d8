"""Models and tasks that draw from Python's or NumPy's generator are as repeatable as torch's."""

import io
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.experiment.execution import execute
from gradsurg.experiment.run import Run
from gradsurg.tasks.base import Data
from gradsurg.torch_internals import random_state
from tests.runs import Torn, Wrapped, a_run, assert_resumes, assert_same, lines, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

Draws = tuple[float, ...]


def draw() -> Draws:
    """A number of each generator; two of those that remember half of a pair of normal numbers."""
    python = random.random(), random.gauss(0, 1)
    return *python, np.random.rand(), np.random.randn(), torch.rand(()).item()


@dataclass(frozen=True)
class Drawing(Wrapped):
    """Digits whose loss has weights that are drawn, by Python and by NumPy."""

    draws: list[Draws] = field(default_factory=list)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.draws.append(draw())
        return super().loss(outputs, targets) * (1 + self.draws[-1][0] + self.draws[-1][2])


class Jittered(nn.Module):
    """A model that begins at numbers that Python has drawn, and adds NumPy's while it trains."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.inner = make_model(data)
        self.scale = 1 + random.gauss(0, 0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        noise = np.random.randn() if self.training else 0.0
        return self.inner(inputs * self.scale + 0.1 * noise)


def drawing_run(at: int = 0, does: str = "", seed: int = 0) -> Run:
    run = a_run(gs.Clip(0.05), task=Drawing(at, does), seed=seed)
    return replace(run, make_model=Jittered)


def test_generator_states_load_with_weights_only_and_are_restored_by_a_block() -> None:
    with random_state.preserved():
        drawn = []
        for number in (0, 1, 2**32, 2**32 - 1, 2**63 - 1):
            random_state.seed(number)
            drawn.append(draw()[:-1])  # torch's looks at 32 bits of its seed
            file = io.BytesIO()
            torch.save(random_state.get_states(), file)
            expected: list[Draws] = []
            with pytest.raises(Torn), random_state.preserved():
                expected = [draw(), draw()]
                raise Torn
            assert [draw(), draw()] == expected
            file.seek(0)
            random_state.set_states(torch.load(file, weights_only=True))
            assert [draw(), draw()] == expected
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(drawn)


def test_a_run_depends_on_its_seed_and_leaves_the_generators_of_the_process(
    tmp_path: Path,
) -> None:
    records = []
    for number in (1, 2):
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)
        with random_state.preserved():
            expected = draw()
        records.append(execute(drawing_run(), tmp_path / str(number), []))
        with pytest.raises(Torn):
            execute(drawing_run(7, "raise"), tmp_path / "torn", [])
        assert draw() == expected
    assert_same(*records)
    other = execute(drawing_run(seed=1), tmp_path, [])
    assert lines(other, "metrics.jsonl") != lines(records[0], "metrics.jsonl")


@pytest.mark.parametrize("step", [1, 14])
def test_an_interrupted_run_with_random_draws_ends_like_an_uninterrupted_one(
    tmp_path: Path, step: int
) -> None:
    assert_resumes(lambda at: drawing_run(at, "raise"), tmp_path, step)


def test_compared_arms_draw_the_same_random_numbers() -> None:
    drawn: list[Draws] = []

    def train(model: nn.Module, surgery: gs.Surgery) -> float:
        drawn.append(draw())
        return drawn[-1][0]

    with random_state.preserved():
        gs.compare(lambda: nn.Linear(1, 1), train, gs.Surgery(), seeds=2)
        first = draw()
    assert draw() == first
    control, treated, second_control, second_treated = drawn
    assert control == treated
    assert second_control == second_treated
    assert all(one != other for one, other in zip(control, second_control, strict=True))
