"""The surgery of a callback, which may be given as a config or not at all."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradsurg.core.surgery import Surgery

Given = Surgery | Mapping[str, Any] | Sequence[Any] | None  # Any: what YAML can hold


def surgery_of(given: Given) -> Surgery:
    """Return the given surgery, the surgery of a config, or an empty one for None."""
    if given is None:
        return Surgery()
    if isinstance(given, Surgery):
        return given
    from gradsurg.experiment.from_config import from_config  # not needed for a surgery

    return from_config(given)
