"""Which runs a run is compared with: kept from one command to the next."""

from collections.abc import Mapping
from typing import Any


def first_control(controls: Mapping[str, str]) -> str | None:
    """The one that is compared with where several are known: the plain one."""
    return next((controls[kind] for kind in sorted(controls, key=lambda k: k != "plain")), None)


def merged_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `now`, with the controls that only `before` knows: what one command has paired
    is not torn apart by another.
    """
    if "controls" not in now:
        return dict(now)
    controls = {**controls_of(before), **now["controls"]}
    return {**now, "control": first_control(controls), "controls": controls}


def controls_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """The controls that a run's facts name, by their kind."""
    known, one = facts.get("controls"), facts.get("control")
    if isinstance(known, Mapping):
        return dict(known)
    kind = "norm_matched" if str(one).startswith("norm_matched-") else "plain"
    return {kind: one} if isinstance(one, str) else {}
