"""Compare the runs of two folders number by number: python scripts/same_runs.py ONE OTHER."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

CHECKPOINT, SUMMARY = "checkpoint.pt", "summary.json"
ROWS = ("metrics.jsonl", "effects.jsonl", "conflicts.jsonl")
STATE = ("step", "model", "optimizer", "lr_schedule", "scaler", "surgery", "generators")
WORDS = ("time/", "hardware", "note", "learned_nothing")


def differences(one: Path, other: Path) -> Iterator[str]:
    """Yield a sentence for each run, and each file of a run, that differs."""
    left, right = _runs(one), _runs(other)
    for run in sorted(left.keys() ^ right.keys()):
        yield f"{run} is in {one if run in left else other} only"
    for run in sorted(left.keys() & right.keys()):
        for file in (*ROWS, SUMMARY, CHECKPOINT):
            if _content(left[run] / file) != _content(right[run] / file):
                yield f"{run}: {file} differs"


def _runs(folder: Path) -> dict[str, Path]:
    """Return the run directories of a folder by study, label and seed, without the config hash."""
    places = [path.parent for path in folder.rglob(SUMMARY)]
    return {
        str(place.relative_to(folder).with_name(place.name.rpartition("-")[0])): place
        for place in places
    }


def _content(path: Path) -> object:
    """Return the numbers of a file as text, without times and words."""
    if not path.is_file():
        return None
    if path.name == CHECKPOINT:
        kept = torch.load(path, map_location="cpu", weights_only=True)["state"]
        return _exact({key: kept[key] for key in STATE})
    if path.name == SUMMARY:
        summary = json.loads(path.read_bytes())
        return {key: value for key, value in summary.items() if not key.startswith(WORDS)}
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _exact(value: object) -> object:
    """Return the content with each tensor replaced by its dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    return [_exact(item) for item in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    folders = Path(sys.argv[1]), Path(sys.argv[2])
    if not _runs(folders[0]):
        sys.exit(f"{folders[0]} has no finished run")
    if found := [*differences(*folders)]:
        sys.exit("\n".join(found))
