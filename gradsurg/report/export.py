"""The files of a report: page, figures, Parquet, and the tables for Markdown and LaTeX."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from gradsurg.experiment.files import DRAFT_FOLDER, locked
from gradsurg.experiment.run_directory import REPORT_LOCK
from gradsurg.experiment.run_reader import BrokenFile, parsed
from gradsurg.loggers.base import StudyInfo
from gradsurg.report import charts, conflicts, paper
from gradsurg.report.cautions import cautions
from gradsurg.report.compare import compare
from gradsurg.report.experiment import experiment
from gradsurg.report.measures import parts
from gradsurg.report.page import page
from gradsurg.report.study import Study
from gradsurg.report.tables import latex, markdown
from gradsurg.report.terminal import effort
from gradsurg.report.tuning import read_tunings, tuning_frames
from gradsurg.report.verdict import answer, sentence, sweeps
from gradsurg.stats import Margin

PAGE = "index.html"
WRITTEN = ".written.json"  # the names of the files of the report that lies there
INFO = {"seeds": "n", "of": "planned", "not compared": "not_compared"}
"""Names that loggers have for columns of the comparison."""


def write_report(
    study: Study,
    out: Path,
    figures: bool = True,
    margin: Margin | None = None,
) -> Path:
    """Write all files of a report atomically, each by a rename; return the page's path.

    Files of an earlier report that this one does not write are removed; other files stay. Raises
    OSError, with the folder's name, if it cannot be written.
    """
    if out.is_symlink() and out.parent.resolve() == study.folder.resolve():
        raise OSError(f"{out} is a link; name its target with --out to write there")
    out.mkdir(parents=True, exist_ok=True)
    frame = compare(study, margin)
    # on the same disk, as files are renamed into place
    with (
        locked(out / REPORT_LOCK, wait=True),
        TemporaryDirectory(prefix=DRAFT_FOLDER, dir=out) as folder,
    ):
        draft = Path(folder)
        frames = {"runs": study.runs, "comparison": frame, "effects": study.effects}
        further = {"conflicts": study.conflicts, "parts": parts(study)}
        frames |= {name: rows for name, rows in further.items() if len(rows)}
        for name, rows in frames.items():
            _write_parquet(rows, draft / f"{name}.parquet")
        verdict = answer(study, frame, margin)
        warned, swept = cautions(study, frame), sweeps(study, frame)
        notes = [*verdict, *swept, *warned]
        (draft / "outcome.md").write_text(markdown(study, frame, notes), encoding="utf-8")
        (draft / "outcome.tex").write_text(latex(study, frame, notes=warned), encoding="utf-8")
        about = experiment(study), conflicts.sections(study), effort(study)
        (draft / PAGE).write_text(
            page(study, frame, verdict, warned, *about, swept), encoding="utf-8"
        )
        drawn = _figures(study, frame) if figures else {}
        with ThreadPoolExecutor() as threads:  # the converter needs no Python
            list(threads.map(lambda name: paper.save(drawn[name], draft / name), drawn))
        _move(draft, out)
    return out / PAGE


def _move(draft: Path, out: Path) -> None:
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


def _write_parquet(table: pl.DataFrame, file: Path) -> None:
    """Write a table; polars itself raises no OSError on a full disk."""
    content = BytesIO()
    table.write_parquet(content)
    file.write_bytes(content.getbuffer())


def _figures(study: Study, frame: pl.DataFrame) -> dict[str, Any]:  # Any: JSON
    """The charts that are written as files, by the stems of their names."""
    drawn = paper.figures(study, frame)
    drawn |= conflicts.conflict_charts(study, facet=True)
    tuned = tuning_frames(read_tunings(study.folder, study.arms)[0])
    drawn |= paper.numbered("tuning", map(charts.tuning_chart, tuned))
    return {name: chart.to_dict(validate=False) for name, chart in drawn.items()}


def written(out: Path) -> set[str]:
    """Return the names of the files in `out` that earlier reports wrote.

    Raises OSError, with the name of the list, if that is no JSON.
    """
    file = out / WRITTEN
    if out.is_symlink() or file.is_symlink() or not file.exists():
        return set()
    try:
        names = parsed(file, file.read_bytes())
    except BrokenFile as error:
        raise OSError(f"{error}; remove {file}") from error
    # whatever the file says, no folder and nothing outside of this one is touched
    there = {path.name for path in out.iterdir() if path.is_symlink() or path.is_file()}
    return there.intersection(map(str, names)) if isinstance(names, list) else set()


def figures_in(out: Path) -> list[Path]:
    """The figures of the report that lies there, as PNG."""
    paths = [out / name for name in sorted(written(out)) if name.endswith(".png")]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def study_info(study: Study, out: Path) -> StudyInfo:
    """Return the study as loggers receive it: a row an arm and metric, and the figures in `out`."""
    whole = compare(study)
    frame = whole.filter(pl.col("block").is_null()).drop("block", "differences", "seeds")
    renamed = frame.rename({column: name for name, column in INFO.items()})
    facts: dict[str, list[str]] = {}
    for name, text in experiment(study):
        facts.setdefault(name, []).append(text)
    ended = [run for run in study.all_runs if run.summary]
    places = [{**run.made_with, "hardware": (run.summary or {}).get("hardware")} for run in ended]
    return StudyInfo(
        study.folder.name,
        out,
        renamed.to_dicts(),
        [(path.stem, path) for path in figures_in(out)],
        sentence(whole, study),
        {name: "\n".join(texts) for name, texts in facts.items()},
        [out / PAGE, out / "comparison.parquet"],
        {arm.name: arm.runs[0].config for arm in study.arms if not arm.is_control},
        [dict(place) for place in dict.fromkeys((*place.items(),) for place in places)],
    )
