"""Graft: the direction of one transform's result with the norm of another's."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.plugins.reductions import direction, norm
from gradsurg.transforms.base import (
    AnyTransform,
    GroupTransform,
    Need,
    Scope,
    TransformContext,
    TransformProperty,
    TransformState,
    init_all,
    substate,
    update_all,
)
from gradsurg.transforms.identity import Identity
from gradsurg.transforms.sign import Sign


@validated
class Graft(GroupTransform):
    """Give the result of a transform D the 2-norm of M's result: D(g) |M(g)| / |D(g)|.

    D is the field `direction`, M the transform in the field `magnitude`; the norms are of each
    tensor. Layer grafting of Agarwal et al. 2020 (arXiv 2002.11803), who graft the steps of two
    optimizers; with plain SGD this is the same.

    Any shape. The result is zero where D(g) is zero. A NaN in M(g) or in D(g) makes every entry
    NaN; an infinity in D(g) becomes NaN and every other entry zero. An infinity in M(g) makes every
    entry infinite, or NaN if D(g) is zero there or has an infinity. An empty tensor stays empty.
    The state consists of the states of D and M.
    """

    direction: AnyTransform = Sign()
    magnitude: AnyTransform = Identity()

    @property
    def scope(self) -> Scope:
        return "group" if "group" in (self.direction.scope, self.magnitude.scope) else "tensor"

    @property
    def needs(self) -> frozenset[Need]:
        return self.direction.needs | self.magnitude.needs

    @property
    def properties(self) -> frozenset[TransformProperty]:
        both = self.direction.properties & self.magnitude.properties
        inherited = both & frozenset[TransformProperty](
            {"homogeneous", "odd", "deterministic", "differentiable"}
        )
        directed = self.direction.properties & frozenset[TransformProperty]({"sign_preserving"})
        bounded = self.magnitude.properties & frozenset[TransformProperty]({"norm_non_increasing"})
        return inherited | directed | bounded

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        direction, magnitude = init_all(self.direction, grads), init_all(self.magnitude, grads)
        return _joined(direction, magnitude)

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        inner = substate(state, "direction.")
        directed, direction_state = update_all(self.direction, grads, inner, contexts)
        inner = substate(state, "magnitude.")
        sized, magnitude_state = update_all(self.magnitude, grads, inner, contexts)
        pairs = zip(directed, sized, strict=True)
        results = ((direction(d, "tensor") * norm(m, "tensor")).to(d.dtype) for d, m in pairs)
        return results, _joined(direction_state, magnitude_state)


def _joined(direction: TransformState, magnitude: TransformState) -> TransformState:
    states = {"direction": direction, "magnitude": magnitude}
    return {f"{key}.{name}": value for key in states for name, value in states[key].items()}
