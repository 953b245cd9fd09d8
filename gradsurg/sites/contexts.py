"""The table of contexts: what each kind of site does under compile, checkpoints, DDP and others."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["acts", "warned", "reported", "refused", "n/a"]


@dataclass(frozen=True)
class Row:
    """What one kind of site does in one context, if it is not simply `acts`.

    `stage` is empty where it holds at all stages of the kind. `why` completes "<kind>: <why>",
    `instead` is the way out, a sentence without its period. `error` is the class that is raised.
    """

    kind: str
    context: str
    outcome: Outcome
    why: str
    instead: str = ""
    stage: str = ""
    error: type[Exception] = RuntimeError


ROWS: tuple[Row, ...] = (
    # Parameters
    Row(
        *("Parameters", "LBFGS", "refused"),
        why="LBFGS also steps without gradients, so that no step of it can be skipped",
        instead="Choose another optimizer",
        error=ValueError,
    ),
    Row(
        *("Parameters", "FSDP2, meshes", "refused"),
        why="sharded over a mesh of {ndim} dimensions, needs one dimension",
        error=TypeError,
    ),
    Row(
        *("Parameters", "FSDP2, resumed", "refused"),
        why="the surgery has the state of {made} processes, each with its part of the parameters; "
        "found {found} processes",
        error=ValueError,
    ),
    Row(
        *("Parameters", "FSDP2, accumulated", "refused"),
        why="the parameters are sharded, and {reason}",
        instead="Use stage='step'",
        error=ValueError,
    ),
    # Buckets
    Row(
        *("Buckets", "attached in a backward pass", "refused"),
        why="cannot be attached inside a backward pass, as DistributedDataParallel would average "
        "some gradients wrongly",
    ),
    Row(
        *("Buckets", "foreign communication hook", "refused"),
        why="the model has the communication hook {hook} already, and can have only one",
        instead="Use Buckets(reduce=...) in its place",
    ),
    Row(
        *("Buckets", "different averages", "refused"),
        why="all of a model need the same reduce and power_rank, found {found} and {own}",
        error=ValueError,
    ),
    # Updates, MatchedUpdates, Weights
    *(
        Row(
            *(kind, "LBFGS", "refused"),
            why="cannot act on LBFGS, which computes curvature from its own updates",
            instead="Choose another optimizer",
            error=ValueError,
        )
        for kind in ("Updates", "MatchedUpdates")
    ),
    *(
        Row(
            *(kind, "several optimizers", "refused"),
            why="the transform needs a whole group at once, and two optimizers share it",
            instead="Select the parameters of each in an intervention of its own",
            error=ValueError,
        )
        for kind in ("Updates", "MatchedUpdates", "Weights")
    ),
)


def row(selector: object, context: str) -> Row:
    """Return the row of a selector in a context. Raises KeyError if it has none."""
    kind, stage = type(selector).__name__, getattr(selector, "stage", None) or ""
    for one in ROWS:
        if (one.kind, one.context) == (kind, context) and one.stage in ("", stage):
            return one
    raise KeyError(f"{kind} in {context}")


def refusal(selector: object, context: str, site: str = "", **found: object) -> Exception:
    """Return the error of a kind that is refused in a context, with the site and the way out.

    `found` fills the names in braces of the row's sentences.
    """
    one = row(selector, context)
    where = f"site '{site}': " if site else ""
    way_out = f". {one.instead.format(**found)}." if one.instead else ""
    return one.error(f"{one.kind}: {where}{one.why.format(**found)}{way_out}")
