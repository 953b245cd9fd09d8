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
    # Nodes, Uses, SavedTensors, Captured
    *(
        Row(
            kind=kind,
            context="torch.export",
            outcome="refused",
            why="an exported model is one graph of operations, which calls none of its modules",
            instead=f"{instead}, or attach to the model before torch.export",
            error=LookupError,
        )
        for kind, instead in (
            ("Nodes", "Leave out module="),
            ("Uses", "Select parameters"),
            ("SavedTensors", "Select 'root' or 'block'"),
            ("Captured", "Select parameters"),
        )
    ),
    Row(
        kind="SavedTensors",
        context="stateful transform",
        outcome="refused",
        why="it is many tensors, and {what} remembers one thing for each site",
        instead="Choose modules or nodes",
        error=ValueError,
    ),
    Row(
        kind="SavedTensors",
        context="other saved-tensor hooks",
        outcome="refused",
        why="there are hooks already, as those of a checkpoint, and a node takes one pair alone",
        instead="Choose the module without node=",
    ),
    Row(
        kind="SavedTensors",
        context="double backward",
        outcome="refused",
        why="it is read back under create_graph, and PyTorch cannot differentiate what is done to "
        "a saved tensor",
        instead="Use Activations, or no create_graph",
    ),
    Row(
        kind="Captured",
        context="is_grads_batched",
        outcome="refused",
        why="it gets many gradients at once by is_grads_batched=True, and a transform takes one",
        instead="Call torch.autograd.grad for each of them",
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
