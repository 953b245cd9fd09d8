"""AdaptiveClip: bound gradient norms by a threshold that follows the norms of past steps."""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.plugins.reductions import joint_norm, norms_of, scaled
from gradsurg.transforms.base import (
    GroupTransform,
    Members,
    TransformContext,
    TransformState,
)


@validated
class AdaptiveClip(GroupTransform):
    """Scale gradients by min(1, c / n), n their norm and c a threshold from past norms.

    Args:

    - `z`: a factor of the threshold, or the quantile with `rule=quantile`.
    - `warmup`: the number of first norms, from which the averages m and v (below) start.
    - `max_norm`: in the warm-up, a bound of the joint norm of all gradients, also with `of=each`;
      after it, a bound of n, except with `ratio`.
    - `of`: whether n is the joint 2-norm of all gradients of a `group`, or the 2-norm of `each`
      gradient.

    m is an average of the norms and v of their squared deviations. After the warm-up each norm,
    clipped to k = min(n, c), moves them: m <- decay m + (1 - decay) k, then v <- decay v + (1 -
    decay) (k - m)^2.

    | `rule` | threshold c | source |
    |---|---|---|
    | `zscore` | m + z^2 s / q if q = (n - m) / (s + 1e-6) > z; s = sqrt(v) | ZClip |
    | `deviations` | m + z s | ZClip, `mode="percentile"` |
    | `ratio` | z max(m, 1e-6) | AdaGC |
    | `quantile` | the quantile z of the last `window` norms and n | AutoClip |

    With `zscore` c is infinite for q <= z. In the warm-up `max_norm` is the only bound. m and v
    start as the mean and the variance of the norms in it. With `ratio` m starts as the minimum of
    these norms, each scaled as `max_norm` scaled its gradient. `quantile` has no warm-up, and needs
    `max_norm=None`.

    ZClip is by Kumar et al. 2025 (arXiv 2504.02507), whose code scales by c / (n + 1e-6). AdaGC is
    by Wang et al. 2025 (arXiv 2502.11034), whose z is 1.05 and decay 0.98. AutoClip is by
    Seetharaman et al. 2020 (arXiv 2007.14469), who take the quantile of all past norms.

    Any shapes. Zeros stay zero, empty tensors stay empty. A norm that is NaN or infinite does not
    count. A norm of NaN clips nothing; an infinity that is clipped becomes NaN and the rest zero.
    A gradient that is absent in a step does not count; with `of=each` its own m and v stay.
    """

    rule: Literal["zscore", "deviations", "ratio", "quantile"] = "zscore"
    z: Annotated[float, Field(gt=0)] = 2.5
    _: KW_ONLY
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.97
    warmup: Annotated[int, Field(ge=1)] = 25
    max_norm: Annotated[float, Field(gt=0)] | None = 1.0
    window: Annotated[int, Field(ge=1)] = 1000
    of: Literal["group", "each"] = "group"

    def __post_init__(self) -> None:
        if self.rule == "quantile" and self.z > 1:
            raise Contradiction("z", f"must be <= 1 with rule=quantile, found {self.z}")
        if self.rule == "quantile" and self.max_norm is not None:
            raise Contradiction(
                "max_norm", f"must be null with rule=quantile, found {self.max_norm}"
            )

    tags = frozenset(
        {"odd", "sign_preserving", "norm_non_increasing", "deterministic", "differentiable"}
    )

    @property
    def acts_on_shards(self) -> bool:
        return True

    @property
    def members(self) -> Members:
        return "entries" if self.of == "each" else "any"

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        norms = self._norms(grads)
        if self.rule == "quantile":
            return {"norms": norms.new_full((self.window, *norms.shape), torch.inf)}
        start = torch.inf if self.rule == "ratio" else 0.0
        return {
            "count": torch.zeros_like(norms, dtype=torch.int64),
            "mean": torch.full_like(norms, start),
            "variance": torch.zeros_like(norms),
        }

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        norms = self._norms(grads)
        if self.rule == "quantile":
            kept = torch.where(norms.isnan(), torch.inf, norms)
            past = torch.cat([state["norms"][1:], kept[None]])
            factors, state = _factor(norms, _quantile(past, self.z)), {"norms": past}
        else:
            factors, state = self._averaged(norms, torch.linalg.vector_norm(norms), state)
        return scaled(grads, factors), state

    def _norms(self, grads: Sequence[Tensor]) -> Tensor:
        return norms_of(grads) if self.of == "each" else joint_norm(grads)[None]

    def _averaged(
        self, norms: Tensor, joint: Tensor, state: TransformState
    ) -> tuple[Tensor, TransformState]:
        most = torch.inf if self.max_norm is None else self.max_norm
        bound = self._bound(norms, state)
        starts = state["count"] < self.warmup
        capped = bound if self.rule == "ratio" else bound.clamp(max=most)
        first = _factor(joint, torch.full_like(joint, most))
        factors = torch.where(starts, first, _factor(norms, capped))
        # ZClip averages norms without the clip at max_norm, AdaGC the norms of the results.
        seen = torch.where(starts, norms * first if self.rule == "ratio" else norms, bound)
        after = self._moved(torch.minimum(norms, seen), state)
        return factors, {
            key: torch.where(norms.isfinite(), after[key], state[key]) for key in after
        }

    def _bound(self, norms: Tensor, state: TransformState) -> Tensor:
        mean, deviation = state["mean"], state["variance"].sqrt()
        match self.rule:
            case "zscore":
                q = (norms - mean) / (deviation + 1e-6)
                bound = mean + self.z**2 * deviation / q.clamp(min=self.z)
                return torch.where(q > self.z, bound, torch.inf)
            case "deviations":
                return mean + self.z * deviation
            case "ratio" | "quantile":
                return self.z * mean.clamp(min=1e-6)  # a mean of 0 would stay 0

    def _moved(self, norms: Tensor, state: TransformState) -> TransformState:
        count, mean, variance = state["count"] + 1, state["mean"], state["variance"]
        starts = count <= self.warmup
        ratio = self.rule == "ratio"
        start = torch.minimum(mean, norms) if ratio else mean + (norms - mean) / count
        moved = torch.where(starts, start, self.decay * mean + (1 - self.decay) * norms)
        # Welford's update of the variance of the first norms; later the moving average.
        first = variance + ((norms - mean) * (norms - moved) - variance) / count
        later = self.decay * variance + (1 - self.decay) * (norms - moved).square()
        spread = variance if ratio else torch.where(starts, first, later)
        return {"count": count, "mean": moved, "variance": spread}


def _factor(norms: Tensor, bound: Tensor) -> Tensor:
    clips = norms > bound
    # Of an infinite bound the quotient has no derivative, also where it is not chosen.
    return torch.where(clips, bound, 1.0) / torch.where(clips, norms, 1.0)


def _quantile(past: Tensor, fraction: float) -> Tensor:
    """Return the quantile over axis 0 of the finite entries, like `torch.nanquantile`."""
    ordered = past.sort(dim=0).values  # infinities last
    last = past.isfinite().sum(dim=0, keepdim=True).clamp(min=1) - 1
    rank = fraction * last.to(past.dtype)
    below, above = (ordered.gather(0, at.long())[0] for at in (rank.floor(), rank.ceil()))
    return torch.lerp(below, above, (rank - rank.floor())[0])
