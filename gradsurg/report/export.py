"""The files of a report: page, figures, Parquet and the tables for a paper."""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import polars as pl

from gradsurg.loggers.base import StudyInfo
from gradsurg.plugins.messages import printable
from gradsurg.report.answer import SHARED, alone_rows, outcome_table
from gradsurg.report.compare import ABOUT_SHARES
from gradsurg.report.html import page
from gradsurg.report.paper import latex
from gradsurg.report.study import StudyReport
from gradsurg.report.tables import runs_table, with_arms

PAGE = "index.html"
WRITTEN = ".written.json"  # the names of the files of the report that lies there


def write_report(
    report: StudyReport, out: Path, refresh: float | None = None, figures: bool = True
) -> Path:
    """Write all files of a report atomically, each by a rename; return the page's path.

    What an earlier report has written and this one does not is removed; other files stay. Raises
    OSError, with the folder's name, if it cannot be written.
    """
    if out.is_symlink() and out.parent.resolve() == report.folder.resolve():
        raise OSError(f"{out} is a link; name its target with --out to write there")
    out.mkdir(parents=True, exist_ok=True)
    # on the same disk, as files are renamed into place
    with TemporaryDirectory(prefix=".draft-", dir=out) as folder:
        draft = Path(folder)
        _write_parquet(runs_table(report.arms), draft / "runs.parquet")
        _write_parquet(with_arms(report.arms, report.effects), draft / "effects.parquet")
        if len(report.conflict_rows):
            _write_parquet(
                with_arms(report.arms, report.conflict_rows), draft / "conflicts.parquet"
            )
        (draft / "outcome.md").write_text(markdown(report), encoding="utf-8")
        (draft / "outcome.tex").write_text(latex(report), encoding="utf-8")
        with _drawn(report, draft) if figures else nullcontext():
            pictures = _write_trajectories(report, draft) if figures else {}
            (draft / PAGE).write_text(page(report, refresh, pictures), encoding="utf-8")
        names = sorted(path.name for path in draft.iterdir())
        old = written(out) - {*names}
        # noted before it is there: a kill in between leaves no file that nobody knows
        (draft / WRITTEN).write_text(json.dumps(sorted({*names, *old})), encoding="utf-8")
        os.replace(draft / WRITTEN, out / WRITTEN)
        for name in old:
            (out / name).unlink(missing_ok=True)
        # the page last: who sees a new one finds the other files as new
        for name in sorted(names, key=PAGE.__eq__):
            os.replace(draft / name, out / name)
    return out / PAGE


def _write_parquet(table: pl.DataFrame, file: Path) -> None:
    """Write a table; polars itself raises no OSError on a full disk."""
    content = BytesIO()
    table.write_parquet(content)
    file.write_bytes(content.getbuffer())


@contextmanager
def _drawn(report: StudyReport, folder: Path) -> Iterator[None]:
    """Write the figures in a thread during the block: the converter needs no Python."""
    from gradsurg.report.figures import figures, write_figure

    with ThreadPoolExecutor(1) as thread:
        pending = [thread.submit(write_figure, figure, folder) for figure in figures(report)]
        yield
        for written in pending:
            written.result()


def _write_trajectories(report: StudyReport, folder: Path) -> dict[str, bytes]:
    """Write the figures that need matplotlib, which is optional; return their PNG by name."""
    if not report.landscapes or find_spec("matplotlib") is None:
        return {}
    from gradsurg.report.pictures import write_trajectories

    return {path.stem: path.read_bytes() for path in write_trajectories(report, folder)}


def written(out: Path) -> set[str]:
    """Return the names of the files that earlier reports wrote to `out`."""
    file = out / WRITTEN
    if out.is_symlink() or file.is_symlink():
        return set()
    try:
        names = [str(name) for name in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError):  # there is none
        return set()
    # whatever the file says, nothing outside of the folder is touched
    return {name for name in names if name not in ("", "..") and name == Path(name).name}


def figures_in(out: Path) -> list[Path]:
    """The figures of the report that lies there, as PNG."""
    paths = [out / name for name in sorted(written(out)) if name.endswith(".png")]
    return [path for path in paths if not path.is_symlink()]


def study_info(report: StudyReport, out: Path) -> StudyInfo:
    """Return the study as loggers receive it: a row for each outcome, and the figures in `out`."""
    rows = [
        {
            "arm": outcome.arm.name,
            "metric": outcome.metric,
            "seeds": difference.n if (difference := outcome.difference) else 0,
            "of": outcome.planned,
            "treated": fmean(outcome.treated) if difference else None,
            "control": fmean(outcome.control) if difference else None,
            "higher": difference.higher if difference else None,
            "lower": difference.lower if difference else None,
            "median": difference.median if difference else None,
            "difference": difference.mean if difference else None,
            "low": difference.low if difference else None,
            "high": difference.high if difference else None,
            "p": outcome.p_value,
            "q": outcome.q_value,
            "verdict": outcome.reading,
            "not compared": ", ".join(f"{n} {state}" for state, n in outcome.states.items()),
        }
        for outcome in report.outcomes
    ]
    figures = [(path.stem, path) for path in figures_in(out) if path.is_file()]
    return StudyInfo(report.folder.name, out, rows, figures)


def markdown(report: StudyReport) -> str:
    """The outcomes as a table for an issue or a README; names and reasons cannot be markup."""
    parts = [_plain_markdown(text) for text in (f"# {report.folder.name}", *_notes(report))]
    for caption, heads, rows in _tables(report):
        cells = [heads, [":--", *["--:"] * (len(heads) - 1)], *rows]
        lines = ["| " + " | ".join(map(_plain_markdown, row)) + " |" for row in cells]
        parts += [*([_plain_markdown(caption)] if caption else []), "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _plain_markdown(text: str) -> str:
    """Escape the characters of links, HTML, code, emphasis and table cells."""
    text = re.sub(r"[\\`*\[\]<>|]", r"\\\g<0>", printable(text).replace("&", "&amp;"))
    return text.replace("://", ":\\//").replace("www.", "www\\.")


def _notes(report: StudyReport) -> list[str]:
    return [text for text in (report.answer, *report.cautions, report.about_tests) if text]


def _tables(report: StudyReport) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return caption (empty for the first), heads and rows of each table: outcomes, shares, arms
    alone.
    """
    tables = []
    if report.outcomes and (report.alone == [] or any(o.difference for o in report.outcomes)):
        tables.append(("", *outcome_table([o for o in report.outcomes if o.is_known])))
    if report.shares:
        tables.append(
            (f"Each link's share, {ABOUT_SHARES}.", *outcome_table(report.shares, SHARED))
        )
    if report.alone:
        heads = ["arm", "n", *report.metrics.values()]
        rows = alone_rows(report.alone, list(report.metrics))
        tables.append(("Not compared: mean, and from the least to the most.", heads, rows))
    return tables
