"""Compare training under surgeries: each cell is run by the reference and by the working tree."""

import math
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from torch import Tensor

from tests.oracle import reference
from tests.oracle.accepted import unaccepted
from tests.oracle.core_outcome import Outcome
from tests.oracle.core_states import OTHERS, OWN

TOLERANCE = 1e-6  # of numbers; weights, states and gradients are equal bit for bit
SHOWN = 60

Outcomes = dict[str, tuple[str, str, Outcome]]
"""By the key of the cell: its row and column in the table, and its outcome."""


def main(tree: Path, only: str = "") -> int:
    """Print the table of what acts, and the differences; return how many are not accepted.

    `only` selects the cells whose key contains this text.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="oracle-") as root:
        folders = {name: Path(root) / name for name in ("reference", "working")}
        for folder in folders.values():
            folder.mkdir()
        trees = {"reference": tree, "working": reference.WORKING_TREE}
        workers = {
            name: reference.start("core_worker", trees[name], str(folders[name]), only)
            for name in folders
        }
        failed = [name for name, worker in workers.items() if worker.wait()]
        if failed:
            print(f"core: the process of the {' and the '.join(failed)} failed")
            return 1
        states = (str(folders["reference"]), str(folders["working"]))
        if reference.start("core_states", reference.WORKING_TREE, *states).wait():
            print("core: the working tree does not continue from the states of the reference")
            return 1
        old, new = (_outcomes(folder) for folder in folders.values())
    old |= _as_loaded(old, new)
    lines = [line for key in {**old, **new} for line in differences(key, old, new)]
    print(table(old, new, lines))
    print(
        f"{num_acting(old)} combinations act, {num_refused(old, new)} are refused by both,", end=" "
    )
    print(f"{len(lines)} differences, {time.perf_counter() - begin:.0f} s")
    return _report(lines)


def _outcomes(folder: Path) -> Outcomes:
    outcomes: Outcomes = {}
    for path in sorted(folder.glob("*.pickle")):
        with path.open("rb") as file:
            outcomes |= pickle.load(file)
    return outcomes


def _as_loaded(old: Outcomes, new: Outcomes) -> Outcomes:
    """How the reference continued, by the keys of the cells that load its states."""
    keys = {
        key: key.replace(OTHERS, OWN) for key, (_, column, _) in new.items() if column == OTHERS
    }
    return {key: (old[own][0], OTHERS, old[own][2]) for key, own in keys.items() if own in old}


def _report(lines: Sequence[str]) -> int:
    remaining = unaccepted(list(lines))
    fields = Counter(line.split(": ")[1] for line in remaining)
    for line in remaining[:SHOWN]:
        print(f"  {line}")
    if len(remaining) > SHOWN:
        print(f"  and {len(remaining) - SHOWN} more")
    if len(remaining) < len(lines):
        print(f"{len(lines) - len(remaining)} more are accepted")
    if remaining:
        print(f"by field: {', '.join(f'{name} {count}' for name, count in fields.most_common())}")
    return len(remaining)


def differences(key: str, old: Outcomes, new: Outcomes) -> Iterator[str]:
    """Yield a line for each part of the outcome of a cell that differs."""
    if key not in old or key not in new:
        yield f"{key}: missing: only in the {'reference' if key in old else 'working tree'}"
        return
    before, after = old[key][2], new[key][2]
    if before.hooks_left != after.hooks_left:
        yield f"{key}: hooks left: {before.hooks_left}, now {after.hooks_left}"
    if before.fault and after.fault:
        yield f"{key}: fault of the oracle: {before.fault}"
    if before.refused and after.refused:
        return
    if before.refused or after.refused:
        said = (before.refused or "acts", after.refused or "acts")
        yield f"{key}: refused: {said[0]}, now {said[1]}"
        return
    for name in ("weights", "states", "rows", "notes", "warnings"):
        pair = getattr(before, name), getattr(after, name)
        found = _first_difference(*(_as_short(*pair) if name == "warnings" else pair))
        if found:
            yield f"{key}: {name}: {found}"


def _as_short(before: list[str], after: list[str]) -> tuple[list[str], list[str]]:
    """The warnings with the names that those of the working tree have, which shorten lists."""
    short = []
    for one, later in zip(before, after, strict=False):
        named = set(later.removeprefix("at ").split(", ")) - {"..."}
        is_short = later.endswith(", ...") and named <= set(one.removeprefix("at ").split(", "))
        short.append(later if is_short else one)
    return [*short, *before[len(short) :]], after


def _first_difference(before: object, after: object) -> str:
    """Where two values differ, in words; empty if they are equal."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in {**before, **after}:
            if name not in before or name not in after:
                return f"{name} {'is new' if name in after else 'is gone'}"
            found = _first_difference(before[name], after[name])
            if found:
                return f"{name} {found}"
        return ""
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        pairs = zip_longest(before, after)
        return next(filter(None, (_first_difference(one, two) for one, two in pairs)), "")
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return _tensor_difference(before, after)
    return "" if _equal(before, after) else f"was {before}, now {after}"


def _equal(before: object, after: object) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        both_nan = math.isnan(before) and math.isnan(after)
        return both_nan or math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=1e-9)
    return before == after


def _tensor_difference(before: Tensor, after: Tensor) -> str:
    if before.shape != after.shape or before.dtype != after.dtype:
        return f"was {before.dtype} {[*before.shape]}, now {after.dtype} {[*after.shape]}"
    if before.is_sparse:
        before, after = before.to_dense(), after.to_dense()
    if before.equal(after) or (
        before.isnan().equal(after.isnan()) and before.nan_to_num().equal(after.nan_to_num())
    ):
        return ""
    return f"differs by up to {(before.double() - after.double()).abs().max().item():.3g}"


def num_acting(outcomes: Outcomes) -> int:
    return sum(outcome.acts and not outcome.refused for _, _, outcome in outcomes.values())


def num_refused(old: Outcomes, new: Outcomes) -> int:
    both = old.keys() & new.keys()
    return sum(bool(old[key][2].refused and new[key][2].refused) for key in both)


def table(old: Outcomes, new: Outcomes, lines: Sequence[str]) -> str:
    """The combinations that act, a row a kind of site and a column a context.

    A number after ! counts combinations with differences.
    """
    rows = list(dict.fromkeys(row for row, _, _ in {**old, **new}.values()))
    columns = list(dict.fromkeys(column for _, column, _ in {**old, **new}.values()))
    acting = Counter((row, column) for row, column, each in old.values() if each.acts)
    faulty = {line.split(": ")[0] for line in lines}
    wrong = Counter(({**old, **new})[key][:2] for key in faulty)
    cells = [["kind of site, stage", *map(str, range(1, len(columns) + 1)), "all"]]
    for row in rows:
        numbers = [(acting[row, column], wrong[row, column]) for column in columns]
        numbers.append((sum(one for one, _ in numbers), sum(two for _, two in numbers)))
        cells.append([row, *(f"{one or '.'}{f'!{two}' if two else ''}" for one, two in numbers)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    legend = ", ".join(f"{number} {name}" for number, name in enumerate(columns, 1))
    body = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([f"Combinations that act. Columns: {legend}", *map(str.rstrip, body)])


if __name__ == "__main__":
    sys.exit(min(1, main(reference.unpack(), *sys.argv[1:2])))
