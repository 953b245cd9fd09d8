"""Measure the cells of the table of contexts, and write the table and its reasons.

python -m tests.contexts.table writes them into gradsurg/sites/README.md.
"""

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path

import torch
from torch import distributed, nn

import gradsurg as gs
from gradsurg.sites.contexts import CONTEXTS, ROWS, Row, rows_of
from tests.contexts.contexts import STEPS
from tests.contexts.kinds import FACTOR, KINDS, Kind
from tests.forks import Ranks, in_ranks

README = Path(__file__).parents[2] / "gradsurg" / "sites" / "README.md"
BEGIN, END = "<!-- contexts: begin -->", "<!-- contexts: end -->"


def stated(name: str, context: str) -> str:
    """Return the outcome in the table."""
    rows = {of.context: of.outcome for of in rows_of(KINDS[name].make())}
    return rows.get(context, "acts")


def outcome(kind: Kind, context: str) -> tuple[str, str, Exception | None]:
    """Return the measured outcome, its messages, and the error that was raised.

    Besides those of the table it is `IGNORED` or `WRONG` if nothing was said of it.
    """

    @contextmanager
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **kwargs: object) -> Iterator:
        surgery = gs.Surgery(gs.Intervention(gs.Scale(FACTOR), at=kind.make()))
        with surgery.attach(model, optimizer, **kwargs) as live:
            yield live

    @contextmanager
    def nothing(*args: object, **kwargs: object) -> Iterator:
        yield

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = STEPS[context](kind, nothing)
        except RuntimeError as error:
            return "n/a", str(error), error  # PyTorch itself does not do that
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            treated = STEPS[context](kind, attach)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            return "refused", str(error), error
    text = " ".join(str(item.message) for item in caught if item.category is gs.SurgeryWarning)
    if torch.allclose(treated, FACTOR * plain, rtol=0.02):
        return "acts", text, None
    if torch.allclose(treated, plain, rtol=0.02):
        return ("reported" if text else "IGNORED"), text, None
    return ("warned" if text else "WRONG"), text, None


@cache
def column(context: str) -> dict[str, str]:
    """Return the measured outcomes in a context of two processes, by kind of site."""
    if context == "torchrun":
        launch = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command = [sys.executable, "-m", *launch, "-m", "tests.contexts.table", context]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    def work(ranks: Ranks, folder: Path) -> dict[str, str]:
        return {name: outcome(kind, context)[0] for name, kind in KINDS.items()}

    return in_ranks(2, work)


def _print_column() -> None:
    """In a process of torchrun: print the cells of DistributedDataParallel."""
    distributed.init_process_group("gloo")
    cells = {name: outcome(kind, "torchrun")[0] for name, kind in KINDS.items()}
    if not distributed.get_rank():
        print(json.dumps(cells), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def table() -> str:
    """Return the stated table in Markdown, with a row for each kind, and the reasons below it."""
    lines = [f"| site | {' | '.join(CONTEXTS)} |", f"|{'---|' * (1 + len(CONTEXTS))}"]
    for name in KINDS:
        lines.append(f"| {' | '.join([name, *(stated(name, context) for context in CONTEXTS)])} |")
    lines.append("")
    for context, meaning in CONTEXTS.items():
        lines.append(f"- **{context}**: {meaning}")
        lines += _reasons(of for of in ROWS if of.context == context)
    lines += ["", "In contexts that are not in the table:", ""]
    others = [of for of in ROWS if of.context not in CONTEXTS]
    for context in dict.fromkeys(of.context for of in others):
        lines.append(f"- **{context}**")
        lines += _reasons(of for of in others if of.context == context)
    return "\n".join(lines)


def _reasons(rows: Iterable[Row]) -> list[str]:
    """Return a line for each reason, with the kinds that have it."""
    lines = []
    for (outcome, text), same in groupby(rows, lambda of: (of.outcome, of.sentences)):
        names = [f"{of.kind} {of.stage}".rstrip().replace("*", "every kind") for of in same]
        shown = re.sub(r"'?\{(\w+)\}'?", r"*\1*", text)
        lines.append(f"  - *{outcome}*: {', '.join(names)}: {shown}")
    return lines


def main() -> None:
    if sys.argv[1:] == ["torchrun"]:
        _print_column()
        return
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
