"""Begin a transform or an aggregator, and check one.

    python scripts/new.py transform soft_clip
    python scripts/new.py --check soft_clip

The first command writes a class that multiplies gradients by a field, its yaml file and a row of
its tests, updates the files that are generated from them, and prints the remaining steps. It
overwrites nothing. The second checks one transform or aggregator, or a preset of one, in less than
20 seconds on an idle machine; `scripts/check` runs all checks.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from keyword import iskeyword
from pathlib import Path
from string import Template
from time import monotonic

from gradsurg.plugins.registry import GROUPS

ROOT = Path(__file__).resolve().parents[1]
MAX_LETTERS = 40  # of a name: a longer one does not fit the lines of the templates
LAST_LINES = 12  # of the output of a failed check


@dataclass(frozen=True)
class Kind:
    """A kind of plug-in: the folder of its classes and tests, and templates of its files.

    `tests` are the files that `--check` runs, and `steps` the remaining steps of a contributor:
    file, text to find there for the number of the line, instruction.
    """

    folder: str
    code: str
    yaml: str
    row: str
    tests: tuple[str, ...]
    steps: tuple[tuple[str, str, str], ...]

    def files(self, name: str) -> tuple[str, str, str]:
        """Return the paths of the class, the yaml file and the test rows, from the root."""
        code, yaml = f"gradsurg/{self.folder}/{name}.py", f"conf/{GROUPS[self.folder]}/{name}.yaml"
        return code, yaml, f"tests/{self.folder}/cases.py"


DOCSTRING = "your fields, formula, properties and docstring (see CONTRIBUTING.md)"
YAML = "purpose in one line; '# Paper: ...' and '# Also: other words' if any; every field"
RESULT = "a result computed by hand, one row for each branch of your formula"
DRAWN = "only if the default fields are not visible in the picture: fields to draw it with"
COMMON = (("scripts/gallery.py", "ILLUSTRATED", DRAWN),)
OVER = "only if --check says that a limit of lines is exceeded: raise it by your lines"
COMMON += (("tests/house.py", "ROOMS", OVER),)
COMMON += (("CHANGELOG.md", "### New", "its name in the item that fits, or a line of its own"),)
DROPS = "only if a NaN does not stay in its place: its name"
SHAPES = "only if it does not take tensors of every shape: its name and shapes"
EQUAL = "only for a Gramian aggregator that does not return g for equal rows g: its result"
OPPOSITE = "only for a Gramian aggregator that does not return 0 for g and -g: its result"
DRAWS = "only if it draws them once for all calls instead: its name"

TRANSFORM = Kind(
    "transforms",
    '''"""$cls: multiply the gradient by a factor."""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty


@validated
class $cls(Stateless):
    """Multiply every entry by a factor in (0, 1]: factor * g.

    Any shape. Zero stays zero, NaN stays NaN, an infinity stays infinite, an empty tensor stays
    empty.
    """

    factor: Annotated[float, Field(gt=0, le=1)] = 0.5

    tags = frozenset(
        {
            "elementwise",
            "homogeneous",
            "linear",
            "odd",
            "sign_preserving",
            "norm_non_increasing",
            "deterministic",
            "differentiable",
        }
    )

    def tags_if(self) -> dict[TransformProperty, bool]:
        return {"idempotent": self.factor == 1, "unbiased": self.factor == 1}

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad * self.factor
''',
    """# python -m gradsurg.run transform=$name
# Multiply the gradient by a factor.
$name:
  _target_: gradsurg.$cls
  factor: 0.5
""",
    '    Row("$name", [3.0, -0.5, 0.0], [0.75, -0.125, 0.0], {"factor": 0.25}),\n',
    ("tests/transforms/test_rows.py", "tests/transforms/test_rules.py"),
    (
        (
            "tests/transforms/test_properties.py",
            "OTHERS",
            "only if `tags_if` has conditions: an instance for each",
        ),
        ("tests/transforms/table.py", "DROP_NAN", DROPS),
        ("tests/transforms/cases.py", "SHAPES_OF", SHAPES),
        (
            "tests/hooks/test_batched_backward.py",
            "DRAWS",
            "only if it draws random numbers: its name",
        ),
        ("tests/transforms/test_rules.py", "FIXED_DRAWS", DRAWS),
        *COMMON,
    ),
)
AGGREGATOR = Kind(
    "aggregators",
    '''"""$cls: the same weight for every task."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import (
    FIXED_WEIGHT_PROPERTIES,
    AggregatorContext,
    AggregatorState,
    LossWeighting,
)
from gradsurg.plugins.fields import validated


@validated
class $cls(LossWeighting):
    """The sum of the gradients times a factor: w = factor for every task.

    One task is multiplied by the factor, equal gradients by the factor and their number. Zero
    stays zero, a NaN stays in its columns.
    """

    factor: Annotated[float, Field(gt=0)] = 0.5

    tags = FIXED_WEIGHT_PROPERTIES

    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return torch.full((num_tasks,), self.factor, dtype=torch.float64), state
