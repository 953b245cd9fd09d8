"""Chain: the composition of several transforms."""

from collections.abc import Callable, Iterable, Sequence

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

Link = Transform | Callable[[Tensor], Tensor]


class Chain(GroupTransform):
    """Apply transforms in order: `Chain(Clip(1.0), Scale(2.0))` clips, then scales.

    Nested chains are flattened, plain functions become `Function`s, and a chain without links is
    the identity. The scope is `group` if one link has the scope `group`. Link i has the state it
    would have alone, with keys prefixed by `i.`, and the site id with the suffix `/i`, so that two
    equal links draw different noise.

    The links decide on zeros, NaN, infinities and empty tensors.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with gs.Surgery(gs.Intervention(gs.Chain(gs.Clip(1.0), gs.Scale(2.0)))).attach(layer):
    ...     layer(torch.tensor([3.0, -4.0])).backward()
    >>> layer.weight.grad  # 3, -4 without the surgery
    tensor([[ 2., -2.]])
    """

    links: tuple[Transform, ...]

    def __init__(self, *transforms: Link, links: Iterable[Link] = ()) -> None:
        flat = tuple(_flat([*transforms, *links]))
        for index, link in enumerate(flat):
            if index and "examples" in link.needs:
                raise ValueError(
                    f"Chain.links.{index}: {type(link).__name__} must be the first link: it reads "
                    "the gradients of single examples, which other transforms do not change"
                )
        object.__setattr__(self, "links", flat)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Chain cannot be changed: cannot set {name}={value!r}")

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
        """The properties that all links have, without `idempotent` if there are several links.

        Each of the others holds for a composition if it holds for its parts; `unbiased` does
        because the links draw independently.
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
    ) -> tuple[Iterable[Tensor], TransformState]:
        results: Iterable[Tensor] = grads
        states = {}
        for index, link in enumerate(self.links):
            inner = [context.inside(str(index)) for context in contexts]
            results, after = update_all(link, list(results), substate(state, f"{index}."), inner)
            states |= {f"{index}.{key}": value for key, value in after.items()}
        return results, states


def links_of(transform: Transform) -> tuple[Transform, ...]:
    """The links of a chain; any other transform, or a chain without links, by itself."""
    return (transform.links if isinstance(transform, Chain) else ()) or (transform,)


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
