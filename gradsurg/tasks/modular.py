"""Modular: arithmetic modulo a number, with a part of its table for training."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.tasks.base import Classification, Data
from gradsurg.tasks.data.arrays import Seed

Operation = Literal["add", "subtract", "multiply"]


@validated
class Modular(Classification):
    """Fill in the table of a + b, a - b or a * b modulo `modulus` (Power et al. 2022, grokking).

    An example has the three tokens a, b and "=", which is numbered `modulus`. With
    `operator_token` it has four, a, "∘", b and "=", like the paper's. The classes are the results.
    Which entries are for training depends on `split_seed` alone.
    """

    modulus: Annotated[int, Field(ge=2, le=1000)] = 97
    operation: Operation = "add"
    train_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    split_seed: Seed = 0
    operator_token: bool = False

    def __post_init__(self) -> None:
        if not 0 < self._num_train() < self.modulus**2:
            rule = f"leaves a part of the {self.modulus**2} entries empty"
            raise Contradiction("train_fraction", f"{rule}, found {self.train_fraction}")

    def load(self) -> Data:
        numbers = torch.arange(self.modulus)
        a, b = torch.cartesian_prod(numbers, numbers).T
        equals, operator = torch.full_like(a, self.modulus), torch.full_like(a, self.modulus + 1)
        tokens = [a, operator, b, equals] if self.operator_token else [a, b, equals]
        inputs = torch.stack(tokens, dim=1)
        targets = self._result(a, b)
        generator = torch.Generator().manual_seed(self.split_seed)
        order = torch.randperm(len(targets), generator=generator)
        train, test = order[: self._num_train()], order[self._num_train() :]
        return Data(
            train_inputs=inputs[train],
            train_targets=targets[train],
            test_inputs=inputs[test],
            test_targets=targets[test],
            input_shape=(len(tokens),),
            num_outputs=self.modulus,
            num_tokens=self.modulus + len(tokens) - 2,
        )

    def _num_train(self) -> int:
        return round(self.train_fraction * self.modulus**2)

    def _result(self, a: Tensor, b: Tensor) -> Tensor:
        match self.operation:
            case "add":
                return (a + b) % self.modulus
            case "subtract":
                return (a - b) % self.modulus
            case "multiply":
                return (a * b) % self.modulus
