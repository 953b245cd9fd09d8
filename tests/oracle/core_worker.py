"""Run every cell with one side's gradsurg: `python -m tests.oracle.core_worker <tree> <folder>`."""

import pickle
import sys
import time
from itertools import chain
from pathlib import Path

import torch

from tests.oracle import (
    core_cells,
    core_changes,
    core_ranks,
    core_situations,
    core_states,
    core_tasks,
    reference,
)
from tests.oracle.core_outcome import Outcome, outcome_of

PROGRESS = 60  # seconds


def main(tree: Path, folder: Path, only: str = "") -> None:
    """Write the outcomes of all cells, or of those whose key contains `only`, into `folder`."""
    reference.assert_imported_from(tree)
    torch.set_num_threads(1)
    core_ranks.run_all(folder, only)
    begin = said = time.monotonic()
    outcomes: dict[str, tuple[str, str, Outcome]] = {}
    sources = core_cells, core_changes, core_situations, core_tasks
    for cell in chain(*(each.cells() for each in sources), core_states.cells(folder)):
        if only not in cell.key:
            continue
        assert cell.key not in outcomes, f"two cells have the key {cell.key}"
        outcomes[cell.key] = cell.row, cell.column, outcome_of(cell)
        if time.monotonic() > said + PROGRESS:
            said = time.monotonic()
            print(f"{folder.name}: {len(outcomes)} cells in {said - begin:.0f} s", flush=True)
    with (folder / "outcomes.pickle").open("wb") as file:
        pickle.dump(outcomes, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
