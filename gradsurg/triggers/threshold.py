"""Threshold: fire when a measurement of a tensor is large."""

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.triggers.base import Source, TensorTrigger, TriggerContext


@validated
class Threshold(TensorTrigger):
    """Fire when a measurement m(x) of the source x is > `above`.

    | `measure` | m(x) |
    |---|---|
    | `mean_abs` | mean of abs(x) |
    | `norm` | L2 norm of x |
    | `rms` | square root of the mean of x^2 |
    | `max_abs` | maximum of abs(x) |
    | `quantile` | `q`-quantile of abs(x): smallest entry >= a fraction q of all; NaN is largest |
    | `nan` | fraction of entries that are NaN |

    With `release` the trigger has hysteresis: after it fired at a site it fires there until
    m(x) < release. Evaluated on the device, without a synchronization.

    Does not fire, and is released, if m(x) is NaN. m(x) is 0 for an empty tensor. Half-precision
    tensors are measured in float32.
    """

    above: Annotated[float, Field(ge=0)]
    measure: Literal["mean_abs", "norm", "rms", "max_abs", "quantile", "nan"] = "mean_abs"
    release: Annotated[float, Field(ge=0)] | None = None
    q: Annotated[float, Field(ge=0, le=1)] = 0.99
    source: Source = "grad"

    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.measure == "nan" and self.above >= 1:
            raise Contradiction("above", f"must be < 1 with measure=nan, found {self.above}")
        if self.release is not None and self.release > self.above:
            raise Contradiction("release", f"must be <= above ({self.above}), found {self.release}")

    @property
    def homogeneous(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.measure == "nan"

    def observe(self, tensor: Tensor) -> object:
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if not wide.numel():
            return wide.new_zeros(())
        match self.measure:
            case "mean_abs":
                return wide.abs().mean()
            case "norm":
                return torch.linalg.vector_norm(wide)
            case "rms":
                return torch.linalg.vector_norm(wide) / wide.numel() ** 0.5
            case "max_abs":
                return wide.abs().amax()
            case "quantile":
                # 0.07 * 100 is slightly over 7 in floating point: reduce before rounding up.
                rank = max(1, math.ceil(self.q * wide.numel() * (1 - 1e-12)))
                return wide.abs().reshape(-1).kthvalue(rank).values
            case "nan":
                return wide.isnan().float().mean()

    def decide(self, observation: object, context: TriggerContext) -> bool | Tensor:
        assert isinstance(observation, Tensor)
        over = observation > self.above
        if self.release is None:
            return over
        key = repr(self)
        before = context.state.get(key)
        fires = over if before is None else over | (before & (observation >= self.release))
        context.state[key] = fires
        return fires
