"""The table of a sum modulo a number with one-hot inputs, for networks without embeddings."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Classification, Data
from gradsurg.tasks.data.arrays import Seed
from gradsurg.tasks.modular import Modular


@validated
class OneHotModular(Classification):
    """Fill in the table of a + b modulo `modulus`; the inputs are the one-hot codes of a and b.

    The entries for training are those of `task=modular` with the same fields.
    """

    modulus: Annotated[int, Field(ge=2, le=200)] = 31
    train_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6
    split_seed: Seed = 0

    def load(self) -> Data:
        data = Modular(self.modulus, "add", self.train_fraction, self.split_seed).load()
        return replace(
            data,
            train_inputs=self._codes(data.train_inputs),
            test_inputs=self._codes(data.test_inputs),
            input_shape=(2, self.modulus),
            num_tokens=None,
        )

    def _codes(self, tokens: Tensor) -> Tensor:
        """Convert tokens (examples, 3) to codes (examples, 2, modulus)."""
        return functional.one_hot(tokens[:, :2], self.modulus).float()
