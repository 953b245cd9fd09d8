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


_SCRIPTED = "it is a ScriptModule, which runs no Python hooks"
_PLAIN = (
    "Act at Parameters or Weights, at a module that is not scripted, or call torch.jit.script "
    "after the block"
)
_RECOMPUTED = "it is recomputed by a checkpoint, which must give the same values again: {why}"
_BREAKS = (
    "each hooked module breaks the compiled graph, and a module list or nn.Sequential that holds "
    "one runs uncompiled: its hooks count calls in Python"
)

ROWS: tuple[Row, ...] = (
    *(
        Row(kind, "TorchScript", "refused", _SCRIPTED, _PLAIN, error=ValueError)
        for kind in ("Outputs", "Inputs", "Activations", "EveryModule", "ModuleGradients")
    ),
    *(
        Row(kind, "torch.compile", "acts", _BREAKS)
        for kind in ("Outputs", "Inputs", "Activations", "ModuleGradients")
    ),
    Row(
        "Outputs",
        "in-place write",
        "refused",
        "the module {fault}: the gradient of its output cannot be told from that of its input",
        "Use Outputs of the module before",
    ),
    Row(
        "Inputs",
        "in-place write",
        "refused",
        "the module {fault}: a hook would see none or a part of the gradient",
        "Use Outputs of the module before, or path='total', which allows writes to a tensor that "
        "is no view",
    ),
    *(Row(kind, "checkpoint", "refused", _RECOMPUTED) for kind in ("Activations", "EveryModule")),
    *(
        Row(
            kind,
            context,
            "refused",
            why,
            "Use Outputs (of kind full_backward_pre) or Inputs (of full_backward)",
            error=error,
        )
        for kind in ("ModuleGradients", "EveryModule")
        for context, why, error in (
            ("torch.func", "torch.func has no full backward hooks", RuntimeError),
            (
                "legacy hooks",
                "it had hooks of the deprecated register_backward_hook kind, which PyTorch does "
                "not have beside full ones",
                ValueError,
            ),
            (
                "nested tensors",
                "a full backward hook gets tensors and tuples of them, and those that need a "
                "gradient are inside {where}",
                RuntimeError,
            ),
        )
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
