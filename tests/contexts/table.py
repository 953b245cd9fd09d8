"""The measured table of site kinds and contexts.

python -m tests.contexts.table writes the table into gradsurg/sites/README.md.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import distributed, nn

import gradsurg as gs
from gradsurg.training.ranks import Ranks, in_ranks
from tests.contexts.contexts import CONTEXTS, PROCESS_CONTEXTS
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
    step = (CONTEXTS | PROCESS_CONTEXTS)[context]
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


TORCHRUN = "torchrun"
"""The name of the column of DistributedDataParallel in processes that torchrun starts."""

COLUMNS = (*CONTEXTS, *PROCESS_CONTEXTS, TORCHRUN)


def table() -> str:
    """Return the table with a row for each kind and a column for each context."""
    lines = [f"| site | {' | '.join(COLUMNS)} |", f"|{'---|' * (1 + len(COLUMNS))}"]
    for name in KINDS:
        cells = row(name) + [column(context)[name] for context in COLUMNS[len(CONTEXTS) :]]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def row(name: str) -> list[str]:
    """Return the cells of one kind in the contexts of one process."""
    return [outcome(KINDS[name], context)[0] for context in CONTEXTS]


@cache
def column(context: str) -> dict[str, str]:
    """Return the cells of a context of two processes, by kind of site."""
    if context == TORCHRUN:
        launch = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command = [sys.executable, "-m", *launch, "-m", "tests.contexts.table", TORCHRUN]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    def work(ranks: Ranks, folder: Path) -> dict[str, str]:
        return {name: outcome(kind, context)[0] for name, kind in KINDS.items()}

    return in_ranks(2, work)


def _print_column() -> None:
    """In a process of torchrun: print the cells of DistributedDataParallel."""
    distributed.init_process_group("gloo")
    cells = {name: outcome(kind, "DDP")[0] for name, kind in KINDS.items()}
    if not distributed.get_rank():
        print(json.dumps(cells), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    if sys.argv[1:] == [TORCHRUN]:
        _print_column()
        return
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
