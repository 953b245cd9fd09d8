"""JSON that loses nothing: a number that is not finite is null, and is told beside it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

NOT_FINITE = "not_finite"

_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def as_line(row: Mapping[str, object]) -> bytes:
    """A row as one line; its `not_finite` says what null stands for, as "train/loss=nan"."""
    try:
        return _encoder.encode(row).encode() + b"\n"
    except ValueError:
        pass  # JSON has no NaN and no infinity
    told = {**row, NOT_FINITE: " ".join(_not_finite(row))}
    return _encoder.encode(finite(told)).encode() + b"\n"


def finite(value: object) -> object:
    """The same with null in the place of each number that is not finite."""
    match value:
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {key: finite(item) for key, item in value.items()}
        case Sequence() if not isinstance(value, str):
            return [finite(item) for item in value]
        case _:
            return value


def _not_finite(value: object, path: str = "") -> Iterator[str]:
    """Each number that JSON cannot say, where it stands: `norms.1=nan`, with places from 0."""
    match value:
        case float():
            if not isfinite(value):
                yield f"{path}={value}"
        case Mapping():
            for key, item in value.items():
                yield from _not_finite(item, f"{path}.{key}" if path else str(key))
        case Sequence() if not isinstance(value, str):
            for place, item in enumerate(value):
                yield from _not_finite(item, f"{path}.{place}")
        case _:
            pass
