"""Continue from a saved state: each side from its own, the working tree also from the reference's.

`python -m tests.oracle.core_states <tree> <folder of the reference> <folder to write to>`.
"""

import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path

import torch
from torch.optim import SGD

import gradsurg as gs
from tests.oracle import reference
from tests.oracle.core_cells import TRANSFORMS, TRIGGERS, Make
from tests.oracle.core_models import Mlp, batches
from tests.oracle.core_outcome import Cell, Observed, outcome_of
from tests.oracle.core_sites import KINDS
from tests.oracle.core_training import LOSS

OWN, OTHERS = "state_dict", "state_dict of the reference"
"""The columns of the table."""

PLACES = ("Parameters backward", "Parameters accumulated", "Parameters step", "Outputs", "Updates")
"""The kinds of site with a spelling that both sides share: a state is loaded by the spelling."""

SURGERIES: dict[str, tuple[Make, Make | None]] = {
    "Momentum": (TRANSFORMS["Momentum"], None),
    "Delay": (TRANSFORMS["Delay"], None),
    "AddNoise": (TRANSFORMS["AddNoise"], TRIGGERS["Steps"]),
    "Chain": (TRANSFORMS["Chain"], TRIGGERS["Probability per site"]),
    "AdaptiveClip": (TRANSFORMS["AdaptiveClip"], None),
    "release": (TRANSFORMS["Momentum"], TRIGGERS["Threshold with release"]),
    "Flag": (TRANSFORMS["Scale"], TRIGGERS["Flag"]),
}


@dataclass(frozen=True)
class Case:
    """A surgery that is saved after two steps and continues for two more."""

    place: str
    name: str

    def surgery(self) -> gs.Surgery:
        make, when = SURGERIES[self.name]
        trigger = gs.Always() if when is None else when()
        return gs.Surgery(gs.Intervention(make(), at=KINDS[self.place](), when=trigger), seed=4)

    def save(self, file: Path) -> None:
        """Train two steps and save."""
        model, surgery = Mlp(), self.surgery()
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        with surgery.attach(model, optimizer) as live:
            if self.name == "Flag":
                live.switch("flag", on=True)
            _train(model, optimizer, 0)
            parts = {"model": model, "optimizer": optimizer, "surgery": surgery}
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)

    def resume(self, file: Path, observed: Observed) -> None:
        """Load and train two steps."""
        saved = torch.load(file, weights_only=True)
        model, surgery = Mlp(), self.surgery()
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        observed.watch(model, optimizer)
        with surgery.attach(model, optimizer) as live:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            surgery.load_state_dict(saved["surgery"])
            _train(model, optimizer, 2)
        observed.take(surgery, live)


CASES = [Case(*parts) for parts in product(PLACES, SURGERIES)]


def _train(model: Mlp, optimizer: SGD, start: int) -> None:
    for x, y in islice(batches(model), start, start + 2):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()


def cells(written: Path) -> Iterator[Cell]:
    """Yield cells that save a state into a folder and continue from it."""

    def run(case: Case, observed: Observed) -> None:
        file = written / f"{case.place} {case.name}.pt"
        case.save(file)
        torch.manual_seed(0)  # as if it were the first model of the process
        case.resume(file, observed)

    for case in CASES:
        yield Cell(case.place, OWN, case.name, partial(run, case))


def main(tree: Path, read: Path, written: Path) -> None:
    """Continue from the states of the reference; compare with how the reference continued."""
    reference.assert_imported_from(tree)
    torch.set_num_threads(1)
    outcomes = {}
    for case in CASES:
        if not (read / f"{case.place} {case.name}.pt").exists():
            continue  # not among the selected cells
        run = partial(case.resume, read / f"{case.place} {case.name}.pt")
        cell = Cell(case.place, OTHERS, case.name, run)
        outcomes[cell.key] = case.place, OTHERS, outcome_of(cell)
    with (written / "states.pickle").open("wb") as file:
        pickle.dump(outcomes, file)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
