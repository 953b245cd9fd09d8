"""One comparison as a table of text: for the terminal, in Markdown and in LaTeX."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from math import floor, log10
from statistics import fmean
from types import MappingProxyType

import polars as pl

from gradsurg.effects.tables import aligned
from gradsurg.plugins.messages import printable
from gradsurg.report.arms import Arm
from gradsurg.report.measures import link_shares
from gradsurg.report.study import Study
from gradsurg.report.verdict import Row, population, rows_of
from gradsurg.report.wording import amount, amounts, p_text, table_width, title, value
from gradsurg.stats import MIN_INTERVAL_SEEDS, TOO_FEW, UNCLEAR, paired_difference

Table = tuple[list[str], list[list[str]]]
"""Heads and rows."""
INTERVAL = "95 % interval"
WORDS = ("arm", "link", "metric", "block", "verdict", "margin", "not compared", "reason")
"""Heads of columns that are aligned to the left, and folded in a narrow terminal."""
SHORTER = {UNCLEAR: "unclear", TOO_FEW: "too few"}
"""Verdicts as they stand in a table."""
NARROWEST = 24  # columns of names, which are folded rather than numbers left out
COLUMNS: dict[str, Callable[[Row], str]] = {
    "arm": lambda row: row["arm"],
    "link": lambda row: row.get("link") or "",
    "metric": lambda row: title(row["metric"]) if row["metric"] else "",
    "block": lambda row: row["block"] or "",
    "difference": lambda row: amount(row["metric"], row["difference"]) if row["n"] else "",
    INTERVAL: lambda row: interval(row),
    "p": lambda row: p_text(row["p"]) if row["interval"] != "range" else "",
    "q": lambda row: p_text(row["q"]) if row["interval"] != "range" else "",
    "verdict": lambda row: SHORTER.get(row["verdict"], row["verdict"] or ""),
    "margin": lambda row: row["margin"] or "",
    "higher": lambda row: f"{row['higher']}/{row['n']}" if row["n"] else "",
    "treated": lambda row: value(row["metric"], row["treated"]) if row["n"] else "",
    "control": lambda row: value(row["metric"], row["control"]) if row["n"] else "",
    "n": lambda row: f"{row['n']} of {row['planned']}" if row["unit"] == "seed" else f"{row['n']}",
    "median": lambda row: amount(row["metric"], row["median"]) if row["n"] else "",
    "t interval": lambda row: amounts(row["metric"], row["t_low"], row["t_high"]),
    "effect size": lambda row: "" if (d := row["effect_size"]) is None else f"{d:.2g}",
    "diverged": lambda row: (
        f"{row['diverged']} and {row['diverged_control']} of {row['ended']}"
        if row["p_diverged"] is not None
        else ""
    ),
    "not compared": lambda row: row["not_compared"] or "",
}
"""The cells of a comparison by the heads of their columns."""
DETAILS = {"link", "metric", "n", "median", "t interval", "effect size", "diverged"}
SHORT = tuple(head for head in COLUMNS if head not in DETAILS)
"""Columns in the terminal, which has a table for each metric."""
SPARED = ({"not compared"}, {"higher"}, {"treated", "control"}, {"verdict"}, {"p", "q"})
"""Columns that are left out of a narrow terminal, in this order."""
STEP_TIME = "step time"
ABOUT_SHARES = "the chain minus the chain without it"
SHARED = {"treated": "with it", "control": "without it", "difference": "share"}
"""Heads of the columns of a table of links' shares."""


def interval(row: Row) -> str:
    """The interval of a difference as text; a range is called so."""
    span = amounts(row["metric"], row["low"], row["high"]) if row["n"] > 1 else ""
    return f"{span} (range)" if span and row["interval"] == "range" else span


def outcome_table(
    rows: Sequence[Row],
    called: Mapping[str, str] = MappingProxyType({}),
    columns: Collection[str] = tuple(COLUMNS),
) -> Table:
    """Heads and rows of a table of comparisons; columns that are empty in all rows are left out."""
    if all(row["interval"] == "range" for row in rows if row["n"]):
        called = {**called, INTERVAL: "range"}
    cells = {called.get(head, head): [COLUMNS[head](row) for row in rows] for head in columns}
    if "range" in cells:
        cells["range"] = [cell.removesuffix(" (range)") for cell in cells["range"]]
    shown = {head: texts for head, texts in cells.items() if any(texts)}
    return [*shown], [list(cells) for cells in zip(*shown.values(), strict=True)]


