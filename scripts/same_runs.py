"""Whether two folders hold the same runs bit by bit: python scripts/same_runs.py ONE OTHER."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from gradsurg.training.run_directory import CHECKPOINT, CONFIG, EFFECTS, METRICS, SUMMARY


def differences(one: Path, other: Path) -> Iterator[str]:
    """A sentence for each run, and each file of a run, that is not the same."""
    names = [{path.parent.name for path in folder.glob(f"*/{CONFIG}")} for folder in (one, other)]
    for name in sorted(names[0] ^ names[1]):
        yield f"{name} is in {one if name in names[0] else other} only"
    for name in sorted(names[0] & names[1]):
        for file in (CONFIG, METRICS, EFFECTS, SUMMARY, CHECKPOINT):
            left, right = one / name / file, other / name / file
            if not (left.is_file() and right.is_file()):
                yield f"{name} has no {file} in {one if right.is_file() else other}"
            elif not _same(*(_content(path) for path in (left, right))):
                yield f"{name}: {file} differs"


def _content(path: Path) -> object:
    """What a file holds, without what is timed."""
    if path.name == CHECKPOINT:
        kept = torch.load(path, map_location="cpu", weights_only=True)
        del kept["state"]["seconds"]
        return kept
    if path.name != SUMMARY:
        return path.read_bytes()
    summary = json.loads(path.read_bytes())
    apart = ("time/", "hardware")  # which says how many threads there were
    return {key: value for key, value in summary.items() if not key.startswith(apart)}


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


if __name__ == "__main__":
    folders = Path(sys.argv[1]), Path(sys.argv[2])
    if not [*folders[0].glob(f"*/{SUMMARY}")]:
        sys.exit(f"{folders[0]} has no finished run")
    if found := [*differences(*folders)]:
        sys.exit("\n".join(found))
