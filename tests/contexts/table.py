"""The measured table of site kinds and contexts.

python -m tests.contexts.table writes the table into gradsurg/sites/README.md.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import gradsurg as gs
from tests.contexts.contexts import CONTEXTS
from tests.contexts.kinds import FACTOR, KINDS, Kind

README = Path(__file__).parents[2] / "gradsurg" / "sites" / "README.md"
BEGIN, END = "<!-- contexts: begin -->", "<!-- contexts: end -->"


def outcome(kind: Kind, context: str) -> tuple[str, str]:
    """Return `acts`, `refused`, `reported`, `warned`, `n/a` or an error, with the messages."""

    @contextmanager
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **kwargs: object) -> Iterator:
        surgery = gs.Surgery(gs.Intervention(gs.Scale(FACTOR), at=kind.make()))
        with surgery.attach(model, optimizer, **kwargs) as live:
            yield live

    @contextmanager
    def nothing(*args: object, **kwargs: object) -> Iterator:
        yield

    torch._dynamo.reset()
    step = CONTEXTS[context]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = step(kind, nothing)
        except RuntimeError as error:
            return "n/a", " ".join(str(error).split())  # PyTorch itself does not do that
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            treated = step(kind, attach)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            return "refused", " ".join(str(error).split())
    text = " ".join(str(item.message) for item in caught if item.category is gs.SurgeryWarning)
    if torch.allclose(treated, FACTOR * plain, rtol=0.02):
        return "acts", text
    if torch.allclose(treated, plain, rtol=0.02):
        return ("reported", text) if text else ("IGNORED", "nothing was said")
    return ("warned" if text else "WRONG"), f"{(treated.norm() / plain.norm()).item():.3g}: {text}"


def table() -> str:
    """Return the table with a row for each kind and a column for each context."""
    head = ["site", *CONTEXTS]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *map(row, KINDS)]
    return "\n".join(lines)


def row(name: str) -> str:
    """Return the row of one kind."""
    cells = [outcome(KINDS[name], context)[0] for context in CONTEXTS]
    return f"| {' | '.join([name, *cells])} |"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
