"""Which properties a transform obeys, and whether it keeps the rules that each must keep."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import get_args

from torch import Tensor

from gradsurg.testing.transform_properties import LAWS, Assertion, draws
from gradsurg.testing.transform_rules import RULES, SHAPES, Subject
from gradsurg.testing.verdicts import Table, demanded, judged
from gradsurg.transforms.base import Transform, TransformProperty, as_transform


def check_transform(
    transform: Transform | Callable[[Tensor], Tensor],
    *,
    declared: Collection[TransformProperty] | None = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    drops_nan: bool = False,
    count: int = 25,
) -> Table:
    """Which properties hold on `count` random gradients, and whether it keeps the rules: finite, pure,
    repeatable, nothing that waits for the device, shape and dtype kept.

    A plain function of one gradient will do. `declared` takes the place of what a transform says of
    itself; `shapes` are those that it takes; `drops_nan` if it is meant to. Raises AssertionError,
    one line a fault, if a declared law does not hold or a rule is broken, TypeError for what is no
    transform, ValueError for an unknown law.
    """
    known = get_args(TransformProperty)
    unknown = sorted(set(declared or ()) - set(known))
    if unknown:
        raise ValueError(f"declared: must be of {', '.join(known)}, found {', '.join(unknown)}")
    made = as_transform(transform)
    if not isinstance(made, Transform):
        raise TypeError(f"check_transform takes a transform or a function, found {transform!r}")
    promised = made.properties if declared is None else frozenset(declared)
    subject = Subject(made, promised, tuple(shapes), drops_nan)
    rules = tuple(judged(name, True, partial(rule, subject)) for name, rule in RULES.items())
    verdicts = []
    for law in known:
        # Each of these draws hundreds of times.
        few = law == "unbiased" and law in promised
        check = partial(_everywhere, LAWS[law], subject, max(1, count // 12) if few else count)
        verdicts.append(judged(law, law in promised, check))
    return demanded(Table(repr(made), tuple(verdicts), rules))


def _everywhere(law: Assertion, subject: Subject, count: int) -> None:
    for draw in draws(subject.shapes, count):
        law(subject.transform, draw)
