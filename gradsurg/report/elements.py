"""HTML elements of the page: sections, inputs, tables, charts and their data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape

from gradsurg.report.charts import CONFIG, DARK, Grid, Panel, Spec, Table, short
from gradsurg.report.load import LoadedRun
from gradsurg.report.study import StudyReport
from gradsurg.training.run_directory import CONFIG as CONFIG_FILE
from gradsurg.training.run_reader import read_text

MAX_HOW = 200  # characters of an explanation; a longer one is folded
MAX_SHOWN = 8  # arms of a chart with all arms; others are chosen
MAX_RADIOS = 5  # metrics; more are a drop-down list
MISSING = "\u2013"
Section = tuple[str, str, str]
"""Id, title and HTML of a section."""


class PageData:
    """The data of the page's script: charts, with their views and tables written once each."""

    def __init__(self, report: StudyReport) -> None:
        self.charts: dict[str, dict[str, object]] = {}
        self.texts: dict[str, str] = {}
        self.shown: dict[str, int] = {}
        self.configs = {run.name: _config(run) for run in report.runs}
        self._views: dict[int, tuple[int, Spec]] = {}
        self._tables: dict[int, tuple[int, Table]] = {}

    def add(
        self, key: str, panel: Panel, numbers: Table | None = None, like: str = "", name: str = ""
    ) -> None:
        """Add a chart; `numbers` is its table, the first of its data unless given.

        A chart that is `like` another has the data and the texts of that one.
        """
        view = self._views.setdefault(id(panel.view), (len(self._views), panel.view))[0]
        limits = {key: _short(limit) for key, limit in panel.limits.items()}
        chart: dict[str, object] = {"view": view, "limits": limits}
        if like:
            chart["like"] = like
        else:
            table = next(iter(panel.data.values())) if numbers is None else numbers
            hidden = ("clear", "shape", "best", "control")
            names = table.labels if isinstance(table, Grid) else table
            columns = [column for column in names if column not in hidden]
            if isinstance(table, Grid):
                columns += ["step", *table.values]
            chart |= {
                "title": name or panel.title,
                "summary": panel.summary,
                "height": panel.height,
                "data": {name: self.table(data) for name, data in panel.data.items()},
                "numbers": [self.table(table), columns],
            }
        self.charts[key] = chart

    def table(self, table: Table) -> int:
        """The place of a table, which is written once however many charts show it."""
        return self._tables.setdefault(id(table), (len(self._tables), table))[0]

    def json(self) -> dict[str, object]:
        tables = [table for _, table in self._tables.values()]
        return {
            "charts": self.charts,
            "views": [view for _, view in self._views.values()],
            "tables": [asdict(one) if isinstance(one, Grid) else one for one in tables],
            "texts": self.texts,
            "shown": self.shown,
            "configs": self.configs,
            "config": CONFIG,
            "dark": DARK,
        }


def section(key: str, name: str, how: str, *parts: str) -> Section:
    about = f'<p class="how">{how}</p>' if how else ""
    if len(how) > MAX_HOW:
        about = f"<details><summary>How to read this</summary>{about}</details>"
    body = "\n".join(part for part in parts if part)
    head = f'<h2 id="h-{key}">{escape(name)}</h2>'
    text = f'<section aria-labelledby="h-{key}" id="{key}">\n{head}\n{about}\n{body}\n</section>'
    return key, name, text


def chart(key: str, with_numbers: bool = True) -> str:
    """Return a place for a chart and its table, both filled by the script.

    In `key` a name in braces stands for what is chosen in the input of that name.
    """
    key = escape(key)
    numbers = (
        f'<details class="numbers" data-of="{key}"><summary>The same as numbers</summary>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Numbers of the chart"></div>'
        "</details>"
    )
    return (
        f'<figure><figcaption></figcaption><div class="chart" role="img" aria-label="chart" '
        f'data-chart="{key}"></div>{numbers if with_numbers else ""}</figure>'
    )


def panels(charts: Iterable[str]) -> str:
    return f'<div class="panels">{"".join(charts)}</div>'


def shown_when(name: str, choice: str, *parts: str) -> str:
    """Parts that are shown while `choice` is chosen in the inputs of that name."""
    body = "\n".join(part for part in parts if part)
    return f'<div data-when="{name}" data-is="{escape(choice)}">{body}</div>'


def text_of(key: str) -> str:
    return f'<p class="how" data-text="{escape(key)}"></p>'


