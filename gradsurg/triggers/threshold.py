"""Threshold: by a measurement of a tensor."""

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.triggers.base import Source, TensorTrigger, TriggerContext


@validated
class Threshold(TensorTrigger):
    """When a measurement of the source is larger than `above`; the device decides, nothing waits.

    `measure`: `mean_abs` is mean |x|, `norm` the L2 norm, `rms` the root of the mean square,
    `max_abs` max |x|, `quantile` the `q` quantile of |x| (the smallest entry with that share at or
    below it, a NaN being larger than all numbers), `nan` the fraction of entries that are NaN. With
    `release` there is hysteresis: once it fires at a site it goes on there until the measurement is
    below `release`. A measurement that is NaN does not fire, and ends what has gone on. The
    measurement of an empty tensor is 0. Half-precision tensors are measured in float32.
    """

    above: Annotated[float, Field(ge=0)]
    measure: Literal["mean_abs", "norm", "rms", "max_abs", "quantile", "nan"] = "mean_abs"
    release: Annotated[float, Field(ge=0)] | None = None
    q: Annotated[float, Field(ge=0, le=1)] = 0.99
    source: Source = "grad"

    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.measure == "nan" and self.above >= 1:
            raise Contradiction("above", f"must be < 1, a fraction of entries, found {self.above}")
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
                # Less by what a product in floating point can be too much: 0.07 * 100 is over 7.
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
