"""Text tables of numbers, for the library, the terminal and the README: the only renderer."""

from collections.abc import Collection, Mapping, Sequence
from io import StringIO

from gradsurg.effects.numbers import EFFECT_NAMES, EFFECT_NUMBERS
from gradsurg.effects.summary import COMPARED, COUNTS, by_transform, over_sites, worst
from gradsurg.plugins.messages import folded

MAX_ROWS = 20  # of a transform; of more sites a few are shown

_UNITS = {number.name: number.unit for number in EFFECT_NUMBERS} | {"fired": "fraction"}
_COLUMNS = {
    "transform": "transform",
    "site": "site",
    **{number.name: number.label for number in EFFECT_NUMBERS if number.name != "distance"},
    "fired": "fired",
    "calls": "calls",
    "bytes": "bytes",
}

# The lines of a `rich.box.Box`: a rule of dashes under the head, and no other lines.
_BOX = "\n".join(["    ", "    ", " -- ", *["    "] * 5]) + "\n"
_WIDTH = 1 << 16  # wider than any table: rich never cuts or wraps a cell


def effect_table(
    rows: Sequence[Mapping[str, object]],
    width: int = _WIDTH,
    most: int = MAX_ROWS,
    rest: str = "in effects.jsonl",
) -> str:
    """Format effects, one row a site, transform by transform.

    A transform with more than `most` sites has one row over all of them, with means and total
    counts, and its sites with the lowest cosine and the norm ratio farthest from 1; a last line
    says that the others are `rest`. Columns in which no row differs from an unchanged gradient are
    left out. Names are folded if the table would have more than `width` columns.
    """
    if not rows:
        return "no gradient was measured"
    parts = [(own, _few(own) if len(own) > most else []) for own in by_transform(rows).values()]
    hidden = sum(len(own) - len(few) + 1 for own, few in parts if few)
    rows = [{**row, "fired": _fired(row)} for own, few in parts for row in few or own]
    shown = [key for key in _COLUMNS if _is_shown(key, rows)]
    cells = [[_COLUMNS[key] for key in shown]]
    cells += [[_cell(key, row.get(key)) for key in shown] for row in rows]
    table = aligned(cells, 2 if "transform" in shown else 1, width)
    return f"{table}\n{folded(f'{hidden} other sites: {rest}', width)}" if hidden else table


def aligned(
    cells: Sequence[Sequence[str]], left: int | Collection[int] = 1, width: int = _WIDTH
) -> str:
    """Format rows of cells as a table, with a rule under the first row.

    `left` is the number of columns aligned to the left, or their indices; others align right.
    The cells of the former are folded if the table would have more than `width` columns.
    """
    # Imported here: few who import gradsurg print a table.
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lefts = range(left) if isinstance(left, int) else left
    table = Table(box=Box(_BOX, ascii=True), padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    head, *body = cells
    for index, name in enumerate(head):
        justify = "left" if index in lefts else "right"
        table.add_column(Text(name), justify=justify, no_wrap=index not in lefts, overflow="fold")
    for row in body:
        table.add_row(*map(Text, row))
    text = StringIO()
    # In Jupyter a console would display the table, and write nothing.
    console = Console(
        file=text, width=width, color_system=None, legacy_windows=False, force_jupyter=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def number(value: object) -> str:
    """Format a number with four significant digits: 0.01234, 1.5e-07, 12.3; '-' for None."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _few(rows: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return a row over the many sites of a transform, and the rows that stand out."""
    whole = {**rows[0], **over_sites(rows, (*EFFECT_NAMES, *COUNTS))}
    changed = [row for name in COMPARED for row in worst(rows, name) if row.get("changed")]
    chosen = {str(row["site"]): row for row in changed}
    return [{**whole, "site": f"all {len(rows)} sites"}, *chosen.values()]


def _fired(row: Mapping[str, object]) -> float | None:
    """The fraction of the gradients at a site for which the trigger fired."""
    calls, seen = row.get("calls"), row.get("seen")
    return calls / seen if isinstance(calls, int) and isinstance(seen, int) and seen else None


def _is_shown(key: str, rows: Sequence[Mapping[str, object]]) -> bool:
    values = [row.get(key) for row in rows]
    match key:
        case "site" | "norm_before" | "calls":
            return True
        case "transform":
            return len(set(values)) > 1
        case "norm_after":
            return any(value is not None for value in values)
        case "cosine":
            return any(row.get("changed") for row in rows)
        case "fired":
            return any(value not in (None, 1.0) for value in values)
        case _:
            return any(values)


def _cell(key: str, value: object) -> str:
    match _UNITS.get(key), value:
        case "fraction", float():
            return "<0.1%" if 0 < value < 0.0005 else f"{value:.1%}"
        case "cosine", float():
            return f"{value:.4f}"
        case _:
            return number(value)
