"""Private functions of PyTorch for optimizers."""

import torch
from torch.optim import SGD, Optimizer

from gradsurg.torch_internals.hook_tables import runs_step_hooks


def test_an_optimizer_that_was_not_initialized_runs_no_hooks() -> None:
    class Bare(Optimizer):
        def __init__(self) -> None:
            self.param_groups = []

        def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            """Do nothing."""

    optimizer, steps = SGD([torch.ones(1, requires_grad=True)], lr=0.1), []
    for each, runs in ((Bare(), False), (optimizer, True)):
        assert runs_step_hooks(each) is runs
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    optimizer.step()
    assert steps == [1]
