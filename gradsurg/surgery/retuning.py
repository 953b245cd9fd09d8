"""The intervention that is to take the place of another: other fields, or another trigger."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from gradsurg.plugins.fields import FieldError, nearest
from gradsurg.surgery.intervention import Intervention
from gradsurg.transforms.base import Transform
from gradsurg.transforms.chain import Chain
from gradsurg.triggers.base import Trigger


def retuned(
    old: Intervention,
    labels: Sequence[str],
    label: str,
    when: Trigger | None,
    changes: Mapping[str, object],
) -> Intervention:
    """`old`, whose links have those labels, with `changes` of the fields of the link `label` and
    the trigger `when`.

    Raises LookupError if it has several links and is named as a whole, ValueError or TypeError for
    what cannot be, or would have to be hooked elsewhere.
    """
    if when is None and not changes:
        raise ValueError(f"'{label}': nothing to change was given, no field and no `when`")
    links = [
        _changed(link, label, changes) if name == label and changes else link
        for name, link in zip(labels, old.links, strict=True)
    ]
    if changes and label not in labels:
        raise LookupError(f"'{label}' has several links: {', '.join(labels)}")
    if when is not None and not isinstance(when, Trigger):
        raise TypeError(f"when: must be a trigger, as Steps(stop=100), found {when!r}")
    transform = old.operator
    if changes:
        transform = Chain(*links) if isinstance(transform, Chain) else links[0]
    new = Intervention(transform, old.at, when or old.when, old.names)
    if (new.stage, new.operator.scope) != (old.stage, old.operator.scope):
        raise ValueError(
            f"'{label}' is hooked at stage '{old.stage}' for a {old.operator.scope}, and would "
            f"act at stage '{new.stage}' for a {new.operator.scope}: remove it and add another"
        )
    return new


def _changed(link: Transform, label: str, changes: Mapping[str, object]) -> Transform:
    known = [field.name for field in fields(link)] if hasattr(link, "__dataclass_fields__") else []  # pyright: ignore[reportArgumentType]
    wrong = [
        (key, f"is not a field here. {nearest(key, known)}") for key in changes if key not in known
    ]
    if wrong:
        raise FieldError(label, wrong)
    return replace(link, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue, reportType]
