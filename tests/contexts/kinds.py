"""One selection of each row of the table, and the expected effect of a factor of ten on a probe."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites import contexts
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


FIELDS = {
    "Inputs": ("act", "path"),
    "Nodes": ("Relu", "side"),
    "ModuleGradients": ("act", "kind"),
    "EveryModule": ("*", "kind"),
    "Outputs": ("first", ""),
    "Uses": ("first", ""),
    "Activations": ("act", ""),
    "SavedTensors": ("last", ""),
}
"""The pattern of a kind, and the field of its mode; other kinds select a parameter at a stage."""

MORE = {"Nodes": {"module": "act"}, "EveryModule": {"types": "ReLU"}}  # a copy has other names
PROBED = {"SavedTensors": "last.weight"}  # the parameter that is read; of others `first.weight`
PROBES = {"Weights": "value", "Updates": "update", "Captured": "captured"}


def _kind(name: str, mode: str) -> Kind:
    pattern, field = FIELDS.get(name, ("first.weight", "stage"))
    fields = MORE.get(name, {}) | ({field: mode} if mode else {})
    probe, of = PROBED.get(name, "first.weight"), PROBES.get(name, "gradient")
    return Kind(lambda: getattr(gs, name)(pattern, **fields), probe, of)


KINDS = {f"{name} {mode}".rstrip(): _kind(name, mode) for name, mode in contexts.KINDS}


class Net(nn.Module):
    """Two linear layers with a ReLU. `last` has no bias: a factor on the activation is one on y."""

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
