"""Text tables of numbers, for the library, the terminal and the README: the only renderer."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from io import StringIO

from gradsurg.effects.numbers import EFFECT_NAMES, EFFECT_NUMBERS
from gradsurg.effects.summary import (
    COMPARED,
    COUNTS,
    by_transform,
    extremes,
    first_nonfinite,
    over_sites,
    worst,
)
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
    counts, and its sites with the lowest cosine and the norm ratio farthest from 1. Lines below
    name the largest and the smallest gradients, and `rest` says where the hidden rows are. A line
    names the first site with a gradient that is not finite, if there is one. Columns in which no
    row differs from an unchanged gradient are left out. Names are folded if the table would have
    more than `width` columns.
    """
    if not rows:
        return "no gradient was measured"
    cells, lines = _table(rows, most, rest)
    table = aligned(cells, 2 if cells[0][0] == "transform" else 1, width)
    return "\n".join([table, *(folded(line, width) for line in lines)])


def effect_html(rows: Sequence[Mapping[str, object]], rest: str, notes: Sequence[str]) -> str:
    """Return the table of effects with the lines and notes below it as HTML."""
    if not rows:
        return "<p>no gradient was measured</p>"
    (head, *body), lines = _table(rows, MAX_ROWS, rest)
    cells = [("th", head), *(("td", row) for row in body)]
    text = [
        f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>"
        for tag, row in cells
    ]
    below = [f"<p>{escape(line)}</p>" for line in (*lines, *notes)]
    return "\n".join(["<table>", *text, "</table>", *below])


def _table(
    rows: Sequence[Mapping[str, object]], most: int, rest: str
) -> tuple[list[list[str]], list[str]]:
    """Return the cells of a table of effects, first its head, and the lines below it."""
    parts = by_transform(rows)
    few = {name: _few(own) if len(own) > most else [] for name, own in parts.items()}
    lines = [
        f"{name}: {line}" if len(parts) > 1 else line
        for name, own in parts.items()
        for line in _extreme_lines(own, bool(few[name]))
    ]
    if hidden := sum(len(parts[name]) - len(shown) + 1 for name, shown in few.items() if shown):
        lines.append(f"{hidden} more rows: {rest}")  # `rest` says where to find them
    rows = [
        {**row, "fired": _fired(row)} for name, own in parts.items() for row in few[name] or own
    ]
    shown = [key for key in _COLUMNS if _is_shown(key, rows)]
    head = [_COLUMNS[key] for key in shown]
    return [head, *([_cell(key, row.get(key)) for key in shown] for row in rows)], lines


def _extreme_lines(rows: Sequence[Mapping[str, object]], is_summary: bool) -> Iterator[str]:
    """Yield the extremes of a transform; extreme norms only if its sites are not shown."""
    if is_summary:
        for name, found in extremes(rows).items():
            sites = (f"{site} {number(norm)}{_at(step)}" for site, norm, step in found)
            yield f"{name}: {', '.join(sites)}"
    if (first := first_nonfinite(rows)) is not None:
        yield f"first NaN or infinity: {first['site']}{_at(first['nonfinite_step'])}"


def _at(step: object) -> str:
    return "" if step is None else f" (step {step})"


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
            return any(values)  # a column of zeros, or of nothing, tells nothing


def _cell(key: str, value: object) -> str:
    match _UNITS.get(key), value:
        case "fraction", float():
            return "<0.1%" if 0 < value < 0.0005 else f"{value:.1%}"
        case "cosine", float():
            return f"{value:.4f}"
        case _:
            return number(value)
