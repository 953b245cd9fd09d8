"""Chain: several transforms, one after another."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from gradsurg.transforms.base import (
    GroupTransform,
    Need,
    Scope,
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
    as_transform,
    init_all,
    substate,
    update_all,
)
from gradsurg.transforms.identity import Identity

BoundTransform = Transform | Callable[[Tensor], Tensor]


class Chain(GroupTransform):
    """Apply transforms in order: `Chain(Clip(1.0), Scale(2.0))` clips, then scales.

    Chains among the links are taken apart, plain callables become `Function`s, a chain of nothing
    is the identity. It sees a group if one of its links does. Each link has the state it would have
    alone, under its number, and a site of its own, so that two of them draw different noise. Zero,
    NaN, infinities and empty tensors: as the links have them.
    """

    links: tuple[Transform, ...]

    def __init__(self, *transforms: BoundTransform, links: Iterable[BoundTransform] = ()) -> None:
        flat = tuple(_flat([*transforms, *links]))
        object.__setattr__(self, "links", flat)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Chain cannot be changed: {name} was to be {value!r}")

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.links))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.links == other.links

    def __hash__(self) -> int:
        return hash((Chain, self.links))

    @property
    def scope(self) -> Scope:
        return "group" if any(link.scope == "group" for link in self.links) else "tensor"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset[Need]().union(*(link.needs for link in self.links))

    @property
    def properties(self) -> frozenset[TransformProperty]:
        """What all links obey: each law holds of a composition if it holds of the parts.

        Unbiased too, as the links' draws are independent. All but idempotent: clipping after
        scaling, say, repeats the scaling the second time.
        """
        properties = Identity().properties.intersection(*(link.properties for link in self.links))
        return properties if len(self.links) < 2 else properties - {"idempotent"}

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return {
            f"{index}.{key}": value
            for index, link in enumerate(self.links)
            for key, value in init_all(link, grads).items()
        }

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        results = list(grads)
        states = {}
        for index, link in enumerate(self.links):
            own = [replace(context, site=f"{context.site}/{index}") for context in contexts]
            results, after = update_all(link, results, substate(state, f"{index}."), own)
            states |= {f"{index}.{key}": value for key, value in after.items()}
        return results, states


def _flat(links: Iterable[object]) -> Iterable[Transform]:
    for index, link in enumerate(links):
        match as_transform(link):
            case Chain() as chain:
                yield from chain.links
            case Transform() as transform:
                yield transform
            case other:
                hint = f": did you mean {other.__name__}()?" if isinstance(other, type) else ""
                raise TypeError(f"Chain.links.{index}: must be a transform, found {other!r}{hint}")
