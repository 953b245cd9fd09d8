"""Reports: from the files of runs to text, tables, figures and a page."""

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from gradsurg.plugins.extras import need

if TYPE_CHECKING:
    from gradsurg.report.study import Study


def summary(study: Path | str, only: Collection[str] | None = None, margin: str = "") -> str:
    """Return the summary of a study that `python -m gradsurg.report STUDY` prints, as plain text.

    `only` are names of run directories: the summary is of these runs and their controls. `margin`
    asks for equivalence, for example `0.5pp`. Raises NotAStudy, in one sentence, if there are no
    such runs.
    """
    # The terminal's report of one job is imported from here too, and needs none of this.
    from gradsurg.report.study import read_study
    from gradsurg.report.terminal import overview
    from gradsurg.stats import parse_margin

    return overview(read_study(Path(study), only), parse_margin(margin) if margin else None)


def load_study(folder: str | Path) -> "Study":
    """Read the runs of a study, such as `runs/digits-mlp`, as polars data frames.

    Logs that cannot be read are left out with a warning. Raises NotAStudy, a ValueError, if the
    folder has no runs. torch is not imported. Needs the extra `run`; ImportError without it.
    """
    need("run")
    from gradsurg.report.study import read_study

    study = read_study(Path(folder))
    assert study.metrics is not study.effects is not study.conflicts  # all are read
    for fault in study.faults:
        warnings.warn(f"left out, because it cannot be read: {fault}", stacklevel=2)
    return study
