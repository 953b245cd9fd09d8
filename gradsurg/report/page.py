"""One HTML file with all in it: words, numbers, styles and scripts; nothing is fetched."""

import json
from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime
from html import escape
from pathlib import Path
from string import Template
from types import MappingProxyType

from gradsurg.report.attribution import ABOUT_SHARES
from gradsurg.report.conflict_data import conflict_data
from gradsurg.report.conflict_text import LOSES
from gradsurg.report.page_data import page_data
from gradsurg.report.study_report import StudyReport
from gradsurg.report.update_line import ABOUT as ABOUT_UPDATES
from gradsurg.report.wording import count, unbroken

PARTS = Path(__file__).parent / "page"
EMPTY: Mapping[str, bytes] = MappingProxyType({})
SCRIPTS = (
    "draw.js",
    "outcome.js",
    "fronts.js",
    "curves.js",
    "effects.js",
    "conflicts.js",
    "runs.js",
    "start.js",
)


def page(
    report: StudyReport, refresh: float | None = None, pictures: Mapping[str, bytes] = EMPTY
) -> str:
    """The page; with `refresh` it loads itself anew every so many seconds.

    `pictures` are the PNG files that it shows, by the names that they have beside it.
    """
    data = page_data(report) | {"conflicts": conflict_data(report), "refresh": refresh}
    parts = {name: (PARTS / name).read_text() for name in ("page.css", *SCRIPTS)}
    return Template((PARTS / "page.html").read_text()).substitute(
        study=escape(report.folder.name),
        answer=escape(unbroken(report.answer)),
        cautions="".join(f"<li>{escape(text)}</li>" for text in report.cautions),
        states=_states(report),
        effort="".join(f"<li>{escape(text)}</li>" for text in report.effort),
        tests=escape(report.about_tests),
        about_shares=escape(_sentence(ABOUT_SHARES)),
        about_updates=escape(ABOUT_UPDATES),
        loses=escape(LOSES),
        no_ways="" if pictures else " hidden",
        ways="".join(_picture(name, content) for name, content in pictures.items()),
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        style=parts["page.css"],
        # "</script>" in a name must not end the script
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script="\n".join(parts[name] for name in SCRIPTS),
    )


def _picture(name: str, content: bytes) -> str:
    """One that is in the page itself; beside it lies the same to print."""
    said = escape(name)
    address = f"data:image/png;base64,{b64encode(content).decode()}"
    alone = "".join(f' <a href="{said}.{end}">{end.upper()}</a>' for end in ("png", "svg"))
    return (
        f'<figure class="picture"><img alt="{said}: ways over the contours of the losses" '
        f'src="{address}"><figcaption>{said}:{alone}</figcaption></figure>'
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _states(report: StudyReport) -> str:
    shown = [
        f'<li class="state {state}"><b>{number}</b> {state}</li>'
        for state, number in report.states.items()
    ]
    return f"<li><b>{len(report.runs)}</b> {count(len(report.runs), 'run').split()[1]}</li>" + (
        "".join(shown)
    )
