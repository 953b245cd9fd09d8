"""Rows of numbers as text: one format for the library, the runner and the README."""

from collections.abc import Mapping, Sequence

COLUMNS = {
    "transform": "transform",
    "site": "site",
    "norm_before": "norm before",
    "norm_after": "norm after",
    "cosine": "cosine",
    "changed": "changed",
    "flipped": "sign flips",
    "zeroed": "zeroed",
    "nonfinite": "non-finite",
    "fired": "fired",
    "calls": "calls",
}
FRACTIONS = ("changed", "flipped", "zeroed", "fired")


def effect_table(rows: Sequence[Mapping[str, object]]) -> str:
    """The effect at each site, one row each, transform by transform; columns in which nothing
    happened are left out.
    """
    if not rows:
        return "no gradient was measured"
    order = {row.get("transform"): rank for rank, row in reversed(list(enumerate(rows)))}
    rows = [{**row, "fired": _fired(row)} for row in rows]
    rows = sorted(rows, key=lambda row: order[row.get("transform")])
    shown = [key for key in COLUMNS if _says_something(key, rows)]
    cells = [[COLUMNS[key] for key in shown]]
    cells += [[_cell(key, row.get(key)) for key in shown] for row in rows]
    return aligned(cells, left=2 if "transform" in shown else 1)


def aligned(cells: Sequence[Sequence[str]], left: int = 1) -> str:
    """Cells in columns, the first `left` of them to the left; a rule under the head."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def number(value: object) -> str:
    """Four significant digits, short: 0.01234, 1.5e-07, 12.3; '-' for None."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _fired(row: Mapping[str, object]) -> float | None:
    """The share of the gradients at a site that the trigger let the transform act on."""
    calls, seen = row.get("calls"), row.get("seen")
    return calls / seen if isinstance(calls, int) and isinstance(seen, int) and seen else None


def _says_something(key: str, rows: Sequence[Mapping[str, object]]) -> bool:
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
    if key in FRACTIONS and isinstance(value, float):
        return "<0.1%" if 0 < value < 0.0005 else f"{value:.1%}"
    if key == "cosine" and isinstance(value, float):
        return f"{value:.4f}"
    return number(value)
