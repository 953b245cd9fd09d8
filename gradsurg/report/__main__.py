"""The command `python -m gradsurg.report runs/first`; libraries are imported after parsing."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradsurg.plugins.extras import MissingExtra, need
from gradsurg.plugins.messages import printable, typed_command
from gradsurg.plugins.pipes import ignore_closed_pipes

if TYPE_CHECKING:
    from gradsurg.stats import Margin

WRONG_INPUT = 2
OF_PAPER = ("metric", "arms", "style", "spread")


def main(words: Sequence[str] | None = None) -> int:
    """Print the summary of a study and write its report."""
    arguments = parser().parse_args(words)
    for key in OF_PAPER if not arguments.paper else ():
        if getattr(arguments, key) != parser().get_default(key):
            print(f"--{key}: needs --paper FOLDER", file=sys.stderr)
            return WRONG_INPUT
    from gradsurg.stats import parse_margin

    try:
        need("run")
        margin = parse_margin(arguments.margin) if arguments.margin else None
        _run(arguments, margin)
    except (LookupError, OSError, ValueError, MissingExtra) as error:
        text = error.args[0] if isinstance(error, LookupError) else error
        print(printable(str(text)), file=sys.stderr)
        return WRONG_INPUT
    return 0


def _run(arguments: argparse.Namespace, margin: "Margin | None") -> None:
    from gradsurg.experiment.run_directory import remove_leftovers
    from gradsurg.report.compare import compare_pairs
    from gradsurg.report.export import write_report
    from gradsurg.report.paper import write_paper
    from gradsurg.report.study import read_study
    from gradsurg.report.terminal import overview, pairs_text

    remove_leftovers(arguments.study)
    study = read_study(arguments.study)
    if arguments.compare is not None:
        names = arguments.compare or [arm.name for arm in study.arms]
        print(pairs_text(study, compare_pairs(study, names, margin), margin))
        return
    if arguments.paper:
        choices = {key: getattr(arguments, key) for key in OF_PAPER}
        files = write_paper(study, arguments.paper, **choices)
        print(printable(f"{len(files)} files in {arguments.paper}: {files[0].name} .. table.tex"))
        return
    print(overview(study, margin))
    try:
        page = write_report(study, arguments.out or arguments.study / "report", margin=margin)
    except OSError as error:  # a full disk, or a folder of somebody else
        text = f"the report cannot be written: {error}; --out FOLDER writes it elsewhere"
        raise OSError(text) from None
    print(printable(f"report: {page}"))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog=typed_command("gradsurg.report"),
        usage="%(prog)s STUDY [options]",
        description="Print the summary of a study, and write its report: a page, tables, figures.",
    )
    add = made.add_argument
    add("study", type=Path, metavar="STUDY", help="the folder of a study, such as runs/first")
    add("--out", type=Path, metavar="FOLDER", help="where the report goes; default: STUDY/report")
    margin = (
        "arms that differ by less are equivalent: 0.02 (in the metric's unit), 0.5pp (percentage "
        "points) or 2%% (of the control's mean)"
    )
    add("--margin", default="", help=margin)
    pairs = (
        "compare these arms with each other, or all of them if none is given; give STUDY before "
        "it: runs/first --compare clip sign"
    )
    add("--compare", nargs="*", metavar="ARM", help=pairs)
    paper = (
        "in place of the report, write figures (PDF, SVG, PNG; 3.3 and 6.8 inches wide) and a "
        "LaTeX table into this folder"
    )
    add("--paper", type=Path, metavar="FOLDER", help=paper)
    add("--metric", default="", help="with --paper: one metric, such as test/loss")
    add("--arms", nargs="+", default=[], metavar="ARM", help="with --paper: only these arms")
    add("--style", choices=("sans", "serif"), default="sans", help="with --paper: the font [sans]")
    spreads = (
        "with --paper: printed beside each mean in the LaTeX table: the 95 %% interval or the "
        "standard deviation over the seeds; default: interval"
    )
    add("--spread", choices=("interval", "sd"), default="interval", help=spreads)
    return made


if __name__ == "__main__":
    ignore_closed_pipes()
    sys.exit(main())
