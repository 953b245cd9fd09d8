"""Compare the numbers that both trees derive from the recorded experiments.

`python -m tests.oracle.claims TREE OUT RECORDS` writes those that TREE derives to OUT: from its own
`experiments`, and from the copy in RECORDS, whose tables it also writes.
"""

import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.oracle.reference import WORKING_TREE, assert_imported_from, start
from tests.oracle.side import SIDES, differences, report

TOLERANCE = 1e-9


def main(reference: Path) -> int:
    """Derive all numbers in both trees, and compare them."""
    with tempfile.TemporaryDirectory() as temporary:
        processes, outs = [], []
        for side, tree in zip(SIDES, (reference, WORKING_TREE), strict=True):
            records = Path(temporary) / side
            shutil.copytree(reference, records, ignore=shutil.ignore_patterns("*.py", "docs"))
            outs.append(records / "claims.json")
            processes.append(start("claims", tree, str(outs[-1]), str(records)))
        if codes := [code for process in processes if (code := process.wait())]:
            raise RuntimeError(f"the claims: a process ended with code {codes[0]}")
        expected, found = (json.loads(out.read_text("utf-8")) for out in outs)
    papers, numbers = len(expected["records"]), sum(1 for _ in _leaves(expected))
    print(f"claims: {numbers} values of {papers} experiments compared")
    lines = [*differences("", found, expected, TOLERANCE)]
    return report("claims", [line.lstrip() for line in lines])


def _leaves(values: Any) -> Iterator[object]:  # Any: what JSON can hold
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _leaves(value)
    else:
        yield values


def _derived(root: Path) -> dict[str, object]:
    """The verdicts, bands and tables of each experiment below a checkout's root."""
    from gradsurg.reproduce.expected import papers, read_expected
    from gradsurg.reproduce.record import band_rows, read_record, recorded, tables

    claims: dict[str, object] = {}
    for paper in papers(root):
        expected, record = read_expected(root, paper), read_record(root / "experiments" / paper)
        if record is None:
            continue
        found = recorded(expected, record)
        claims[paper] = {
            "verdicts": {verdict.name: [verdict.result, verdict.again] for verdict in found},
            "bands": band_rows(found),
            "tables": tables(expected, record).splitlines(),
            "record": {key: record[key] for key in ("form", "bands", "arms")},
        }
    return claims


def _tables(root: Path) -> dict[str, list[str]]:
    """The tables that the command prints and writes from the records, line by line."""
    from gradsurg.reproduce.command import main as reproduce

    printed = io.StringIO()
    with redirect_stdout(io.StringIO()):
        listed = reproduce(["--list"], root)
    with redirect_stdout(printed):
        written = reproduce(["--table", "--write"], root)
    files = {
        str(path.relative_to(root)): path.read_text("utf-8").splitlines()
        for path in sorted(root.rglob("README.md"))
    }
    codes = {"exit codes": [str(listed), str(written)]}
    return codes | {"printed": printed.getvalue().splitlines()} | files


def dump(tree: Path, out: Path, records: Path) -> None:
    """Write the numbers that `tree` derives."""
    assert_imported_from(tree)
    derived = {"own records": _derived(tree), "records": _derived(records)}
    tables = _tables(records)
    out.write_text(json.dumps({**derived, "tables": tables}), encoding="utf-8")


if __name__ == "__main__":
    dump(*map(Path, sys.argv[1:]))
