"""Walk every module of a ResNet-18 in the order in which it runs.

By hand this is a loop over `named_modules()` with a forward hook on each, handles kept in a list.
Common slips: `named_modules()` lists the order of definition, a module that stands in two places
once only, and `hooks.clear()` on the list of handles removes no hook.
"""

import torch
from torch import Tensor, nn

import gradsurg as gs


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)  # called twice
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity()
        if stride > 1:
            down = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(down, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


def resnet18(classes: int = 10, width: int = 8) -> nn.Sequential:
    """The eighteen layers of He et al. 2016 (table 1), narrower."""
    stem = nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    )
    blocks = []
    channels = width
    for stage in range(4):
        for number in range(2):
            out = width * 2**stage
            blocks.append(Block(channels, out, 2 if stage and not number else 1))
            channels = out
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(stem, *blocks, head)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = resnet18()
    print(gs.sites.tree(model, torch.randn(2, 3, 32, 32), at=gs.Outputs(types="ReLU")))
