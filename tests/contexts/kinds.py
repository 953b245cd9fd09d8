"""The table of contexts in the README of the sites, with one selection of each of its rows."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from gradsurg.sites.places import Selector
from tests.core.by_hand import select

README = Path(__file__).parents[2] / "gradsurg" / "sites" / "README.md"
BEGIN, END = "<!-- contexts: begin -->", "<!-- contexts: end -->"


def _table() -> dict[str, dict[str, str]]:
    """Return the outcomes by kind of site and context."""
    text = README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    (_, *contexts), *rows = lines
    return {kind: dict(zip(contexts, cells, strict=True)) for kind, *cells in rows}


TABLE = _table()


@dataclass(frozen=True)
class Kind:
    """A row of the table: where it acts, and the parameter on whose gradient that is seen.

    `of` selects the gradient, the value after a step, its change since the start, or the result of
    `autograd.grad`.
    """

    name: str
    pattern: str
    probe: str = "first.weight"
    of: str = "gradient"

    def make(self) -> Selector:
        return select(self.name, self.pattern)


PATTERNS = {
    "Inputs": "act",
    "Nodes": "act",
    "ModuleGradients": "act",
    "EveryModule": "ReLU",  # a copy of the model has the names of classes
    "Outputs": "first",
    "Uses": "first",
    "Activations": "act",
    "SavedTensors": "last",
}
"""The pattern of a kind; other kinds select a parameter."""

PROBED = {"SavedTensors": "last.weight"}  # the parameter that is read; of others `first.weight`
PROBES = {"Weights": "value", "Updates": "update", "Captured": "captured"}


def kind_of(label: str) -> Kind:
    """Return the selection of a row, as "Nodes leave"."""
    name = label.partition(" ")[0]
    pattern, probe = PATTERNS.get(name, "first.weight"), PROBED.get(name, "first.weight")
    return Kind(label, pattern, probe, PROBES.get(name, "gradient"))


KINDS = {label: kind_of(label) for label in TABLE}


class Net(nn.Module):
    """Two linear layers with a ReLU. `last` has no bias: a factor on the activation is one on y."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.act = nn.ReLU(inplace=inplace)
        self.last = nn.Linear(6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))
