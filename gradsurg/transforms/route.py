"""Route: let each example train only the units of its label."""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, FieldError, validated
from gradsurg.plugins.reductions import widened
from gradsurg.transforms.base import (
    Stateless,
    TransformContext,
    TransformProperty,
    example_labels,
)


@validated
class Route(Stateless):
    """Multiply the gradient by a mask of units that depends on the example's label.

    Args:

    - `groups`: for each part of the units, the labels whose examples train it.
    - `outside`: the factor of the units of other parts.
    - `axis`: the axis of the units.

    The d units of `axis` are cut into as many parts as there are `groups`, of equal sizes up to one
    unit, the larger first (`torch.tensor_split`). For an example whose label is in group k the
    gradient g of the units of part k stays, and the gradient of all other units becomes `outside` *
    g. The gradient of an example whose label is in no group is not changed.

    Pass the labels to `live.set_example_labels(labels)`; `gradsurg.run` does it. Use it at an
    activation, for example `site=outputs site.pattern=encoder`. Labels of shape (n, time) belong to
    tokens; the gradient then has the shape (n, time, ...) or (n * time, ...), and `axis=-1` has the
    units in both. Gradient routing of Cloud et al. 2024 (arXiv 2410.04332), with the masks of the
    paper's autoencoder.

    At least two axes, of which the first match the labels. Zero stays zero, NaN stays NaN, an
    infinity stays infinite (it becomes NaN if it is routed away by a factor of 0), a tensor without
    examples stays empty.
    """

    groups: Annotated[tuple[tuple[int, ...], ...], Field(min_length=1)] = (
        (0, 1, 2, 3, 4),
        (5, 6, 7, 8, 9),
    )
    _: KW_ONLY
    outside: float = 0.0
    axis: int = 1

    def __post_init__(self) -> None:
        labels = [label for group in self.groups for label in group]
        if repeated := sorted({label for label in labels if labels.count(label) > 1}):
            text = f"must have each label once, found {repeated[0]} more than once"
            raise Contradiction("groups", text)
        if self.axis == 0:
            raise Contradiction("axis", "must not be 0, the axis of the examples, found 0")

    needed = frozenset({"labels"})

    tags = frozenset(
        {"elementwise", "homogeneous", "linear", "odd", "deterministic", "differentiable"}
    )

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {
            "sign_preserving": self.outside >= 0,
            "norm_non_increasing": abs(self.outside) <= 1,
            "idempotent": self.outside in (0.0, 1.0),
            "unbiased": self.outside == 1,
        }

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        labels, parts = example_labels(self, context), len(self.groups)
        shape, where = list(grad.shape), f"at the site '{context.site}'"
        if grad.ndim < 2 or not -grad.ndim < self.axis < grad.ndim:
            rule = f"needs axis 0 for examples and axis {self.axis} for units"
            raise FieldError(self, [("", f"{rule}, found the shape {shape} {where}")])
        if labels.shape != grad.shape[: labels.ndim] and len(grad) == labels.numel():
            labels = labels.flatten()
        if labels.shape != grad.shape[: labels.ndim]:
            found = f"{len(labels)} labels" if labels.ndim == 1 else f"labels {list(labels.shape)}"
            rule = "needs one label for each example (axis 0) or token (axes 0 and 1)"
            raise FieldError(self, [("", f"{rule}, found {found} and the shape {shape} {where}")])
        if self.axis % grad.ndim < labels.ndim:
            rule = f"must be >= {labels.ndim}, after the axes of the labels {list(labels.shape)}"
            text = f"{rule}, found {self.axis} and the shape {shape} {where}"
            raise FieldError(self, [("axis", text)])
        units = grad.shape[self.axis]
        if units < parts:
            rule = f"needs at least {parts} units on axis {self.axis}, one for each group"
            raise FieldError(self, [("groups", f"{rule}, found the shape {shape} {where}")])
        members = [_is_any(labels, group) for group in self.groups]
        is_free = ~torch.stack(members).any(0)
        columns = []
        for part, is_member in enumerate(members):
            size = units // parts + (part < units % parts)
            column = torch.where(is_member | is_free, 1.0, self.outside)
            columns.append(column[..., None].expand(*labels.shape, size))
        wide = widened(grad)
        factors = torch.cat(columns, dim=-1).to(device=grad.device, dtype=wide.dtype)
        view = [*labels.shape, *[1] * (grad.ndim - labels.ndim)]
        view[self.axis] = units
        return (wide * factors.view(view)).to(grad.dtype)


def _is_any(labels: Tensor, group: tuple[int, ...]) -> Tensor:
    """Return which labels are in a group, without copying the group to the device."""
    result = torch.zeros_like(labels, dtype=torch.bool)
    for label in group:
        result = result | (labels == label)
    return result
