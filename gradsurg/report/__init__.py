"""Reports: from the files of runs to text, tables, figures and a page."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsurg.report.tables import StudyTables


def summary(study: Path | str, only: Collection[str] | None = None) -> str:
    """Return the summary of a study that `python -m gradsurg.report STUDY` prints, as plain text.

    `only` are names of run directories: the summary is of these runs and their controls. Raises
    NotAStudy, in one sentence, if there are no such runs.
    """
    # The terminal's report of one job is imported from here too, and needs none of this.
    from gradsurg.report.study import study_report
    from gradsurg.report.text import overview

    return overview(study_report(Path(study), only, logs=False))


def load_study(folder: str | Path) -> "StudyTables":
    """Read the runs of a study, such as `runs/digits-mlp`, as polars data frames.

    Logs that cannot be read are left out with a warning. Raises NotAStudy, a ValueError, if the
    folder has no runs. torch is not imported.
    """
    from gradsurg.report.tables import study_tables

    return study_tables(Path(folder))