def fitted(table: Table, spared: Sequence[Collection[str]] = SPARED) -> str:
    """Return a table for the terminal; columns are left out, and names folded, until it fits.

    Empty without rows.
    """
    heads, rows = table
    if not rows:
        return ""
    columns = {head: cells for head, *cells in zip(heads, *rows, strict=True)}
    widths = {head: max(map(len, [head, *cells])) for head, cells in columns.items()}
    words = {head for head in heads if head in WORDS or head == heads[0]}
    widths |= {head: min(widths[head], NARROWEST) for head in words}
    for more in spared:
        if sum(widths[head] + 2 for head in columns) - 2 > table_width():
            columns = {head: cells for head, cells in columns.items() if head not in more}
    lines = [[*columns], *zip(*columns.values(), strict=True)]
    left = [place for place, head in enumerate(columns) if head in words]
    return aligned([[*map(printable, line)] for line in lines], left, table_width())


def uncompared(study: Study, frame: pl.DataFrame) -> list[Arm]:
    """Arms with finished runs and no difference; a control only if nothing is compared at all."""
    compared = set(frame.filter(pl.col("difference").is_not_null())["arm"])
    return [
        arm
        for arm in study.arms
        if arm.whole and arm.name not in compared and not (arm.is_control and compared)
    ]


def alone_table(study: Study, arms: Sequence[Arm], most: int | None = None) -> Table:
    """A row for each arm and metric (the first `most`): mean, least and greatest of its runs."""
    rows = []
    for arm in arms:
        for key, name in list(study.metrics_of.items())[:most]:
            values = [x for run in arm.whole if (x := study.outcome(run, key)) is not None]
            if values:
                texts = [value(key, x) for x in (fmean(values), min(values), max(values))]
                rows.append([arm.name, name, str(len(values)), *texts])
    return ["arm", "metric", "n", "mean", "least", "greatest"], rows


def shares_text(shares: pl.DataFrame) -> list[str]:
    """Return a table of each link's share in the first metric, for each chain."""
    texts, columns = [], ("link", *SHORT[1:], "n")
    for (name,), part in shares.group_by("arm", maintain_order=True):
        rows = rows_of(part, part["metric"][0])
        table = outcome_table(rows, SHARED, columns)
        caption = f"{name}. Each link's share in {title(rows[0]['metric'])}, {ABOUT_SHARES}:"
        spared = ({"with it", "without it"}, {"higher"})
        texts.append(f"{printable(caption)}\n\n{fitted(table, spared)}")
    return texts


def cost_table(costs: Sequence[Row]) -> Table:
    """Heads and rows of a table of step times, from the rows of `measures.costs`."""
    heads = ["arm", STEP_TIME, "range", "with it, ms", "control, ms", "pairs", "measured step, ms"]
    # if each step is measured, both are the same
    beside = any(cost["measured_ms"] not in (None, cost["treated_ms"]) for cost in costs)
    rows = []
    for cost in costs:
        times = [cost[f"{side}_ms"] for side in ("treated", "control", "measured")]
        places = max(0, 1 - floor(log10(min(filter(None, times)))))
        texts = ["" if time is None else f"{time:.{places}f}" for time in times]
        change, low, high = (f"{100 * (cost[key] - 1):+.0f}" for key in ("ratio", "low", "high"))
        span = f"{low} to {high} %" * (cost["pairs"] > 1)
        row = [cost["arm"], f"{change} %", span, *texts[:2], str(cost["pairs"]), texts[2]]
        rows.append(row if beside else row[:-1])
    return heads if beside else heads[:-1], rows


