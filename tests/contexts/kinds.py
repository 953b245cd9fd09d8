"""One selection of each site kind, and the expected effect of a factor of ten on a probe."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites.base import Selector

FACTOR = 10.0


@dataclass(frozen=True)
class Kind:
    """A row of the table: `probe` names the parameter whose gradient is multiplied by FACTOR.

    `of` selects the gradient, the value after a step, its change since the start, or the result of
    `autograd.grad`.
    """

    make: Callable[[], Selector]
    probe: str = "first.weight"
    of: str = "gradient"


KINDS = {
    "Parameters backward": Kind(lambda: gs.Parameters("first.weight")),
    "Parameters accumulated": Kind(lambda: gs.Parameters("first.weight", stage="accumulated")),
    "Parameters backward_end": Kind(lambda: gs.Parameters("first.weight", stage="backward_end")),
    "Parameters step": Kind(lambda: gs.Parameters("first.weight", stage="step")),
    "Buckets sent": Kind(lambda: gs.Buckets("first.weight")),
    "Buckets reduced": Kind(lambda: gs.Buckets("first.weight", stage="reduced")),
    "Outputs": Kind(lambda: gs.Outputs("first")),
    "Inputs branch": Kind(lambda: gs.Inputs("act")),
    "Inputs total": Kind(lambda: gs.Inputs("act", path="total")),
    "Nodes enter": Kind(lambda: gs.Nodes("Relu", module="act")),
    "Nodes leave": Kind(lambda: gs.Nodes("Relu", module="act", side="leave")),
    "ModuleGradients pre": Kind(lambda: gs.ModuleGradients("act")),
    "ModuleGradients": Kind(lambda: gs.ModuleGradients("act", kind="full_backward")),
    "EveryModule backward pre": Kind(
        lambda: gs.EveryModule(types="ReLU", kind="full_backward_pre")
    ),
    "EveryModule forward": Kind(lambda: gs.EveryModule(types="ReLU", kind="forward")),
    "Activations": Kind(lambda: gs.Activations("act")),
    "Weights": Kind(lambda: gs.Weights("first.weight"), of="value"),
    "Updates": Kind(lambda: gs.Updates("first.weight"), of="update"),
    "SavedTensors module": Kind(lambda: gs.SavedTensors("last"), probe="last.weight"),
    "Uses": Kind(lambda: gs.Uses("first")),
    "Captured": Kind(lambda: gs.Captured("first.weight"), of="captured"),
}


class Net(nn.Module):
    """Two linear layers with a ReLU: linear in every gradient, so that factors are visible."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.act = nn.ReLU(inplace=inplace)
        self.last = nn.Linear(6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


class Nested(nn.Module):
    """Nested modules: a container, its last child and an identity return the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.act = nn.ReLU()
        self.last = nn.Sequential(nn.Linear(6, 2), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))