''',
    """# python -m gradsurg.run task=overlay aggregator=$name
# The sum of the gradients times a factor.
_target_: gradsurg.$cls
factor: 0.5
""",
    '    Row("$name", [[1.0, 2.0], [3.0, -4.0]], [1.0, -0.5], {"factor": 0.25}),\n',
    ("tests/aggregators/test_hand_computed.py", "tests/aggregators/test_gramian.py"),
    (
        ("tests/aggregators/test_gramian.py", "def expected_of_same", EQUAL),
        ("tests/aggregators/test_gramian.py", "def test_opposite_tasks", OPPOSITE),
        *COMMON,
    ),
)
KINDS = {GROUPS[kind.folder]: kind for kind in (TRANSFORM, AGGREGATOR)}
COMPLETENESS = "tests/experiment/test_completeness.py"


def main(words: list[str], root: Path = ROOT) -> int:
    """Run one command and return its exit code: 2 for a name that is refused, with one line."""
    parser = argparse.ArgumentParser(usage=f"new.py {{{','.join(KINDS)}}} NAME, or --check NAME")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--check", metavar="NAME")
    asked = parser.parse_args(words)
    try:
        if asked.check and not asked.words:
            return check(known(asked.check, root), asked.check, CHECKS)
        if asked.check or len(asked.words) != 2 or asked.words[0] not in KINDS:
            raise ValueError(parser.usage)
        kind, name = KINDS[asked.words[0]], asked.words[1]
        steps = begin(kind, name, root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if root == ROOT:
        check(kind, name, GENERATED)
    words = name.replace("_", " ")
    print(f"Does it exist already? python -m gradsurg.run --list {words}", *steps, sep="\n")
    return 0


def known(name: str, root: Path) -> Kind:
    """Return the kind of an existing plug-in. Raises ValueError for another name."""
    for group, kind in KINDS.items():
        if name != "none" and (root / f"conf/{group}/{name}.yaml").exists():
            return kind
    raise ValueError(f"there is no conf/{' or conf/'.join(KINDS)} with a {name}.yaml")


def begin(kind: Kind, name: str, root: Path) -> list[str]:
    """Write the class, the yaml file and the test row, and return the remaining steps.

    Raises ValueError, before anything is written, for a name that is malformed or taken.
    """
    check_name(kind, name, root)
    cls = "".join(part.capitalize() for part in name.split("_"))
    code, yaml, cases = kind.files(name)
    rows, line = with_row(root / cases, name, kind.row)
    for path, text in ((code, kind.code), (yaml, kind.yaml)):
        with (root / path).open("x", encoding="utf-8") as file:
            file.write(Template(text).substitute(name=name, cls=cls))
    (root / cases).write_text(rows, encoding="utf-8")
    first = [(f"{code}:{line_of(root / code, 'class ')}", DOCSTRING), (f"{yaml}:2", YAML)]
    first += [(f"{cases}:{line}", RESULT)]
    lists = [(f"{path}:{line_of(root / path, text)}", say) for path, text, say in kind.steps]
    last = [
        (f"python scripts/new.py --check {name}", "until all is ok; then pyright and scripts/check")
    ]
    steps = enumerate([*first, *lists, *last], 1)
    return [f"{number}. {place}  {text}" for number, (place, text) in steps]


def check_name(kind: Kind, name: str, root: Path) -> None:
    """Raise ValueError for a name that cannot be that of a new file and class."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ValueError(f"'{name}' is no snake_case identifier, as soft_clip is")
    if iskeyword(name) or len(name) > MAX_LETTERS:
        reason = "is a keyword" if iskeyword(name) else f"has more than {MAX_LETTERS} letters"
        raise ValueError(f"'{name}' {reason}")
    spelling = name.replace("_", "")
    paths = [*(root / "gradsurg" / kind.folder).glob("[!_]*.py")]
    paths += [path for group in GROUPS.values() for path in root.glob(f"conf/{group}/*.yaml")]
    for path in paths:
        if path.stem.replace("_", "") == spelling:
            raise ValueError(f"'{name}' is taken: there is {path.relative_to(root)}")
    stub = (root / "gradsurg/__init__.pyi").read_text(encoding="utf-8")
    if found := re.search(rf" as ({spelling})$", stub, re.MULTILINE | re.IGNORECASE):
        raise ValueError(f"'{name}' is taken: there is gradsurg.{found[1]}")


def with_row(path: Path, name: str, row: str) -> tuple[str, int]:
    """Return the text of a file of test rows with one more, and the number of its line.

    It follows the rows of the nearest name that precedes it in the alphabet.
    """
    text = path.read_text(encoding="utf-8")
    ends, start = {}, line_of(path, "ROWS = (")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Row" and node.args:
            ends[ast.literal_eval(node.args[0])] = node.end_lineno or start
    line = ends[max(earlier)] if (earlier := [other for other in ends if other < name]) else start
    lines = text.splitlines(keepends=True)
    new = Template(row).substitute(name=name)
    return "".join([*lines[:line], new, *lines[line:]]), line + 1


def line_of(path: Path, text: str) -> int:
    """Return the number of the first line that begins with a text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.startswith(text))


class Failed(Exception):
    """A check failed; the text says why."""


def check(kind: Kind, name: str, checks: "dict[str, Check]") -> int:
    """Run checks and print a line for each, and the last lines of a failure; return the exit code.

    The generated files that are not up to date are written.
    """
    code = 0
    for label, run in checks.items():
        start = monotonic()
        try:
            mark, said = "ok  ", run(kind, name)
        except Exception as error:  # the code under test may raise anything
            mark, code, said = "FAIL", 1, last_lines(error)
        print(f"{mark} {label:<8} {monotonic() - start:4.1f} s  {said}", flush=True)
    return code


def last_lines(error: Exception) -> str:
    """Return the text of an error, of which the first line fits the line of a check."""
    text = str(error) if isinstance(error, Failed | AssertionError) else repr(error)
    first, *rest = text.strip().splitlines() or [repr(error)]
    return "\n     ".join([first, *rest[-LAST_LINES:]])


def run(*words: str) -> str:
    """Run a Python module and return its output. Raises Failed if its exit code is not 0."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"python -m {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def style(kind: Kind, name: str) -> str:
    """Check the format of the class and of the test rows by ruff."""
    code, _, cases = kind.files(name)
    paths = [path for path in (code, cases) if (ROOT / path).exists()]
    run("ruff", "check", "--quiet", "--output-format=concise", *paths)
    run("ruff", "format", "--quiet", "--check", *paths)
    return ", ".join(paths)


def lines(kind: Kind, name: str) -> str:
    """Check the limits of lines of the folder and of the tests."""
    from tests.house import ROOMS, budget

    room = next(room for room, (places, _) in ROOMS.items() if kind.folder in places)
    rows = [row for row in budget() if row[0] in (room, "tests/")]
    if over := [f"'{room}' from {most} to {count}" for room, count, most in rows if count > most]:
        line = line_of(ROOT / "tests/house.py", f'    "{room}":')
        raise Failed(f"tests/house.py:{line}: raise the limit of {' and of '.join(over)}")
    return ", ".join(f"{room}: {count} of at most {most}" for room, count, most in rows)


def lists(kind: Kind, name: str) -> str:
    """Write the stub, the catalogue and the text of the gallery if they are out of date."""
    import stub

    return changed(*stub.write())


def changed(*paths: Path) -> str:
    """Return a text that names the files that were written."""
    return f"wrote {', '.join(str(path.relative_to(ROOT)) for path in paths)}" * bool(paths) or "ok"


def properties(kind: Kind, name: str) -> str:
    """Check the declared properties, and write the row of the README if it is out of date."""
    from tests.verdict_tables import write, written

    table = import_module(f"tests.{kind.folder}.table")
    row = table.row(name)  # raises AssertionError for a false declaration
    head, *old = written(table.README)
    if row in old or (kind is AGGREGATOR and not (ROOT / kind.files(name)[0]).exists()):
        return "those declared hold"
    rows = {line.split("|")[1].strip(" `").lower().replace("_", ""): line for line in (*old, row)}
    stems = sorted(path.stem for path in ROOT.glob(f"conf/{GROUPS[kind.folder]}/*.yaml"))
    order = [key for stem in stems if (key := stem.replace("_", "")) in rows]
    write(table.README, head, [rows[key] for key in order])
    return changed(table.README)


def picture(kind: Kind, name: str) -> str:
    """Draw the picture of the gallery if it is older than the class, its yaml or the gallery."""
    import gallery

    group = GROUPS[kind.folder]
    entry = next(one for one in gallery.catalogue.list(group) if one.name == name)
    path = gallery.PICTURES / f"{gallery.picture(entry)}.png"
    sources = [ROOT / source for source in (*kind.files(name)[:2], "scripts/gallery.py")]
    newest = max(source.stat().st_mtime for source in sources if source.exists())
    if path.exists() and path.stat().st_mtime >= newest:
        return "ok"
    gallery.store(entry)
    return changed(path)


def tests(kind: Kind, name: str) -> str:
    """Run the tests of this name, and those that compare the lists of names."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # one of hydra must precede hydra
    named = f"[{name}] or [{name}- or -{name}- or -{name}]"
    chosen = f"{named} or every_config_has_a_row or its_class_and"
    marks = "one_in or not slow and not full"
    paths = [str(ROOT / path) for path in (*kind.tests, COMPLETENESS)]
    with redirect_stdout(StringIO()) as out:  # in this process, which has imported torch
        code = pytest.main(["-x", f"--rootdir={ROOT}", "-k", chosen, "-m", marks, *paths])
    if code:
        raise Failed(out.getvalue())
    return out.getvalue().strip().splitlines()[-1]


Check = Callable[[Kind, str], str]
GENERATED: dict[str, Check] = {"lists": lists, "row": properties, "picture": picture}
CHECKS: dict[str, Check] = {"ruff": style, "lines": lines, **GENERATED, "tests": tests}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # tests/
    sys.exit(main(sys.argv[1:]))
