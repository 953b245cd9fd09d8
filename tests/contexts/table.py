"""Write the table of contexts and its reasons: python -m tests.contexts.table

Into gradsurg/sites/README.md, from the cells of gradsurg/core/pitfalls.
"""

import re
from collections.abc import Iterable
from itertools import groupby

from gradsurg.core import pitfalls
from gradsurg.core.pitfalls import CELLS, CONTEXTS, Cell, cells_of
from tests.contexts.kinds import BEGIN, END, README, kind_of

OTHERS = (
    "These are the messages in contexts that are not in the table. A word in italics stands for "
    "something that the message names. A message begins with the kind of site, and often the site."
)

MEANINGS = {
    "accumulation, not linear": "Several backward passes in a step, with a nonlinear transform.",
    "vmap": "A transform with a state, inside `vmap` or with `is_grads_batched`.",
    "checkpoint, not repeatable": "The transform may return another value when it is called again.",
    "foreign communication hook": "The model has a `register_comm_hook` of yours.",
    "different averages": "Several `Buckets` of one model, with different `reduce`.",
    "attached in a backward pass": "`attach` or `live.add` is called inside a backward pass.",
    "DDP, not linear": "Two or more processes, and a nonlinear transform before the average.",
    "FSDP2, resumed": "The state of a surgery is loaded in another number of processes.",
    "legacy hooks": "The module has a `register_backward_hook`.",
    "edges of a node": "`Nodes(edge=..)` names an input of the operation that has no gradient.",
}
"""The contexts of the second list whose messages do not say it."""


def stated(name: str, context: str) -> str:
    """Return the outcome in the cells."""
    rows = {of.context: of.outcome for of in cells_of(kind_of(name).make())}
    return rows.get(context, "acts")


def table() -> str:
    """Return the stated table in Markdown, with a row for each kind, and the reasons below it."""
    lines = [f"| site | {' | '.join(CONTEXTS)} |", f"|{'---|' * (1 + len(CONTEXTS))}"]
    for name in (kind.replace(".", " ") for kind in pitfalls.KINDS):
        lines.append(f"| {' | '.join([name, *(stated(name, context) for context in CONTEXTS)])} |")
    lines.append("")
    for context, meaning in CONTEXTS.items():
        lines.append(f"- **{context}**: {meaning}")
        lines += _reasons(of for of in CELLS if of.context == context)
    lines += ["", OTHERS, ""]
    others = [of for of in CELLS if of.context not in CONTEXTS]
    for context in dict.fromkeys(of.context for of in others):
        meaning = MEANINGS.get(context)
        lines.append(f"- **{context}**: {meaning}" if meaning else f"- **{context}**")
        lines += _reasons(of for of in others if of.context == context)
    return "\n".join(lines)


def _reasons(rows: Iterable[Cell]) -> list[str]:
    """Return a line for each reason, with the kinds that have it."""
    lines = []
    for (outcome, text), same in groupby(rows, lambda of: (of.outcome, of.text)):
        kinds = [of.kinds for of in same if of.kinds != "MatchedUpdates"]  # it is internal
        names = [kind.replace(".", " ").replace("*", "every kind") for kind in kinds]
        shown = re.sub(r"(?<=\w)\{\w+\}", "", text)  # the end of a word, often empty
        shown = re.sub(r"'?\{(\w+)\}'?", r"*\1*", shown)
        lines.append(f"  - *{outcome}*: {', '.join(names)}: {shown}")
    return lines


def main() -> None:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
