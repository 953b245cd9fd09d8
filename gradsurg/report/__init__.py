"""From the files of runs to what a person reads."""

from collections.abc import Collection
from pathlib import Path


def summary(study: Path | str, only: Collection[str] | None = None) -> str:
    """What `python -m gradsurg.report STUDY` prints of a study, as plain text; nothing is written.

    `only` are names of run directories: of these alone, beside their controls. Raises NotAStudy, in
    one sentence, if there are no such runs.
    """
    # The terminal's report of one job is imported from here too, and needs none of this.
    from gradsurg.report.study import study_report
    from gradsurg.report.text import overview

    return overview(study_report(Path(study), only, logs=False))
