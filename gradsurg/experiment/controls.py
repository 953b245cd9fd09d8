"""Interventions of control arms: the treatment with one part replaced."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Literal, get_args

from gradsurg.aggregators.base import NormMatchedSum
from gradsurg.core.intervention import Intervention
from gradsurg.sites.parameters import Parameters
from gradsurg.sites.selectors import ParamSelector
from gradsurg.sites.updates import MatchedUpdates, Updates
from gradsurg.transforms.norm_matched import NormMatched
from gradsurg.transforms.placebo import Placebo

ArmKind = Literal["treated", "control", "norm_matched", "update_norm_matched", "placebo"]
ActingControl = Literal["norm_matched", "update_norm_matched", "placebo"]
"""Controls that change gradients; the plain control changes none.

`norm_matched` scales the plain gradient to the norm of the treated one, `update_norm_matched` the
optimizer's plain update to the norm of the treated update. `placebo` has the norm of the treated
gradient and its cosine to the plain one, in a random direction."""


def control_interventions(
    items: Sequence[Intervention], kind: ActingControl
) -> tuple[Intervention, ...]:
    """Return the interventions of a control arm for the treatment `items`.

    Raises ValueError for an unknown kind, for an aggregator except with `norm_matched`, and for
    `update_norm_matched` unless there is one intervention, at parameters or updates.
    """
    if kind not in get_args(ActingControl):
        known = ", ".join(("plain", *get_args(ActingControl)))
        raise ValueError(f"control: must be one of {known}, found {kind!r}")
    if kind == "update_norm_matched" and len(items) > 1:
        raise ValueError(f"{kind} is for one intervention, found {len(items)}")
    return tuple(_control(item, kind) for item in items)


def _control(item: Intervention, kind: ActingControl) -> Intervention:
    if item.aggregator is not None:
        if kind != "norm_matched":
            raise ValueError(f"control: {kind} is for transforms, found {item.aggregator!r}")
        matched = NormMatchedSum(item.aggregator)
        return replace(item, transform=matched, names=("norm_matched_sum",))
    match kind, item.at:
        case ("norm_matched", _) | ("update_norm_matched", Updates()):
            return replace(item, transform=NormMatched(item.operator), names=("norm_matched",))
        case ("placebo", _):
            return replace(item, transform=Placebo(item.operator), names=("placebo",))
        case (_, Parameters() as at):
            shared = {field.name: getattr(at, field.name) for field in fields(ParamSelector)}
            return replace(item, at=MatchedUpdates(**{**shared, "stage": None}))
        case _:
            raise ValueError(
                "update_norm_matched needs the gradients that the optimizer uses: "
                f"Parameters or Updates (site=parameters, site=updates), found {item.at!r}"
            )
