"""The command `python -m gradsurg.report runs/first`; libraries are imported after parsing."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradsurg.plugins.messages import printable, typed_command
from gradsurg.plugins.pipes import ignore_closed_pipes

if TYPE_CHECKING:
    from gradsurg.report.load import Stamp

WRONG_INPUT = 2
EVERY = 3.0  # seconds between two looks


def main(words: Sequence[str] | None = None) -> int:
    """Print the summary of a study and write its report; with --watch do so until interrupted."""
    arguments = parser().parse_args(words)
    changed = [key for key in ("metric", "arms", "style", "spread") if _is_given(arguments, key)]
    if changed and not arguments.paper:
        print(f"--{changed[0]}: needs --paper FOLDER", file=sys.stderr)
        return WRONG_INPUT
    from gradsurg.report.compare import compare_pairs
    from gradsurg.report.export import write_report
    from gradsurg.report.load import NotAStudy
    from gradsurg.report.paper import write_paper
    from gradsurg.report.study import study_report
    from gradsurg.report.text import print_overview, print_pairs

    out = arguments.out or arguments.study / "report"
    try:
        if arguments.watch:
            return _watch(arguments.study, out)
        report = study_report(arguments.study)
        if arguments.compare is not None:
            names = arguments.compare or [arm.name for arm in report.arms]
            print_pairs(compare_pairs(report.arms, names))
            return 0
        if arguments.paper:
            choices = (arguments.metric, arguments.arms, arguments.style, arguments.spread)
            try:
                files = write_paper(report, arguments.paper, *choices)
            except OSError as error:
                raise OSError(f"the figures cannot be written: {error}") from None
            print(
                printable(f"{len(files)} files in {arguments.paper}: {files[0].name} .. table.tex")
            )
            return 0
    except (NotAStudy, LookupError, OSError) as error:
        print(
            printable(str(error.args[0] if isinstance(error, LookupError) else error)),
            file=sys.stderr,
        )
        return WRONG_INPUT
    print_overview(report)
    try:
        page = write_report(report, out)
    except OSError as error:  # a full disk, or a folder of somebody else
        text = f"the report cannot be written: {error}; --out FOLDER writes it elsewhere"
        print(printable(text), file=sys.stderr)
        return WRONG_INPUT
    print(printable(f"report: {page}"))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog=typed_command("gradsurg.report"),
        description="Print the summary of a study, and write its report: a page, tables, figures.",
    )
    made.add_argument("study", type=Path, help="the folder of a study, as runs/first")
    made.add_argument("--out", type=Path, help="where the report goes; default: STUDY/report")
    watch = "write the report anew when files change, until interrupted; the page reloads itself"
    made.add_argument("--watch", action="store_true", help=watch)
    pairs = "compare these arms with each other, by the names that the report prints; all without"
    made.add_argument("--compare", nargs="*", metavar="ARM", help=pairs)
    paper = "write figures (PDF, SVG, PNG; 3.3 and 6.8 inches wide) and a LaTeX table here instead"
    made.add_argument("--paper", type=Path, metavar="FOLDER", help=paper)
    made.add_argument("--metric", default="", help="with --paper: one metric, as test/loss")
    made.add_argument(
        "--arms", nargs="+", default=[], metavar="ARM", help="with --paper: only these"
    )
    styles = "with --paper: the font; default: sans"
    made.add_argument("--style", choices=("sans", "serif"), default="sans", help=styles)
    spread = "with --paper: behind a mean, its 95 %% interval (default) or the sd over seeds"
    made.add_argument("--spread", choices=("interval", "sd"), default="interval", help=spread)
    return made


def _is_given(arguments: argparse.Namespace, key: str) -> bool:
    return getattr(arguments, key) != parser().get_default(key)


def _watch(study: Path, out: Path) -> int:
    """Look every few seconds; a report that takes long to write is written less often."""
    from gradsurg.report.export import write_report
    from gradsurg.report.load import stamp
    from gradsurg.report.study import study_report
    from gradsurg.report.text import print_overview

    seen: Stamp = {}
    report = None
    try:
        while True:
            began = time.monotonic()
            now = stamp(study)
            if report is None or now != seen:
                report, seen = study_report(study), now
                page = write_report(report, out, refresh=EVERY)
                states = ", ".join(f"{number} {state}" for state, number in report.states.items())
                print(f"{time.strftime('%H:%M:%S')}  {states}  {page}", flush=True)
            time.sleep(max(EVERY, 2 * (time.monotonic() - began)))
    except KeyboardInterrupt:
        if report is not None:
            report = study_report(study)
            write_report(report, out)  # once more, without the reload
            print_overview(report)
        return 0


if __name__ == "__main__":
    ignore_closed_pipes()
    sys.exit(main())