def data_table(key: str, caption: str, text: str = "") -> str:
    """A table that the script fills."""
    about = f"<h3>{escape(caption)}</h3>{text_of(text)}" if text else ""
    return f'<div data-table="{escape(key)}">{about}{scroll(caption, "")}</div>'


def choice(name: str, legend: str, options: Mapping[str, str]) -> str:
    """Radio buttons, or a drop-down list for many options."""
    if len(options) > MAX_RADIOS:
        return choices(select(name, legend, options, f'name="{name}" data-choice'))
    radios = [
        f'<label><input type="radio" name="{name}" value="{escape(key)}" data-choice'
        f"{'' if place else ' checked'}><span>{escape(label)}</span></label>"
        for place, (key, label) in enumerate(options.items())
    ]
    return choices(f"<fieldset><legend>{legend}</legend>{''.join(radios)}</fieldset>")


def select(key: str, label: str, options: Mapping[str, str], more: str = "") -> str:
    items = [f'<option value="{escape(k)}">{escape(text)}</option>' for k, text in options.items()]
    select = f'<select id="{key}" {more}>{"".join(items)}</select>'
    return f'<label class="line" for="{key}">{label} {select}</label>'


def checkbox(name: str, on: str, off: str, label: str) -> str:
    box = f'<input type="checkbox" id="{name}" name="{name}" value="{on}"'
    return f'<label class="line">{box} data-off="{off}" data-choice>{label}</label>'


def arms_choice(names: Sequence[str]) -> str:
    """A checkbox for each arm of the chart with all arms; of very many the first are checked."""
    boxes = [
        f'<label><input type="checkbox" value="{escape(name)}" data-arm'
        f"{' checked' if place < MAX_SHOWN or len(names) <= MAX_SHOWN + 2 else ''}>"
        f"{escape(name)}</label>"
        for place, name in enumerate(names)
    ]
    return (
        f'<details class="arms"><summary>Choose the arms that are drawn</summary>'
        f"<fieldset><legend>Arms</legend>{''.join(boxes)}</fieldset></details>"
    )


def slider(name: str, label: str, number: int) -> str:
    """A slider over places, and the name of the chosen one."""
    return (
        f'<div class="slider"><label for="{name}">{label}</label><input type="range" id="{name}" '
        f'name="{name}" min="0" max="{number - 1}" step="1" value="0" data-choice '
        f'data-names="{name}-name"><output id="{name}-name" for="{name}" '
        f'data-text="{name}|{{{name}}}"></output></div>'
    )


def choices(*inputs: str) -> str:
    return f'<div class="choices">{"".join(inputs)}</div>'


def table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str] = ()
) -> str:
    """A table with numbers to the right; a second line of a cell is an interval."""
    text = {"arm", "link", "reading", "not compared"}
    spans = {"95 % interval", "BCa bootstrap", "range"}  # to the left, in one line
    classes = [
        "said" if head in spans else "" if head in text or head in words else "num"
        for head in heads
    ]
    top = "".join(
        f'<th scope="col" class="{cls}">{escape(head)}</th>'
        for head, cls in zip(heads, classes, strict=True)
    )
    body = []
    for first, *cells in rows:
        line = [f'<th scope="row">{escape(first)}</th>']
        for cell, cls in zip(cells, classes[1:], strict=True):
            shown, _, between = (cell or MISSING).partition("\n")
            more = f'<span class="between">{escape(between)}</span>' if between else ""
            line.append(f'<td class="{cls}">{escape(shown)}{more}</td>')
        body.append(f"<tr>{''.join(line)}</tr>")
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return scroll(caption, table)


def scroll(label: str, body: str) -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{body}</div>'
    )


def sortable(number: float | None, text: str) -> str:
    """A cell with a number to sort by; a missing one sorts last."""
    sort = "" if number is None or number != number else f"{number!r}"
    return f'<td class="num" data-value="{sort}">{escape(text) if sort else MISSING}</td>'


def items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def number_text(number: float | None) -> str:
    return MISSING if number is None or number != number else f"{number:.3g}"


def shorts(numbers: Sequence[float]) -> list[float | None]:
    return [short(number, 3) for number in numbers]


def _short(limit: object) -> object:
    return short(limit, 6) if isinstance(limit, float) else limit


def _config(run: LoadedRun) -> str:
    return read_text(run.path / CONFIG_FILE) if run.config else ""
