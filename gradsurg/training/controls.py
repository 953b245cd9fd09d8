"""Interventions of control arms: those of the treatment but for one part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from gradsurg.aggregators.base import NormMatchedSum
from gradsurg.hooks.intervention import Intervention
from gradsurg.transforms.norm_matched import NormMatched
from gradsurg.transforms.placebo import Placebo

ActingControl = Literal["norm_matched", "placebo"]
"""Controls that change gradients; the plain control changes none.

`norm_matched` has the direction of the plain gradient and the norm of the treated one, `placebo`
its norm and its cosine to the plain gradient, in a random direction."""


def control_interventions(
    items: Sequence[Intervention], kind: ActingControl
) -> tuple[Intervention, ...]:
    """Return the interventions of a control arm for the treatment `items`.

    Raises ValueError for an unknown kind, or the placebo of an aggregator.
    """
    if kind not in get_args(ActingControl):
        known = ", ".join(("plain", *get_args(ActingControl)))
        raise ValueError(f"control: must be one of {known}, found {kind!r}")
    return tuple(_control(item, kind) for item in items)


def _control(item: Intervention, kind: ActingControl) -> Intervention:
    if item.aggregator is None:
        transform = (NormMatched if kind == "norm_matched" else Placebo)(item.operator)
        return replace(item, transform=transform, names=(kind,))
    if kind == "placebo":
        raise ValueError(f"control: placebo is for transforms, found {item.aggregator!r}")
    matched = NormMatchedSum(item.aggregator)
    return replace(item, transform=matched, names=("norm_matched_sum",))
