"""Digit attributes: several classifications of each of scikit-learn's digits."""

from typing import Annotated, Literal

import numpy as np
import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.tasks.base import Data, MultiClassification
from gradsurg.tasks.data.arrays import Seed, split
from gradsurg.tasks.digits import load_digits

CLASSES = {  # of the digits 0 to 9
    "parity": (0, 1, 0, 1, 0, 1, 0, 1, 0, 1),
    "large": (0, 0, 0, 0, 0, 1, 1, 1, 1, 1),
    "prime": (0, 0, 1, 1, 0, 1, 0, 1, 0, 0),
    "loops": (1, 0, 0, 0, 0, 0, 1, 0, 2, 1),
    "digit": (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
}
Attribute = Literal["parity", "large", "prime", "loops", "digit"]


@validated
class DigitAttributes(MultiClassification):
    """Classify each digit in several ways at once by cross-entropy; nothing is downloaded.

    `parity`: odd or not; `large`: 5 or more; `prime`: 2, 3, 5 and 7; `loops`: none, one (0, 6, 9)
    or two (8), a written 4 being open; `digit`: which of the ten. Images and split are those of the
    task digits.
    """

    attributes: Annotated[tuple[Attribute, ...], Field(min_length=1)] = (
        "parity",
        "large",
        "prime",
        "loops",
    )
    test_fraction: Annotated[float, Field(ge=0.01, le=0.9)] = 0.25
    split_seed: Seed = 0

    def __post_init__(self) -> None:
        if len({*self.attributes}) < len(self.attributes):
            rule = f"must have each once, found {list(self.attributes)}"
            raise Contradiction("attributes", rule)

    @property
    def names(self) -> tuple[str, ...]:
        return self.attributes

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(1 + max(CLASSES[name]) for name in self.attributes)

    def load(self) -> Data:
        pixels, labels = load_digits()
        images = rearrange(pixels, "digit (y x) -> digit 1 y x", y=8).astype(np.float32) / 16
        train, test = split(labels, self.test_fraction, self.split_seed, stratify=True)
        mean, deviation = images[train].mean(), images[train].std()
        scaled = torch.from_numpy((images - mean) / deviation)
        targets = self.classes(torch.from_numpy(labels))
        return Data(
            train_inputs=scaled[train],
            train_targets=targets[train],
            test_inputs=scaled[test],
            test_targets=targets[test],
            input_shape=(1, 8, 8),
            num_outputs=sum(self.sizes),
            heads=self.sizes,
        )

    def classes(self, labels: Tensor) -> Tensor:
        """Return the class of each digit for each attribute (examples, attributes)."""
        table = torch.tensor([CLASSES[name] for name in self.attributes])
        return table.T[labels]
