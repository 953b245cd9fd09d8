"""Value: by a measurement of a tensor."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.fields import Contradiction, validated
from gradsurg.triggers.base import Moment, Source, Sourced


@validated
class Value(Sourced):
    """When a measurement of the source is larger than `above`; the device decides, nothing waits.

    `measure`: `mean_abs` is mean |x|, `norm` the L2 norm, `rms` the root of the mean square,
    `max_abs` max |x|, `quantile` the `q` quantile of |x| (the smallest entry with that share at or
    below it), `nan` the fraction of entries that are NaN. With `release` there is hysteresis: once
    it fires it goes on until the measurement is below `release`. A measurement that is NaN does not
    fire. The measurement of an empty tensor is 0. Half-precision tensors are measured in float32.
    """

    above: float
    measure: Literal["mean_abs", "norm", "rms", "max_abs", "quantile", "nan"] = "mean_abs"
    release: float | None = None
    q: Annotated[float, Field(ge=0, le=1)] = 0.99
    source: Source = "grad"

    def __post_init__(self) -> None:
        if self.release is not None and self.release > self.above:
            raise Contradiction("release", f"must be <= above ({self.above}), found {self.release}")

    @torch.no_grad()
    def look(self, tensor: Tensor) -> object:
        wide = tensor.detach()
        wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
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
                rank = max(1, -int(-self.q * wide.numel() // 1))
                return wide.abs().flatten().kthvalue(rank).values
            case "nan":
                return wide.isnan().to(wide.dtype).mean()

    def judge(self, look: object, moment: Moment) -> bool | Tensor:
        assert isinstance(look, Tensor)
        over = look > self.above
        if self.release is None:
            return over
        key = repr(self)
        before = moment.state.get(key)
        fires = over if before is None else over | (before & (look >= self.release))
        moment.state[key] = fires
        return fires
