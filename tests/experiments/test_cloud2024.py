"""Fresh decoders recover a share of the halves of a code."""

import torch
from gradsurg.experiments.cloud2024.task import SplitDigits
from torch import Tensor, nn

from gradsurg.tasks.base import Data


class Halves(nn.Module):
    """Returns zeros as outputs, and a code that holds the low digits' pixels in its first half."""

    def __init__(self, data: Data, is_split: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        inputs = torch.cat([data.train_inputs, data.test_inputs]).flatten(1)
        targets = torch.cat([data.train_targets, data.test_targets])
        self.low = {
            tuple(x.tolist()): bool(y < 5) for x, y in zip(inputs, targets[:, 64], strict=True)
        }
        self.is_split = is_split

    def forward(self, images: Tensor) -> Tensor:
        pixels = self.scale * images.flatten(1)
        low = torch.tensor([self.low[tuple(x.tolist())] for x in images.flatten(1)])[:, None]
        code = torch.cat([pixels, pixels], dim=1)
        if self.is_split:
            code = torch.cat([pixels * low, pixels * ~low], dim=1)
        return torch.cat([torch.zeros_like(pixels), code], dim=1)


def test_a_split_code_loses_the_digits_of_the_other_half_and_a_whole_one_none() -> None:
    task = SplitDigits(decoder_steps=100)
    data = task.load()
    assert task.labels(data.train_targets).unique().tolist() == list(range(10))
    split, whole = (
        (torch.manual_seed(0), task.examine(Halves(data, is_split), data).numbers)[1]
        for is_split in (True, False)
    )
    assert split["away"] > 0.8 > 0.3 > split["own"]
    assert split["relearned"] > 0.6
    assert max(whole["away"], whole["own"], whole["relearned"]) < 0.3
    assert abs(split["gap"] - split["away"] + split["own"]) < 1e-6