def markdown(study: Study, frame: pl.DataFrame, told: Sequence[str]) -> str:
    """Return the outcomes as text for an issue or a README: what is `told`, then tables.

    Names and reasons cannot be markup.
    """
    tables = {
        "": outcome_table(frame.to_dicts()),
        f"Each link's share, {ABOUT_SHARES}.": outcome_table(link_shares(study).to_dicts(), SHARED),
        "Arms that are not compared.": alone_table(study, uncompared(study, frame)),
    }
    parts = [_plain(text) for text in (f"# {study.folder.name}", *told)]
    for caption, (heads, rows) in tables.items():
        cells = [heads, [":--", *["--:"] * (len(heads) - 1)], *rows] if rows else []
        lines = ["| " + " | ".join(map(_plain, row)) + " |" for row in cells]
        parts += [text for text in (_plain(caption), "\n".join(lines)) if text and rows]
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    """Escape the characters of links, HTML, code, emphasis and cells of Markdown."""
    text = re.sub(r"[\\`*\[\]<>|]", r"\\\g<0>", printable(text).replace("&", "&amp;"))
    return text.replace("://", ":\\//").replace("www.", "www\\.")


TEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "·": r"$\cdot$",
        "-": "{-}",
    }
)
PAPER = ("arm", "n", "treated", "control", "difference", INTERVAL, "p", "q")


def latex(
    study: Study,
    frame: pl.DataFrame,
    metric: str = "",
    spread: str = "interval",
    notes: Sequence[str] = (),
) -> str:
    """Return a table of one metric for a paper, a row for each arm; it needs the package booktabs.

    The first metric of the study by default; the label of the table of another one ends with its
    name. `spread` is beside the mean of each arm: its 95 % t `interval`, or `sd`, the standard
    deviation over seeds. `notes` stand before the table as comments.
    """
    first = next(iter(study.metrics_of), "")
    key = metric or first
    compared = rows_of(frame, key)
    heads, rows = outcome_table(compared, columns=PAPER)
    around = "95 % t interval" if spread == "interval" else "standard deviation over seeds"
    about = (
        f"{title(key)}: means of both arms with the {around}, their difference paired by seed, "
        "the 95 % interval that inverts the sign-flip test (below 6 seeds the range), and its "
        "two-sided p"
    )
    places = dict.fromkeys(filter(None, map(population, compared)))
    about = "; ".join([about, *places])
    about += "; q is p corrected for the number of arms" if "q" in heads else ""
    label = re.sub("[^0-9A-Za-z]", "-", study.folder.name + f"-{key}" * (key != first))
    table = [[_cell(cell) for cell in row] for row in [heads, *rows]]
    for side in {"treated", "control"} & {*heads}:
        for row, cells in zip(compared, table[1:], strict=True):
            cells[heads.index(side)] += _around(study, row, side, spread)
    lines = [" & ".join(cells) + r" \\" for cells in table]
    return "\n".join(
        [
            *(f"% {printable(text)}" for text in notes),
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering\small\setlength{\tabcolsep}{4pt}",
            rf"\caption{{{_cell(study.folder.name)}. {_cell(about)}.}}",
            rf"\label{{tab:{label}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _around(study: Study, row: Row, side: str, spread: str) -> str:
    """The spread of the compared runs of an arm, or of their means over blocks; '' for too few."""
    key, values = row["metric"], {}
    arm = next(arm for arm in study.arms if arm.name == row["arm"])
    for run in arm.whole:
        control = study.by_name.get(run.control or "")
        one = study.outcome(run if side == "treated" or not control else control, key)
        if control and control.state == "finished" and one is not None:
            place = run.seed if row["unit"] == "seed" else study.block_of[run.name]
            values.setdefault(place, []).append(one)
    if row["n"] < 2 or (row["n"] < MIN_INTERVAL_SEEDS and spread == "interval"):
        return ""
    means = [fmean(some) for some in values.values()]
    found = paired_difference(means, [0.0] * len(means))
    sd, low, high = (_cell(value(key, one)) for one in (found.sd, found.t_low, found.t_high))
    return rf" $\pm$ {sd}" if spread == "sd" else f" ({low} to {high})"


def _cell(text: str) -> str:
    """A text in LaTeX; a number is in math mode, where a hyphen is a minus and e-05 a power."""
    number = r"[+-]?\d[\d.,]*(?:e[+-]?\d+)?"
    if not re.fullmatch(rf"{number}%?(?: to {number})?(?: pp)?(?: \(range\))?|< {number}", text):
        return printable(text).translate(TEX)
    text = re.sub(r"e([+-]?\d+)", lambda power: rf" \cdot 10^{{{int(power[1])}}}", text)
    text = re.sub(r" (to |pp|\(range\))", r"\\mbox{ \1}", text)
    return f"${text}$".replace("%", r"\%")
