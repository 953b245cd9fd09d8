"""What a selector would hook, told without an attachment: it is given gates that let all pass."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradsurg.plugins.fields import nearest
from gradsurg.sites._modules import params_of
from gradsurg.sites._node_names import plain
from gradsurg.sites.base import GroupFn, Keeps, Place, Put, Selector, SiteHook, Stage
from gradsurg.transforms.base import Scope

NOT_MET = "not met"


class Like(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Like | None":
        """None for a nested tensor, which has no shape."""
        return None if tensor.is_nested else cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) or "()"


@dataclass(frozen=True, slots=True)
class Mark:
    """A site that a selection meets; `left_out` says why no gradient will pass there, `is_also`
    names the site that stands for it.

    `like` is what passes, where that is known before a backward.
    """

    site: str
    like: Like | None = None
    left_out: str = ""
    is_also: str = ""

    @property
    def hit(self) -> bool:
        """Whether it is hooked, under this name."""
        return not self.left_out and not self.is_also


class Seen(NamedTuple):
    """What a forward without a selection has shown.

    `calls` are the names of its calls, `likes` is what its sites would pass, `edges` the outputs of
    each node that get a gradient. There may be `more` sites, that no forward of the model shows.
    """

    calls: list[str]
    likes: Mapping[str, Like | None]
    edges: Mapping[str, list[str]]
    more: bool


def marked(
    model: nn.Module,
    at: Selector,
    forward: Callable[[ExitStack], None],
    seen: Seen,
) -> list[Mark]:
    """What `at` selects in another `forward`, what is hooked first.

    Raises LookupError, with what there is, if nothing is selected.
    """
    at.find(model)
    stage, scope = _stage(at)
    recorder = _Recorder(at.keeper())
    optimizer = None
    if stage == "step":  # which never comes
        params = [*model.parameters()] or [torch.zeros(1, requires_grad=True)]
        optimizer = torch.optim.SGD(params, lr=0.0)
    with ExitStack() as stack:
        at.hook(model, optimizer, stage, scope, recorder, stack)
        recorder.running = True
        forward(stack)
    if not recorder.hits and all(kind.known_at_once for kind in at.kinds):
        recorder.hits |= dict.fromkeys(at.find(model))  # its gates are asked for in a backward
    named = params_of(model)
    likes = {name: Like.of(param) for name, param in named.items()} | dict(seen.likes)
    marks = recorder.marks(seen.edges, likes)
    if not seen.more and all(mark.left_out == NOT_MET for mark in marks):
        pattern = str(getattr(at, "pattern", "*"))
        raise LookupError(
            f"nothing that was called is selected by {at!r}. {nearest(pattern, seen.calls)}"
        )
    return marks


def _stage(at: Selector) -> tuple[Stage, Scope]:
    scope: Scope = "tensor" if any(kind.stages for kind in at.kinds) else "group"
    return at.resolve(scope), scope


class _Recorder:
    """The gates of a surgery that does nothing but note down what was asked of it."""

    needs_value = False
    stateful = ""
    unsteady = ""
    moment = None

    def __init__(self, keeps: Keeps) -> None:
        self._keeps = keeps
        self.running = False  # whether the model is
        self.hits: dict[str, Like | None] = {}
        self.left_out: dict[str, str] = {}
        self.expected: dict[str, bool] = {}  # and whether they were met
        self.aliases: dict[str, str] = {}
        self.kept: dict[tuple[str, tuple[object, ...]], None] = {}  # nodes, with the mechanism

    def marks(self, edges: Mapping[str, list[str]], likes: Mapping[str, Like | None]) -> list[Mark]:
        """What was noted down."""
        hits = dict(self.hits)
        unshaped = set[str]()
        gated: dict[str, list[str]] = {}
        for site in hits:
            gated.setdefault(site[: site.rfind("]") + 1], []).append(site)
        for node, mechanism in self.kept:
            own = gated.get(node, [])
            enters = mechanism[0] == "Nodes" and "enter" in mechanism
            if not enters:
                unshaped.update(own)  # what leaves is summed to the shape of its source afterwards
            if not own:
                # Its gates are asked for in a backward: for those outputs that get a gradient.
                outputs = edges.get(node) if enters else None
                hits |= dict.fromkeys(outputs or [f"{node}.*"])
        hits |= {site: None for site, met in self.expected.items() if met and site not in hits}
        out = dict.fromkeys(self.expected, NOT_MET) | self.left_out
        return [
            *(
                Mark(site, like or (None if site in unshaped else likes.get(site)))
                for site, like in hits.items()
            ),
            *(Mark(site, left_out=why) for site, why in out.items() if site not in hits),
            *(Mark(site, is_also=own) for site, own in self.aliases.items() if site not in hits),
        ]

    def keeps(self, place: Place) -> bool | None:
        kept = self._keeps(place)
        if kept and place.whole and place.node is not None:
            node = f"{place.name}#{place.call}/{plain(place.node)}[{place.occurrence}]"
            self.kept[node, place.mechanism] = None
        return kept

    def expect(
        self,
        site: str,
        aliases: Sequence[str] = (),
        skipped: str = "",
        foreign: Sequence[str] = (),
    ) -> None:
        if skipped:
            self.left_out.setdefault(site, skipped)
        else:
            self.expected[site] = self.running
        for alias in aliases:
            self.aliases[alias] = site
            self.forget(alias)

    def forget(self, site: str) -> None:
        self.expected.pop(site, None)
        self.left_out.pop(site, None)

    def note(self, text: str) -> None:
        """It would be said when a block ends."""

    def put(self, put: Put, stack: ExitStack) -> None:
        put(stack)

    def at_end(self, check: Callable[[], str]) -> None:
        """It would be asked when a block ends."""

    def gate(self, site: str, value: Callable[[], Tensor | None] | None = None) -> SiteHook:
        self.hits.setdefault(site)
        return _Passing(self.hits, site)

    def group(self, sites: Sequence[str], values: Sequence[Callable[[], Tensor | None]]) -> GroupFn:
        for site in sites:
            self.hits.setdefault(site)
        return lambda grads: grads


class _Passing:
    """A gate that lets pass; of what flows forward it notes the shape."""

    def __init__(self, hits: dict[str, Like | None], site: str) -> None:
        self.hits = hits
        self.site = site

    def __call__(
        self,
        grad: Tensor | None,
        value: Tensor | None = None,
        entering: tuple[Tensor | None, ...] = (),
    ) -> None:
        if grad is not None:
            self.hits[self.site] = Like.of(grad)
