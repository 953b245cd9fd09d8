"""A context that has all that a transform may ask for."""

from dataclasses import dataclass

from torch import Tensor

from gradsurg.transforms.base import TransformContext


@dataclass(slots=True)
class _Flow:
    error: Tensor | None
    task: str = ""


def context_with(value: Tensor, step: int = 0, factor: float = 1.0) -> TransformContext:
    """A context with a value, and with `factor` times it as the gradients that stand beside the one
    at hand: the one that enters the node and the one of what the model has returned.
    """
    other = value.detach() if factor == 1 else value.detach() * factor
    return TransformContext("a.weight", step, value, flow=_Flow(other), entering=(other,))
